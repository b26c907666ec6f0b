"""Costs of operators for any number of rows, from two captures.

Work and bytes of almost all operators are a constant, such as reading weights, plus a share for
each row. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autosched import Costs, Work

__all__ = ["Scaling"]

T = TypeVar("T")


@dataclass(frozen=True)
class Scaling:
    """Costs of the same tasks for a smaller and a larger number of rows."""

    small: Costs
    large: Costs
    rows: tuple[int, int]

    def costs(self, rows: int) -> Costs:
        """Return the costs for another number of rows, on the line through both."""
        low, high = self.rows
        share = (rows - low) / (high - low) if high > low else 0.0

        def between(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * share)

        work = {
            name: Work(between(w.flops, v.flops), between(w.nbytes, v.nbytes), w.launches)
            for name, w, v in _pairs(self.small.work, self.large.work)
        }
        nbytes = {
            name: between(a, b) for name, a, b in _pairs(self.small.nbytes, self.large.nbytes)
        }
        return Costs(work=work, nbytes=nbytes)


def _pairs(first: Mapping[str, T], second: Mapping[str, T]) -> Iterator[tuple[str, T, T]]:
    """Yield the entries of two tables.

    One that only one table has is the same for any number of rows.
    """
    for name in dict.fromkeys((*first, *second)):
        yield name, first.get(name, second.get(name)), second.get(name, first.get(name))  # type: ignore[misc]
