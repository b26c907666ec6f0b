"""Curve: how long a step is predicted to take, by the number of micro-batches and by order; and so, which is best.

Many micro-batches leave small bubbles, and cost more launches, and work that is too small for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Tried"]


@dataclass(frozen=True)
class Tried:
    """One way to run a step: seconds, the share of time in which devices idle, the most bytes on a device.

    ``fits``: whether each device has that much memory.
    """

    order: str
    chunks: int
    seconds: float
    idle: float
    nbytes: float
    fits: bool


@dataclass(frozen=True)
class Curve:
    """What was tried for a batch of so many rows. Print it."""

    rows: int
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """The fastest that fits; of equal ones the first, which has fewer micro-batches."""
        return min((one for one in self.tried if one.fits), key=lambda one: one.seconds)

    def seconds(self, order: str) -> dict[int, float]:
        """Return the seconds of an order by the number of micro-batches."""
        return {one.chunks: one.seconds for one in self.tried if one.order == order}

    def __str__(self) -> str:
        lines = [
            f"a batch of {self.rows} rows: order, micro-batches, rows of each, predicted ms, idle, most MB on a device"
        ]
        for one in self.tried:
            mark = "" if one.fits else "  does not fit"
            mark = "  <- best" if one.fits and one == self.best else mark
            lines.append(
                f"{one.order:>12}{one.chunks:5}{-(-self.rows // one.chunks):6}{one.seconds * 1e3:12.4g}"
                f"{one.idle:8.1%}{one.nbytes / 1e6:10.4g}{mark}"
            )
        return "\n".join(lines)


def candidates(rows: int) -> Sequence[int]:
    """Return numbers of micro-batches to try for so many rows: 1, 2, 3, 4, 6, 8, 12, ... and one row each."""
    found = [1]
    step = 2
    while step < rows:
        found += [step, step * 3 // 2] if step > 1 else [step]
        step *= 2
    return sorted({number for number in (*found, rows) if number <= rows})
