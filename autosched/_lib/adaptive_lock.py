"""Locks that a thread awaits actively for a moment before it sleeps.

A sleeping thread is woken within 20 to 50 microseconds, which is as long as a short task. So
threads that wait for each other many times in a run wait actively first, as those of OpenMP do.
That pays only if each has a core. The lock is an extension module, ``adaptive_lock.cpp``: Python
code that waits actively would keep the global lock from the thread that it waits for.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from autosched._lib import extension
from autosched._lib.logs import LOG

__all__ = ["Lock", "lock_maker"]

_ACTIVE = 0.5e-3  # seconds of active waiting


class Lock(Protocol):
    """What the locks of this module and of ``threading`` have in common."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait until the lock is free, and lock it; return whether that was in time."""

    def release(self) -> None:
        """Let another thread acquire the lock. Raises RuntimeError if it is free."""

    def locked(self) -> bool:
        """Whether the lock is not free."""


def lock_maker(threads: int) -> Callable[[], Lock]:
    """Return what makes locks for so many threads: adaptive ones if each of them has a core.

    Otherwise, locks that do not wait actively. Those of this module look for signals before a thread
    sleeps, unlike those of ``threading``.

    >>> lock = lock_maker(2)()
    >>> lock.acquire(), lock.locked(), lock.acquire(timeout=0.001), lock.release()
    (True, True, False, None)
    """
    adaptive = _adaptive() if threads > 1 else None
    if adaptive is None:
        return threading.Lock
    return functools.partial(adaptive, _ACTIVE if threads <= _cores() else 0.0)


def _cores() -> int:
    """Return the number of cores that this process can use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@functools.cache
def _adaptive() -> Any:
    """Return the class of adaptive locks; None if it cannot be compiled."""
    if not extension.is_possible():
        return None
    try:
        return extension.loaded("adaptive_lock").Lock
    except Exception as error:
        why = extension.described(error)
        LOG.info("threads sleep while they wait for each other, and wake up late: %s", why)
        return None
