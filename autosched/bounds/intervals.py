"""Lower bounds from intervals that contain more work than streams can do.

Reads the earliest starts and latest ends of tasks that ``chains`` derives, and no edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autosched.bounds.chains import through
from autosched.bounds.load import gathered, prices
from autosched.bounds.tables import Array, Tables

__all__ = ["interval"]

_MOST = 100_000  # pairs of a task and a span's begin that are looked at together
_ROUNDS = 12
_ENOUGH = 1e-6  # relative: what is left to gain


class _Case(NamedTuple):
    """What is so if the graph ends by some time; all by [task, device], seconds infinite where it cannot be then."""

    seconds: Array
    early: Array  # the earliest start
    late: Array  # the latest
    price: Array  # by device, of a second of one stream


def interval(tables: Tables, head: Array, tail: Array, least: float) -> float:
    """Raise a bound: the time before which no window [a, b] need hold more work than streams can do in it.

    If the graph ended by T, a task on a device would start between what passes before it and T less
    what passes after it, and tasks would not be where there is no time between the two; what of
    each task so lies in a window, on the device where that is cheapest at prices that sum to 1 over
    streams, is at most the window's length. If it is more, T grows by the difference. Up to 300
    tasks all windows count that begin or end where some task may; beyond, only some. Source:
    Fernandez, Bussell, IEEE Trans. Computers C-22(8), 1973, there for equal devices.
    """
    rounds = _ROUNDS if len(head) ** 2 <= _MOST else max(1, _ROUNDS * 100 // len(head))
    for _ in range(rounds if 0 < least < math.inf else 0):
        found, until = _raised(tables, head, tail, least)
        if found <= least * (1 + _ENOUGH):
            break
        least = min(found, until)
    return least


def _raised(tables: Tables, head: Array, tail: Array, end: float) -> tuple[float, float]:
    """Return what the end must be if it is this or later, and until when that holds: then tasks may be elsewhere."""
    needed = through(head, tail, tables.seconds)
    barred = needed > end * (1 + 1e-9)
    until = float(np.min(needed[barred], initial=math.inf))
    seconds = np.where(barred, math.inf, tables.seconds)
    price = prices(gathered(seconds, tables.group), tables.streams)
    excess = 0.0
    for one, other in ((head, tail), (tail, head)):
        early = np.where(barred, math.inf, one - np.where(barred, 0.0, seconds))
        late = np.where(barred, -math.inf, end - np.where(barred, 0.0, other))
        excess = max(excess, _excess(_Case(seconds, early, late, price)))
    return end + excess, until


def _excess(case: _Case) -> float:
    """Return by how much the work that must lie in a window is more than the window is long."""
    latest = case.late.max(axis=1)
    slope = np.min(np.where(np.isinf(case.seconds), math.inf, case.price), axis=1)
    most = 0.0
    for begins in _begins(case):
        left = np.clip((case.early + case.seconds) - begins[:, None, None], 0.0, case.seconds)
        height = np.min(left * case.price, axis=2)
        since = np.maximum(latest, begins[:, None])
        points = np.concatenate([since, since + height / slope], axis=1)
        order = points.argsort(axis=1)
        points = np.take_along_axis(points, order, axis=1)
        steep = np.concatenate([slope, -slope])[order].cumsum(axis=1)
        work = (steep[:, :-1] * np.diff(points, axis=1)).cumsum(axis=1)
        most = max(most, float(np.max(work - (points[:, 1:] - begins[:, None]), initial=0.0)))
    return most


def _begins(case: _Case) -> Iterator[Array]:
    """Yield where windows begin, some at a time."""
    tasks = len(case.early)
    found = np.unique(case.early.min(axis=1))
    most = max(_MOST // tasks, 4)
    if tasks * len(found) > _MOST:
        found = found[np.unique(np.linspace(0, len(found) - 1, most).astype(int))]
    yield from np.array_split(found, math.ceil(len(found) / most))
