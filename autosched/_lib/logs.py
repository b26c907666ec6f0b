"""The logger ``autosched``: captures, recaptures and plans, with the seconds that they took.

    logging.basicConfig(level=logging.INFO)

shows them. Knows nothing else.
"""

from __future__ import annotations

import logging

__all__ = ["LOG"]

LOG = logging.getLogger("autosched")
LOG.addHandler(logging.NullHandler())
