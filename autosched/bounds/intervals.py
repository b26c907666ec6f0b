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
from autosched.bounds.relaxation import Array, Relaxation

__all__ = ["interval"]

_MOST = 100_000  # pairs of a task and a begin of a window that are processed together
_ROUNDS = 12
_ENOUGH = 1e-6  # relative tolerance


class _Case(NamedTuple):
    """Consequences of a makespan, by [task, device]; durations are infinite where impossible."""

    seconds: Array
    early: Array  # the earliest start
    late: Array  # the latest
    price: Array  # by device, of a second of one stream


def interval(relaxed: Relaxation, head: Array, tail: Array, least: float) -> float:
    """Raise a lower bound until no window [a, b] must contain more work than fits into it.

    If the makespan were T, a task on a device would start between its earliest start and T minus
    the time that must follow it, and would not run on devices where that is impossible. The work of
    each task that therefore must be in a window, on the device where it is cheapest at prices that
    sum to 1 over all streams, is at most the length of the window. If the sum is larger, T grows by
    the difference. For up to 300 tasks all windows are considered that begin or end at a limit of
    some task; for more tasks, only some. Source: Fernandez, Bussell, IEEE Trans. Computers C-22(8),
    1973, there for identical devices.
    """
    rounds = _ROUNDS if len(head) ** 2 <= _MOST else max(1, _ROUNDS * 100 // len(head))
    for _ in range(rounds if 0 < least < math.inf else 0):
        found, until = _raised(relaxed, head, tail, least)
        if found <= least * (1 + _ENOUGH):
            break
        least = min(found, until)
    return least


def _raised(relaxed: Relaxation, head: Array, tail: Array, end: float) -> tuple[float, float]:
    """Return the makespan implied by a bound, and up to which bound that holds.

    Beyond it, tasks may run on other devices.
    """
    needed = through(head, tail, relaxed.seconds)
    barred = needed > end * (1 + 1e-9)
    until = float(np.min(needed[barred], initial=math.inf))
    seconds = np.where(barred, math.inf, relaxed.seconds)
    price = prices(gathered(seconds, relaxed.group), relaxed.streams)
    excess = 0.0
    for one, other in ((head, tail), (tail, head)):
        early = np.where(barred, math.inf, one - np.where(barred, 0.0, seconds))
        late = np.where(barred, -math.inf, end - np.where(barred, 0.0, other))
        excess = max(excess, _excess(_Case(seconds, early, late, price)))
    return end + excess, until


def _excess(case: _Case) -> float:
    """Return by how much the work that must be in a window exceeds its length."""
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
    """Yield the begins of windows in batches."""
    tasks = len(case.early)
    found = np.unique(case.early.min(axis=1))
    most = max(_MOST // tasks, 4)
    if tasks * len(found) > _MOST:
        found = found[np.unique(np.linspace(0, len(found) - 1, most).astype(int))]
    yield from np.array_split(found, math.ceil(len(found) / most))
