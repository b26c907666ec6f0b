"""Define the logger ``autosched``, and find the user's line, to which warnings point.

The logger logs captures, recaptures and plans, with their seconds; with level DEBUG, also the
tracebacks of tasks that failed while they were recorded. To show them:

    logging.basicConfig(level=logging.INFO)
"""

from __future__ import annotations

import functools
import logging
import sys
from types import FrameType

LOG = logging.getLogger("autosched")
LOG.addHandler(logging.NullHandler())


def users_line() -> tuple[str, int]:
    """Return the file and the number of the user's line."""
    frame, _ = users_frame()
    return frame.f_code.co_filename, frame.f_lineno


def users_frame() -> tuple[FrameType, int]:
    """Find the nearest frame outside this package (but for the demo) and torch.

    Return it with the ``stacklevel`` that it has for a warning of the caller.
    """
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    return frame, level


@functools.cache
def _is_library(module: str) -> bool:
    inside = module.partition(".")[0] in ("autosched", "torch", "contextlib")
    return inside and module != "autosched.demo"
