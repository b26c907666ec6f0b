"""Min-min scheduling of ready tasks.

Maheswaran, Ali, Siegel, Hensgen, Freund, "Dynamic mapping of a class of independent tasks onto
heterogeneous computing systems", JPDC 59(2), 1999, applied to the ready tasks: the one that
finishes first is placed next, on the device where it does. O(n w p) slots on p devices for at most
w ready tasks. The heuristic ignores paths, and is included for comparison.

Extensions of the paper: dependencies, and those of ``heft``.
"""

from __future__ import annotations

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.policies.base.turns import by_weight
from autosched.problem import Problem

__all__ = ["min_min"]


def min_min(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place the ready task of least earliest finish, repeatedly (Maheswaran et al. 1999).

    The order is that of planned starts; ties go to the task added earlier and to the earlier
    device. Raises ScheduleError where tasks cannot all be placed.

    >>> graph = Graph()
    >>> durations = {"long": 3, "short": 1, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> min_min(graph, Machine.emulated(gpus=1), Costs()).device
    {'long': 'cpu', 'short': 'cpu', 'middle': 'cuda:0'}
    """
    problem = Problem.of(graph, machine, costs)
    return by_weight(problem, Possible(problem), lambda task, finish: -finish)
