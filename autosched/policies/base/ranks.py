"""Compute priorities of tasks for list scheduling, such as upward ranks.

Durations are means, medians or minima over the devices that a task may be placed on. Knows no start
times and no order of issue.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel
from autosched.problem import Tables


@kernel
def longest(
    t: Tables, weight: Any, kind: Any, kinds: int, latency: Any, per_byte: Any, rest: Any
) -> None:
    """Fill ``rest`` with the longest path from each task's end to the end of the graph.

    ``weight`` is the duration of each task. A datum that moves from a task of ``kind`` a to one of
    ``kind`` b takes ``latency[a, b] + nbytes * per_byte[a, b]``. ``rest`` must be zero everywhere.
    """
    for task in range(len(weight) - 1, -1, -1):
        here = rest[task] + weight[task]
        for i in range(t.before_at[task], t.before_at[task + 1]):
            rest[t.before[i]] = max(rest[t.before[i]], here)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker >= 0:
                away = here
                if t.group[maker] != t.group[task]:
                    ends = kind[maker] * kinds + kind[task]
                    away += latency[ends] + t.nbytes[t.reads[i]] * per_byte[ends]
                rest[maker] = max(rest[maker], away)


@kernel
def optimistic(t: Tables, latency: float, per_byte: float, table: Any, column: Any) -> None:
    """Fill ``table[task, device]`` with the optimistic cost, the least time after a task's end.

    A datum that changes device takes ``latency + nbytes * per_byte``. ``table`` must be zero
    everywhere; ``column`` has one element per device. Source: Arabnejad, Barbosa, IEEE TPDS 25(3),
    2014.
    """
    devices = len(t.streams)
    for task in range(len(t.group) - 1, -1, -1):
        least = math.inf
        for p in range(devices):
            column[p] = table[task * devices + p] + t.seconds[task * devices + p]
            least = min(least, column[p])
        for i in range(t.before_at[task], t.before_at[task + 1]):
            base = t.before[i] * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], least)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker < 0:
                continue
            far = least + (latency + t.nbytes[t.reads[i]] * per_byte)
            if t.group[maker] == t.group[task]:
                far = math.inf
            base = maker * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], min(far, column[p]))


_ROWS = 1024  # at a time, to save memory
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class MeanLinks(NamedTuple):
    """Mean latency and seconds per byte of copies between tasks, by the kinds of both.

    Tasks are of one kind if they may be placed on the same devices. Means are over the pairs of
    different devices.
    """

    kind: NDArray[np.int64]  # [task]
    latency: Floats  # [kind of the producer, kind of the reader]
    per_byte: Floats

    @classmethod
    def of(cls, t: Tables, possible: Mask) -> MeanLinks:
        """Return the links of tasks that may be placed on the devices ``possible[task]``."""
        devices = possible.shape[1]
        if possible.all():
            masks = np.ones((1, devices), bool)
            kind = np.zeros(len(possible), np.int64)
        else:
            rows = [row.tobytes() for row in np.packbits(possible, axis=1)]
            number = {row: i for i, row in enumerate(dict.fromkeys(rows))}
            kind = np.array([number[row] for row in rows])
            masks = possible[np.unique(kind, return_index=True)[1]]
        latency, per_byte = np.zeros((2, len(masks), len(masks)))
        sets = [mask.nonzero()[0] for mask in masks]
        for a, q in enumerate(sets):
            for b, p in enumerate(sets):
                path = np.add.outer(q * devices, p)[np.not_equal.outer(q, p)]
                if len(path):
                    latency[a, b] = sum(t.latency[path].tolist()) / len(path)
                    per_byte[a, b] = sum((1 / t.rate[path]).tolist()) / len(path)
        return cls(kind, latency, per_byte)


@np.errstate(over="ignore")
def ranks(t: Tables, mode: Mode, weight: Floats, links: MeanLinks) -> Floats:
    """Return the longest path from each task's start to the end of the graph.

    ``t`` are tables in the form for ``mode``, ``weight`` the durations of tasks.
    """
    rest = mode.numbers(len(weight))
    latency, per_byte = links.latency.ravel(), links.per_byte.ravel()
    rates = mode.floats(latency), mode.floats(per_byte)
    mode(longest)(t, mode.floats(weight), mode.whole(links.kind), len(links.latency), *rates, rest)
    return np.asarray(rest, float) + weight


@np.errstate(over="ignore")
def mean_seconds(seconds: Floats, possible: Mask) -> Floats:
    """Return the mean duration of each task over its possible devices."""
    total = np.zeros(len(seconds))
    for at in range(0, len(seconds), _ROWS):
        rows = slice(at, at + _ROWS)
        # As cumsum adds from left to right; sum does not.
        total[rows] = np.cumsum(np.where(possible[rows], seconds[rows], 0.0), axis=1)[:, -1]
    return np.asarray(total / possible.sum(axis=1))
