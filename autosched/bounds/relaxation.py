"""Views of the scheduling problem for bounds: edges, fastest routes, arrival of inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.problem import Problem

Array = NDArray[np.float64]
_NO_DATA = -1.0  # bytes of an edge without data


class Edges(NamedTuple):
    """Pairs of predecessor and successor, with the largest bytes of data between them, or -1."""

    task: NDArray[np.int64]
    other: NDArray[np.int64]
    nbytes: Array


class Relaxation(NamedTuple):
    """A problem in which copies take the fastest route; durations are infinite where impossible."""

    problem: Problem
    seconds: Array  # [task, device]
    streams: NDArray[np.int64]  # by device
    group: NDArray[np.int64]  # by task; those of one group share a device
    edges: Edges
    ready: Array  # [task, device]: when the sources that it reads can be there
    after: Array  # [task, device]: how long copying written inputs back takes
    latency: Array  # [source, destination]
    per_byte: Array

    @classmethod
    def of(cls, problem: Problem) -> Relaxation:
        """Return the relaxation of a problem."""
        t = problem.tables
        seconds = problem.by_task(t.seconds)
        latency, per_byte = _routes(problem)
        has_pageable = (t.row >= len(problem.devices)).any()
        pageable = _routes(problem, pageable=True) if has_pageable else None
        # Rows as in the problem's tables: those of devices, then those of their pageable memory.
        first = np.concatenate([latency, latency])
        rate = np.concatenate([per_byte, per_byte if pageable is None else pageable[1]])
        ready, after = np.zeros((2, *seconds.shape))
        for task, reads in enumerate(problem.reads):
            for datum in reads:
                if t.maker[datum] < 0:
                    row = t.row[datum]
                    arrival = first[row] + t.nbytes[datum] * rate[row]
                    np.maximum(ready[task], arrival, out=ready[task])
        for datum, device in problem.returns:
            return_trip = latency[:, device] + t.nbytes[datum] * per_byte[:, device]
            maker = t.maker[datum]
            np.maximum(after[maker], return_trip, out=after[maker])
        return cls(
            problem, seconds, t.streams, t.group, _edges(problem), ready, after, latency, per_byte
        )


def readers(problem: Problem) -> list[list[int]]:
    """Return the tasks that read each datum."""
    found: list[list[int]] = [[] for _ in problem.names]
    for task, reads in enumerate(problem.reads):
        for datum in dict.fromkeys(reads):
            found[datum].append(task)
    return found


def links(problem: Problem, pageable: bool = False) -> tuple[Array, Array]:
    """Return latency and seconds per byte of links: 0 on one device."""
    count = len(problem.devices)
    begin = count * count if pageable else 0
    latency = problem.tables.latency[begin : begin + count * count].reshape(count, count)
    rate = problem.tables.rate[begin : begin + count * count].reshape(count, count)
    return latency, 1 / rate


def _routes(problem: Problem, pageable: bool = False) -> tuple[Array, Array]:
    """Return latency and seconds per byte from each device, or its pageable memory, to each.

    They are minimized separately over all routes, so no route is faster.
    """
    latency, per_byte = (table.copy() for table in links(problem))
    for via in range(len(latency)):  # Floyd, CACM 5(6), 1962
        for table in (latency, per_byte):
            np.minimum(table, table[:, via, None] + table[via], out=table)
    if pageable:
        # Every route begins in pageable memory.
        first = links(problem, pageable=True)[1].copy()
        np.fill_diagonal(first, math.inf)
        per_byte = np.min(first[:, :, None] + per_byte, axis=1)
        np.fill_diagonal(per_byte, 0.0)
    return latency, per_byte


def _edges(problem: Problem) -> Edges:
    """Return pairs of predecessor and successor, without anti-dependencies.

    An in-place write need not wait for readers of copies on other devices.
    """
    nbytes = {
        (task.index, d.task): _NO_DATA
        for task in problem.graph.tasks
        for d in task.dependencies
        if d.kind != "anti"
    }
    t = problem.lists
    for task, reads in enumerate(problem.reads):
        for datum in reads:
            if (maker := t.maker[datum]) >= 0:
                nbytes[task, maker] = max(nbytes.get((task, maker), _NO_DATA), t.nbytes[datum])
    ends = np.array(list(nbytes), np.int64).reshape(len(nbytes), 2)
    return Edges(ends[:, 0], ends[:, 1], np.fromiter(nbytes.values(), float, len(nbytes)))
