"""Compute priorities of tasks for list scheduling, such as upward ranks.

Durations are means, medians or minima over the devices that a task may be placed on. Knows no start
times and no order of issue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel
from autosched.policies.base.possible import Possible
from autosched.problem import Problem, Tables


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

    Tasks are of one kind if they may be placed on the same devices. Means are over the linked pairs
    of different devices.
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
                path = path[np.isfinite(t.latency[path])]
                if len(path):
                    latency[a, b] = sum(t.latency[path].tolist()) / len(path)
                    per_byte[a, b] = sum((1 / t.rate[path]).tolist()) / len(path)
        return cls(kind, latency, per_byte)

    def reversed(self) -> MeanLinks:
        """Return the links of the reversed graph."""
        return MeanLinks(self.kind[::-1], self.latency.T, self.per_byte.T)


@np.errstate(over="ignore")
def ranks(t: Tables, mode: Mode, weight: Floats, links: MeanLinks) -> Floats:
    """Return the longest path from each task's start to the end of the graph.

    ``t`` are tables in the form for ``mode``, ``weight`` the durations of tasks.
    """
    return _after(t, mode, weight, links) + weight


def _after(t: Tables, mode: Mode, weight: Floats, links: MeanLinks) -> Floats:
    """Return the longest path from each task's end to the end of the graph."""
    rest = mode.numbers(len(weight))
    latency, per_byte = links.latency.ravel(), links.per_byte.ravel()
    mode(longest)(
        t, mode.floats(weight), mode.whole(links.kind), len(links.latency),
        mode.floats(latency), mode.floats(per_byte), rest,
    )  # fmt: skip
    return np.asarray(rest, float)


@np.errstate(over="ignore")
def mean_seconds(seconds: Floats, possible: Mask) -> Floats:
    """Return the mean duration of each task over its possible devices."""
    total = np.zeros(len(seconds))
    for at in range(0, len(seconds), _ROWS):
        rows = slice(at, at + _ROWS)
        # As cumsum adds from left to right; sum does not.
        total[rows] = np.cumsum(np.where(possible[rows], seconds[rows], 0.0), axis=1)[:, -1]
    return np.asarray(total / possible.sum(axis=1))


def upward_ranks(problem: Problem, possible: Possible) -> list[float]:
    """Return the longest path from each task's start to the end of the graph, at mean costs.

    The rank of a task is its mean duration, plus the largest mean copy + rank over its successors.
    Means are over the devices that tasks may be placed on, and over the linked pairs of different
    devices. No task ranks below a successor. Source: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002.
    """
    mask = possible.mask()
    weight = mean_seconds(problem.by_task(problem.tables.seconds), mask)
    links = MeanLinks.of(problem.tables, mask)
    found: list[float] = ranks(problem.lists, Mode(False), weight, links).tolist()
    return found


def downward_ranks(problem: Problem, possible: Possible) -> list[float]:
    """Return the longest path from the beginning to each task's start, at mean costs.

    Source: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002.
    """
    mask = possible.mask()
    weight = mean_seconds(problem.by_task(problem.tables.seconds), mask)
    links = MeanLinks.of(problem.tables, mask).reversed()
    mode = Mode(False)
    backwards = mode.of(problem.tables.reversed())
    found: list[float] = _after(backwards, mode, weight[::-1], links)[::-1].tolist()
    return found


def critical_path(problem: Problem, through: Sequence[float]) -> list[int]:
    """Return the tasks of the longest path; ``through`` is the longest path through each task."""
    path: list[int] = []
    step = [task for task, before in enumerate(problem.before) if not before]
    while step:
        path.append(max(step, key=through.__getitem__))
        step = problem.after[path[-1]]
    return path


@np.errstate(over="ignore")
def optimistic_costs(problem: Problem, possible: Possible) -> list[list[float]]:
    """Return the optimistic costs ``[task][device]``: the least time after a task's end.

    It is the largest, over the successors, of the least duration of the successor, the copy to it
    and what follows it, over the successor's devices. O(e p^2) for e reads and p devices, as links
    may differ; ``optimistic`` takes O(e p) with equal links. The cost is infinite where a
    task may not run. Source: Arabnejad, Barbosa, IEEE TPDS 25(3), 2014.
    """
    t = problem.lists
    count = len(problem.devices)
    latency = problem.tables.latency[: count * count].reshape(count, count)
    per_byte = 1 / problem.tables.rate[: count * count].reshape(count, count)
    seconds = np.where(possible.mask(), problem.by_task(problem.tables.seconds), math.inf)
    table = np.zeros((len(problem.tasks), count))
    for task in reversed(range(len(table))):
        here = table[task] + seconds[task]
        least = here.min()
        copied = here + latency
        for before in problem.before[task]:
            np.maximum(table[before], least, out=table[before])
        for datum in problem.reads[task]:
            maker = t.maker[datum]
            if maker < 0:
                continue
            away = here
            if t.group[maker] != t.group[task]:
                away = np.minimum.reduce(copied + t.nbytes[datum] * per_byte, axis=1)
            np.maximum(table[maker], away, out=table[maker])
    return table.tolist()


def mean(row: Sequence[float], devices: Sequence[int]) -> float:
    """Return the mean of a row over some devices."""
    return sum([row[p] for p in devices]) / len(devices)
