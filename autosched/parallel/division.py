"""Divide the rows of a batch among devices of different speed and memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autosched import ScheduleError

__all__ = ["ALIKE", "Shares", "Speed", "balanced", "check_shares", "divided", "slowest_last"]

Shares = Sequence[float] | Literal["auto"]

ALIKE = 1.1  # devices that differ by less get equal shares
_GRAINS = 4096  # parts of a batch that are given to devices, one after another


@dataclass(frozen=True)
class Speed:
    """The seconds of a device for a step: a fixed part, and for each row; ``most`` rows fit."""

    fixed: float
    row: float
    most: float = math.inf

    def with_free(self, share: float) -> Speed:
        """Return the device of which a share of the rows that fit stays free."""
        return replace(self, most=(1 - share) * self.most)


def check_shares(shares: Any, ranks: Sequence[int | None]) -> None:
    """Raise ScheduleError unless shares are ``"auto"``, or one number for each device.

    ``ranks`` are those of the devices; each needs one with rows.
    """
    fits = isinstance(shares, Sequence) and len(shares) == len(ranks)
    if isinstance(shares, str):
        fits = shares == "auto"
    elif fits and all(isinstance(one, (int, float)) and 0 <= one < math.inf for one in shares):
        fits = {rank for rank, one in zip(ranks, shares, strict=True) if one} == {*ranks}
    else:
        fits = False
    if not fits:
        raise ScheduleError(
            f"shares must be 'auto' or a sequence of {len(ranks)} numbers, one for each device, 0 "
            f"for one that takes no part while others of its rank do, got {shares!r}"
        )


def divided(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide rows in proportion to weights; what is left goes to the largest remainders.

    >>> divided(7, (1, 1)), divided(8, (3, 0, 1))
    ((4, 3), (6, 0, 2))
    """
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    found = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(found)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: rows - sum(found)]:
        found[i] += 1
    return tuple(found)


def balanced(rows: int, devices: Sequence[Speed], least: int = 2) -> tuple[int, ...] | None:
    """Divide rows so that the device that ends last ends early; None if they do not fit.

    A device gets no rows, or ``least`` or more.

    >>> balanced(10, [Speed(0, 1), Speed(0, 4)])
    (8, 2)
    >>> balanced(10, [Speed(0, 1, most=5), Speed(0, 4)])
    (5, 5)
    """
    grain = max(1, rows // _GRAINS)
    found = [0] * len(devices)
    ends = [(one.fixed + grain * one.row, i) for i, one in enumerate(devices)]
    heapq.heapify(ends)
    left = rows
    while left and ends:
        _, i = heapq.heappop(ends)
        taken = min(grain, left, math.floor(min(rows, devices[i].most)) - found[i])
        if taken > 0:
            found[i] += taken
            left -= taken
            heapq.heappush(ends, (devices[i].fixed + (found[i] + grain) * devices[i].row, i))
    small = [i for i, own in enumerate(found) if 0 < own < least]
    if small and not left and len(small) < sum(map(bool, found)):
        others = [Speed(0, 1, 0) if i in small else one for i, one in enumerate(devices)]
        return balanced(rows, others, least)
    return None if left else tuple(found)


def slowest_last(devices: Sequence[Speed]) -> list[list[int]]:
    """Return the indices of all devices, then without the slowest ones, and so on.

    >>> slowest_last([Speed(0, 4), Speed(0, 1), Speed(0, 1.01)])
    [[1, 2, 0], [1, 2]]
    """
    order = sorted(range(len(devices)), key=lambda i: devices[i].row)
    rates = [devices[i].row for i in order]
    cuts = [k for k in range(1, len(order)) if rates[k] > ALIKE * rates[k - 1]]
    return [order[:k] for k in (len(order), *reversed(cuts))]
