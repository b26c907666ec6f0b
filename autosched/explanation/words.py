"""Format times, amounts and lists for explanations."""

from __future__ import annotations

from collections.abc import Sequence

from autosched.graph.task import Task

__all__ = ["count", "joined", "names", "place", "share", "short", "spelled"]

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "task"), count(1200, "copy")
    ('1 task', '1,200 copies')
    """
    several = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else several}"


def spelled(number: int) -> str:
    """Return a small number as a word."""
    return _NUMBERS[number] if number < len(_NUMBERS) else str(number)


def joined(items: Sequence[str], most: int = 3) -> str:
    """Return the names of devices, or their number.

    >>> joined(["cuda:0"]), joined(["cuda:0", "cuda:1"]), joined(list("abcde"))
    ('cuda:0', 'cuda:0 and cuda:1', 'five devices')
    """
    if len(items) > most:
        return f"{spelled(len(items))} devices"
    return " and ".join(filter(None, (", ".join(items[:-1]), *items[-1:])))


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
    """Return the location where the user added a task: file name and line."""
    file, line = task.origin.where
    return f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line}"


def short(name: str, most: int = 32) -> str:
    """Return a name shortened for a table: the beginning and, more informative, the end.

    >>> short("layer1.0.conv2.convolution", most=20)
    'layer1...convolution'
    """
    return name if len(name) <= most else f"{name[: most // 3]}...{name[most // 3 + 3 - most :]}"


def share(part: float) -> str:
    """Return a part of a whole as a percentage.

    >>> share(0.314), share(0.0004), share(0)
    ('31%', '<1%', '0%')
    """
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"
