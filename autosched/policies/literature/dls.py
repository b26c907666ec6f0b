"""Dynamic level scheduling (DLS).

Sih, Lee, "A compile-time scheduling heuristic for interconnection-constrained heterogeneous
processor architectures", IEEE TPDS 4(2), 1993. Of all pairs of a ready task and a device, the pair
of highest dynamic level is placed next. The dynamic level is the task's static level (the longest
path to the end of the graph at median durations, without copies), minus its earliest start on the
device, plus its median duration minus its duration on the device. O(n w p) slots on p devices for
at most w ready tasks.

Extensions of the paper: those of ``heft``, including insertion into gaps.
"""

from __future__ import annotations

import statistics

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import static_levels
from autosched.policies.base.turns import by_weight
from autosched.problem import Problem

__all__ = ["dls"]


def dls(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place the pair of task and device of highest dynamic level (Sih, Lee, IEEE TPDS 1993).

    The order is that of planned starts; ties go to the task added earlier and to the earlier
    device. Raises ScheduleError where tasks cannot all be placed.

    >>> graph = Graph()
    >>> durations = {"short": 1, "long": 3, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> dls(graph, Machine.emulated(gpus=1), Costs()).device
    {'short': 'cuda:0', 'long': 'cpu', 'middle': 'cuda:0'}
    """
    problem = Problem.of(graph, machine, costs)
    possible = Possible(problem)
    medians = [
        statistics.median([row[p] for p in possible.devices(task)])
        for task, row in enumerate(problem.seconds)
    ]
    level = static_levels(problem, medians)
    # Start minus (median - duration) is finish minus median.
    return by_weight(problem, possible, lambda task, finish: level[task] + medians[task] - finish)
