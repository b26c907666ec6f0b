"""Allow one capture at a time, in one thread.

Tracing changes state that all threads share: torch's functions, hooks of all modules, and what
modules hold. Knows no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from autosched.errors import CaptureError

__all__ = ["capturing", "check_not_capturing", "is_capturing"]


class _Turn:
    """The thread that captures, and the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: int | None = None  # that captures now


_TURN = _Turn()
if hasattr(os, "register_at_fork"):  # a child has no thread that would release the lock
    os.register_at_fork(after_in_child=_TURN.__init__)  # type: ignore[misc]


def is_capturing() -> bool:
    """Return whether a capture is in progress in this thread."""
    return _TURN.thread == threading.get_ident()


def check_not_capturing(what: str) -> None:
    """Raise CaptureError if ``what`` is called by a function that is being captured."""
    if is_capturing():
        raise CaptureError(
            f"{what} is called in a function that is being captured; call the plain function there"
        )


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Wait until no other thread captures, and exclude others meanwhile."""
    check_not_capturing("asc.capture")
    with _TURN.lock:
        _TURN.thread = threading.get_ident()
        try:
            yield
        finally:
            _TURN.thread = None
