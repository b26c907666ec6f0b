"""Compare several machines and policies: ``compare()`` in ``compare``."""
