"""Format tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["amount", "table"]

_PREFIXES = ("", "k", "M", "G", "T", "P")


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


def amount(number: float, unit: str) -> str:
    """Return a number with three digits, and a unit with a suitable prefix.

    >>> amount(0, "B"), amount(25e9, "B/s"), amount(999.7, "B"), amount(math.inf, "B/s")
    ('0 B', '25 GB/s', '1 kB', 'inf B/s')
    """
    if math.isinf(number):
        return f"inf {unit}"
    power = next(
        (i for i in range(len(_PREFIXES)) if abs(number) < 999.5 * 1000**i), len(_PREFIXES) - 1
    )
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}{unit}"
