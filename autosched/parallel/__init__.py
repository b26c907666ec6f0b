"""The training systems of the book, on autosched's public API alone."""
