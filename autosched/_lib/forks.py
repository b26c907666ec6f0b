"""Detect child processes after a fork, and release their locks.

A child of ``os.fork`` has only the thread that forked. Locks that other threads of the parent held
at that moment stay locked in the child, and nothing releases them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_to_call: list[Callable[[], None]] = []
_forks = [0]


def forks() -> int:
    """Return the number of forks between this process and the first one.

    Threads that were started under another number do not exist here.
    """
    return _forks[0]


def rlock() -> Any:
    """Return an RLock that is free in a child process, unless the forking thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def in_child(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function in every child process, immediately after the fork."""
    _to_call.append(call)
    return call


def _forked() -> None:
    _forks[0] += 1
    for lock in list(_locks):
        if not lock._is_owned():
            with contextlib.suppress(AttributeError):  # private to Python, which has it since 3.9
                lock._at_fork_reinit()
    for call in _to_call:
        call()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
