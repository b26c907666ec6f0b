"""Look at processes of this host, as Linux shows them in ``/proc``."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

__all__ = ["has_ended", "identity", "is_stopped", "sockets"]

_STARTED = 19  # the place of the start time behind the state, in /proc/<pid>/stat


def identity() -> str:
    """Return what tells this process from all others, on all hosts; empty where there is no /proc.

    Processes of different containers may have one number, and one may be reused.
    """
    with contextlib.suppress(OSError):
        return f"{_place()} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    return ""


def is_stopped(process: str) -> bool:
    """Whether a process with this identity is on this host, and a signal has stopped it.

    >>> is_stopped(identity())
    False
    """
    return _state(process) == "T"


def has_ended(process: str) -> bool:
    """Whether a process with this identity was on this host, and has ended.

    >>> has_ended(identity())
    False
    """
    return _state(process) in ("X", "Z")


def _state(process: str) -> str:
    """Return the letter of a process's state; nothing if it is not on this host."""
    with contextlib.suppress(OSError, ValueError):
        place, number, started = process.rsplit(" ", 2)
        if place != _place():
            return ""
        try:
            stat = _stat(int(number))
        except FileNotFoundError:
            return "X"
        return stat[0] if stat[_STARTED] == started else "X"
    return ""


def sockets() -> set[tuple[int, str]]:
    """Return the descriptors of the sockets of this process; none where there is no /proc.

    Each with the socket's own name: descriptors are used again.
    """
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # one that was closed since
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found.add((int(number), name))
    return found


@functools.cache
def _place() -> str:
    """Return the boot of this host, and the namespace in which processes are numbered."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _stat(number: int) -> list[str]:
    """Return the state of a process, and what follows it."""
    text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
