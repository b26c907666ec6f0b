"""Words: times, amounts and lists as explanations write them."""

from __future__ import annotations

from collections.abc import Sequence

from autosched.task import Task
from autosched.viz.paint import duration

__all__ = ["amount", "count", "duration", "names", "place", "share", "spelled"]

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def amount(nbytes: float) -> str:
    """Return bytes for readers.

    >>> amount(64e6), amount(1500), amount(8)
    ('64 MB', '1.5 KB', '8 B')
    """
    scale, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if nbytes >= pair[0]), (1.0, "B"))
    return f"{nbytes / scale:.3g} {unit}"


def count(number: int, noun: str) -> str:
    """Return how many there are.

    >>> count(1, "task"), count(1200, "task")
    ('1 task', '1,200 tasks')
    """
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def spelled(number: int) -> str:
    """Return a small number as a word."""
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def names(items: Sequence[str], most: int = 3) -> str:
    """Return a few names.

    >>> names(["a", "b"]), names(list("abcde"))
    ("'a' and 'b'", "'a', 'b', 'c' and 2 more")
    """
    shown = [repr(item) for item in items[:most]]
    if len(items) > most:
        return f"{', '.join(shown)} and {len(items) - most:,} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def place(task: Task) -> str:
    """Return where the user added a task: the file without its folders, and the line."""
    file, line = task.origin.where
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}"


def share(part: float) -> str:
    """Return a part of a whole as a percentage.

    >>> share(0.314), share(0.0004), share(0)
    ('31%', '<1%', '0%')
    """
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"
