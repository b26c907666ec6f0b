"""Lower bounds on the period of every loop of a graph: its steady-state seconds per run.

All runs execute one program. So the work of a run is done by the same streams in each, and none of
them needs less time per run than that work. Since run r begins when run r - ``in_flight`` has
ended, ``in_flight`` periods are no shorter than a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autosched._lib.cycles import Edge, maximum_cycle_ratio
from autosched.bounds import bounds
from autosched.graph.graph import Graph, Use
from autosched.problem import Problem

_LOADS = ("work", "copies", "host")  # of the bounds on the makespan, those that hold per run


def period_bounds(problem: Problem, in_flight: int = 1) -> dict[str, float]:
    """Return named lower bounds on the period, in seconds; infinity where no schedule exists.

    * ``work``, ``copies`` and ``host``: as for ``bounds``, of the busiest device, copy stream and
      thread at the best distribution.
    * ``carried``: the maximum cycle ratio of the dependencies that tasks have on tasks of the run
      before, because of inputs and constants that tasks write, or of shared state. A write waits
      for those readers that must be on its device; others may read a copy.
    * ``latency``: the lower bound on the makespan, divided by the runs in flight.

    >>> from autosched import Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.add(abs, graph.input("x"), seconds=1.0), seconds=2.0)
    >>> found = period_bounds(Problem(graph, Machine.emulated(gpus=1)), in_flight=2)
    >>> found["work"], found["carried"], found["latency"]
    (1.5, 0.0, 1.5)
    """
    known = bounds(problem)
    found = {name: known[name] for name in _LOADS}
    latency = max(known.values()) / in_flight
    return {**found, "carried": _carried(problem), "latency": latency}


def _carried(problem: Problem) -> float:
    """Return the maximum cycle ratio of carried dependencies, with each task where it is fastest."""
    carried = [(before, task, 1) for before, task in _over_runs(problem.graph)]
    if not carried:
        return 0.0
    seconds = problem.by_task(problem.tables.seconds)
    least = seconds.min(axis=1, initial=math.inf)
    if np.isinf(least).any():
        return math.inf
    where = [*map(tuple, np.isfinite(seconds).tolist())]  # by task, the devices on which it may run
    group = problem.tables.group
    within: list[Edge] = [
        (d.task, task.index, 0)
        for task in problem.graph.tasks
        for d in task.dependencies
        # A write need not wait for readers of copies on other devices.
        if d.kind != "anti"
        or group[d.task] == group[task.index]
        or (where[d.task] == where[task.index] and sum(where[task.index]) == 1)
    ]
    return maximum_cycle_ratio(least.tolist(), [*within, *carried])


def _over_runs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield pairs of tasks: the second needs what the first left, in the run before.

    Tasks that touch a region of a value are left out: few of them meet.
    """
    last: dict[Use, int] = {}  # by version 0 of a source, the task that writes it last
    for value in graph.sources:
        version = graph.last_version(value.index)
        maker = graph.maker(Use(value.index, version)) if version else None
        if maker is not None and graph.tasks[maker].region is None:
            last[Use(value.index, 0)] = maker
    ends: dict[int, tuple[int, int]] = {}  # by shared object, the first and the last task
    for task in graph.tasks:
        if task.region is None:
            yield from ((last[use], task.index) for use in task.reads if use in last)
        for item in task.shared:
            first, _ = ends.get(id(item), (task.index, task.index))
            ends[id(item)] = first, task.index
    yield from ((at, first) for first, at in ends.values())
