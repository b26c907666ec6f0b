"""Compute priorities of tasks for list scheduling, such as upward ranks.

Durations are means, medians or minima over the devices that a task may be placed on. Knows no start
times and no order of issue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autosched.policies.base.possible import Possible
from autosched.policies.base.problem import Problem

__all__ = [
    "critical_path",
    "downward_ranks",
    "followers",
    "mean",
    "optimistic_costs",
    "static_levels",
    "upward_ranks",
]


def upward_ranks(problem: Problem, possible: Possible) -> list[float]:
    """Return the longest path from each task's start to the end of the graph, at mean costs.

    The rank of a task is its mean duration, plus the largest mean copy + rank over its successors.
    Means are over the devices that tasks may be placed on, and over the linked pairs of different
    devices. No task ranks below a successor. Source: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002.
    """
    means = _Means(problem, possible)
    rank = [0.0] * len(
        problem.tasks
    )  # the largest over the successors seen so far, until the task itself is visited
    for task in reversed(range(len(rank))):
        rank[task] = below = rank[task] + means.seconds(task)
        for before in problem.before[task]:
            rank[before] = max(rank[before], below)
        for datum in problem.reads[task]:
            maker = problem.data.maker[datum]
            if maker >= 0:
                rank[maker] = max(rank[maker], below + means.copy(datum, task))
    return rank


def downward_ranks(problem: Problem, possible: Possible) -> list[float]:
    """Return the longest path from the beginning to each task's start, at mean costs.

    Source: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002.
    """
    means = _Means(problem, possible)
    maker = problem.data.maker
    rank = list[float]()
    end = list[float]()
    for task, before in enumerate(problem.before):
        made = [datum for datum in problem.reads[task] if maker[datum] >= 0]
        arrivals = [end[maker[datum]] + means.copy(datum, task) for datum in made]
        rank.append(max([end[other] for other in before] + arrivals, default=0.0))
        end.append(rank[task] + means.seconds(task))
    return rank


def critical_path(problem: Problem, through: Sequence[float]) -> list[int]:
    """Return the tasks of the longest path; ``through`` is the longest path through each task."""
    after = followers(problem)
    path: list[int] = []
    step = [task for task, before in enumerate(problem.before) if not before]
    while step:
        path.append(max(step, key=through.__getitem__))
        step = after[path[-1]]
    return path


def static_levels(problem: Problem, seconds: Sequence[float]) -> list[float]:
    """Return the longest path from each task's start on, with ``seconds`` and without copies."""
    level = [0.0] * len(seconds)
    for task in reversed(range(len(level))):
        level[task] += seconds[task]
        for before in problem.before[task]:
            level[before] = max(level[before], level[task])
    return level


@np.errstate(over="ignore")
def optimistic_costs(problem: Problem, possible: Possible) -> list[list[float]]:
    """Return the optimistic costs ``[task][device]``: the least time after a task's end.

    It is the largest, over the successors, of the least duration of the successor, the copy to it
    and what follows it, over the successor's devices. O(e p^2) for e reads and p devices, as links
    may differ. The cost is infinite where a task may not run. Source: Arabnejad, Barbosa, IEEE TPDS
    25(3), 2014.
    """
    rows = problem.paths[: len(problem.devices)]
    latency = np.array([[path.latency for path in row] for row in rows])
    per_byte = np.array([[1 / path.rate for path in row] for row in rows])
    table = np.zeros((len(problem.tasks), len(rows)))
    for task in reversed(range(len(table))):
        here = np.full(len(rows), math.inf)
        devices = list(possible.devices(task))
        here[devices] = (table[task] + problem.seconds[task])[devices]
        for before in problem.before[task]:
            table[before] = np.maximum(table[before], here.min())
        for datum in problem.reads[task]:
            maker = problem.data.maker[datum]
            nbytes = problem.data.nbytes[datum]
            if maker >= 0 and problem.group[maker] == problem.group[task]:
                table[maker] = np.maximum(table[maker], here)
            elif maker >= 0:
                table[maker] = np.maximum(
                    table[maker], (here + latency + nbytes * per_byte).min(axis=1)
                )
    return table.tolist()


def followers(problem: Problem) -> list[list[int]]:
    """Return the successors of each task, in insertion order."""
    after: list[list[int]] = [[] for _ in problem.tasks]
    for task, before in enumerate(problem.before):
        for other in before:
            after[other].append(task)
    return after


def mean(row: Sequence[float], devices: Sequence[int]) -> float:
    """Return the mean of a row over some devices."""
    return sum([row[p] for p in devices]) / len(devices)


class _Means:
    """Mean durations of tasks, and of copies between different devices."""

    def __init__(self, problem: Problem, possible: Possible):
        self.problem = problem
        self.possible = possible
        self._links: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, task: int) -> float:
        return mean(self.problem.seconds[task], self.possible.devices(task))

    def copy(self, datum: int, task: int) -> float:
        """Return the mean duration of the copy of a datum to a reader; 0 within a group."""
        maker = self.problem.data.maker[datum]
        if self.problem.group[maker] == self.problem.group[task]:
            return 0.0
        ends = self.possible.devices(maker), self.possible.devices(task)
        if ends not in self._links:
            self._links[ends] = _mean_link(self.problem, *ends)
        latency, per_byte = self._links[ends]
        return latency + self.problem.data.nbytes[datum] * per_byte


def _mean_link(
    problem: Problem, sources: tuple[int, ...], destinations: tuple[int, ...]
) -> tuple[float, float]:
    """Return mean latency and mean seconds per byte of links between different devices."""
    pairs = [problem.paths[q][p] for q in sources for p in destinations if q != p]
    linked = [path for path in pairs if path.latency < math.inf]
    if not linked:
        return 0.0, 0.0
    return sum(path.latency for path in linked) / len(linked), sum(
        1 / path.rate for path in linked
    ) / len(linked)
