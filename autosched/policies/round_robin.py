"""Assign tasks to devices in turn, regardless of costs."""

from __future__ import annotations

from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.problem import Problem


def round_robin(problem: Problem) -> Placement:
    """Assign tasks to the devices in turn, in insertion order; groups stay together.

    Tasks that may run on one device only are skipped in the rotation. Raises ScheduleError where
    tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> round_robin(Problem(graph, Machine.emulated(gpus=1))).device
    {'a': 'cpu', 'b': 'cuda:0', 'c': 'cpu'}
    """
    possible = Possible(problem)
    placed = []
    turn = 0
    for task in range(len(problem.tasks)):
        devices = possible.devices(task)
        if len(devices) > 1:
            turn = (
                possible.settle(
                    task, [p for p in devices if p >= turn] + [p for p in devices if p < turn]
                )
                + 1
            )
        placed.append(possible.devices(task)[0])
    return problem.placement(placed, range(len(placed)))
