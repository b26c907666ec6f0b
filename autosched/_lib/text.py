"""Format times, amounts, lists of names and tables as text."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile, zip_longest

_PREFIXES = ("", "k", "M", "G", "T", "P")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


def difference(first: str, one: Iterable[str], second: str, other: Iterable[str]) -> str:
    """Return the first line in which two descriptions differ, below each other; "" if none does.

    >>> print(difference("saved", ["task a", "task b"], "given", ["task a"]))
    <BLANKLINE>
        saved:  task b
        given:  nothing more
    """
    for line, other_line in zip_longest(one, other, fillvalue="nothing more"):
        if line != other_line:
            return f"\n    {first}:  {line}\n    {second}:  {other_line}"
    return ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines with cells in columns, the first ``left`` of them left-aligned.

    >>> table(["task", "ms"], [("h", "1.25"), ("loss", "0.5")])
    ['task    ms', 'h     1.25', 'loss   0.5']
    """
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(_cells(line, widths, left)).rstrip() for line in lines]


def _cells(line: Sequence[str], widths: Sequence[int], left: int) -> Iterable[str]:
    for i, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.ljust(width) if i < left else cell.rjust(width)


def wrapped(text: str, first: str = "", indent: int = 0) -> list[str]:
    """Wrap a text at 100 columns; ``first`` precedes it, other lines are indented."""
    other = " " * indent
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=other, break_on_hyphens=False
    )


# ---- numbers


def duration(seconds: float) -> str:
    """Return a time in a suitable unit, to three digits.

    >>> duration(0), duration(0.00125), duration(0.0009999999), duration(1234)
    ('0 us', '1.25 ms', '1 ms', '1,234 s')
    """
    rounded = float(f"{seconds:.3g}")  # may round up to the next unit, which is used then
    scale, unit = time_unit(rounded)
    if abs(rounded) >= 99.95 * scale:
        return f"{seconds / scale:,.0f} {unit}"
    return f"{rounded / scale:.3g} {unit}"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and symbol of the unit for a time."""
    size = abs(seconds)
    if size >= 1.0:
        return 1.0, "s"
    if size >= 1e-3:
        return 1e-3, "ms"
    return 1e-6, "us"


def amount(number: float, unit: str) -> str:
    """Return a number with three digits, and a unit with a suitable prefix.

    >>> amount(0, "B"), amount(25e9, "B/s"), amount(999.7, "B"), amount(math.inf, "B/s")
    ('0 B', '25 GB/s', '1 kB', 'inf B/s')
    """
    if math.isinf(number):
        return f"inf {unit}"
    last = len(_PREFIXES) - 1
    power = next((i for i in range(last) if abs(number) < 999.5 * 1000**i), last)
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}{unit}"


def percent(share: float) -> str:
    """Return a part of a whole as a percentage.

    >>> percent(0.314), percent(0.0004), percent(0)
    ('31%', '<1%', '0%')
    """
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


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


# ---- names


def device_list(names: Sequence[str]) -> str:
    """Return the names of devices, or their number if there are more than three.

    >>> device_list(["cuda:0"]), device_list(["cuda:0", "cuda:1"]), device_list(list("abcde"))
    ('cuda:0', 'cuda:0 and cuda:1', 'five devices')
    """
    return _enumeration(names) if len(names) <= 3 else f"{spelled(len(names))} devices"


def ranges(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield names of devices with texts; four or more in a row with one text are one.

    >>> list(ranges((f"cuda:{i}", "idle") for i in range(64)))
    [('cuda:0 to 63', 'idle')]
    """

    def key(item: tuple[int, tuple[str, str]]) -> tuple[str, str, int]:
        position, (name, text) = item
        kind, _, index = name.partition(":")
        return kind, text, int(index) - position if index.isdigit() else 0

    for (_, text, _), same in groupby(enumerate(rows), key):
        names = [name for _, (name, _) in same]
        if len(names) > 3:
            names = [f"{names[0]} to {names[-1].partition(':')[2]}"]
        yield from ((name, text) for name in names)


def name_list(names: Sequence[str], most: int = 3) -> str:
    """Return the first few names in quotes, and the number of the others.

    >>> name_list(["a", "b"]), name_list(list("abcde"))
    ("'a' and 'b'", "'a', 'b', 'c' and 2 more")
    """
    shown = list(map(repr, names[:most]))
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most:,} more"
    return _enumeration(shown)


def _enumeration(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def shortened(name: str, most: int = 32) -> str:
    """Return a name shortened in the middle; its end is more informative.

    >>> shortened("layer1.0.conv2.convolution", most=20)
    'layer1...convolution'
    """
    return name if len(name) <= most else f"{name[: most // 3]}...{name[most // 3 + 3 - most :]}"


def natural(name: str) -> list[str | int]:
    """Return a key for natural sorting of names.

    >>> sorted(["cuda:10", "cuda:9", "cpu"], key=natural)
    ['cpu', 'cuda:9', 'cuda:10']
    """
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def common_prefix(paths: Iterable[Sequence[str]]) -> list[str]:
    """Return the first parts that paths have in common.

    >>> common_prefix([("layer1", "0", "conv"), ("layer1", "1")])
    ['layer1']
    """
    same = takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))
    return [part for part, *_ in same]


def file_name(path: str) -> str:
    """Return the last part of a path, also of one of Windows.

    >>> file_name("models/mlp.py:12")
    'mlp.py:12'
    """
    return path.replace("\\", "/").rpartition("/")[2]
