"""Allow one capture at a time, in one thread.

Tracing changes state that all threads share: torch's functions, hooks of all modules, and what
modules hold. Knows no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autosched._lib.forks import rlock
from autosched.errors import CaptureError

_LOCK = rlock()


def is_capturing() -> bool:
    """Return whether a capture is in progress in this thread."""
    return bool(_LOCK._is_owned())


def check_not_capturing(what: str) -> None:
    """Raise CaptureError if a function is being captured that calls ``what``."""
    if is_capturing():
        raise CaptureError(
            f"{what} is called in a function that is being captured; call the function itself there"
        )


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Wait until no other thread captures, and exclude others meanwhile."""
    check_not_capturing("asc.capture")
    with _LOCK:
        yield
