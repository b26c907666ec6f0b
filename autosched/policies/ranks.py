"""Measures of tasks that list scheduling orders them by."""

from __future__ import annotations

import math

from autosched.policies.possible import Possible
from autosched.policies.problem import Problem

__all__ = ["upward_ranks"]


def upward_ranks(problem: Problem, possible: Possible) -> list[float]:
    """Return for each task the seconds from its start to the end of the graph, along the longest path, at mean costs.

    The rank of a task is its mean seconds, plus the largest of mean copy + rank over its successors. Means are over
    the devices that tasks may go to, and over the linked pairs of different ones. No task ranks below a successor.
    Source: Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002.
    """
    group, data = problem.group, problem.data
    means: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
    rank = [0.0] * len(problem.tasks)  # until its turn comes, the largest over the successors seen so far
    for task in reversed(range(len(rank))):
        devices = possible.devices(task)
        seconds = problem.seconds[task]
        rank[task] = below = rank[task] + sum([seconds[p] for p in devices]) / len(devices)
        for before in problem.before[task]:
            rank[before] = max(rank[before], below)
        for datum in problem.reads[task]:
            maker = data.maker[datum]
            if maker >= 0 and group[maker] != group[task]:
                ends = possible.devices(maker), devices
                if ends not in means:
                    means[ends] = _mean_link(problem, *ends)
                latency, per_byte = means[ends]
                rank[maker] = max(rank[maker], below + latency + data.nbytes[datum] * per_byte)
    return rank


def _mean_link(problem: Problem, sources: tuple[int, ...], destinations: tuple[int, ...]) -> tuple[float, float]:
    """Return the mean latency, and the mean seconds per byte, of the links between different devices."""
    pairs = [problem.paths[q][p] for q in sources for p in destinations if q != p]
    linked = [path for path in pairs if path.latency < math.inf]
    if not linked:
        return 0.0, 0.0
    return sum(path.latency for path in linked) / len(linked), sum(1 / path.rate for path in linked) / len(linked)
