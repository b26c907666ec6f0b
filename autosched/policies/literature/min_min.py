"""Min-min, max-min and sufferage scheduling of ready tasks.

Maheswaran, Ali, Siegel, Hensgen, Freund, "Dynamic mapping of a class of independent tasks onto
heterogeneous computing systems", JPDC 59(2), 1999, applied to the ready tasks. Each task goes to
the device where it finishes first. The next task is the one that finishes first (min-min), the one
that finishes last (max-min), or the one that would lose most on its second best device
(sufferage). O(n w p) slots on p devices for at most w ready tasks. The heuristics ignore paths, and
are included for comparison.

Extensions of the paper: dependencies, and those of ``heft``.
"""

from __future__ import annotations

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.policies.base.turns import Weigh, by_weight
from autosched.problem import Problem

__all__ = ["max_min", "min_min", "sufferage"]


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
    return _by(lambda task, finish, loss: -finish, graph, machine, costs)


def max_min(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place the ready task of greatest earliest finish, repeatedly (Maheswaran et al. 1999).

    Order, ties and errors are those of ``min_min``.

    >>> graph = Graph()
    >>> durations = {"long": 3, "short": 1, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> max_min(graph, Machine.emulated(gpus=1), Costs()).device
    {'long': 'cpu', 'short': 'cuda:0', 'middle': 'cuda:0'}
    """
    return _by(lambda task, finish, loss: finish, graph, machine, costs)


def sufferage(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place the ready task that would lose most on its second best device (Maheswaran et al. 1999).

    Order, ties and errors are those of ``min_min``.

    >>> graph = Graph()
    >>> any_ = graph.add(int, name="any", seconds={"cpu": 3, "cuda:0": 2})
    >>> choosy = graph.add(int, name="choosy", seconds={"cpu": 9, "cuda:0": 2})
    >>> sufferage(graph, Machine.emulated(gpus=1), Costs()).device
    {'any': 'cpu', 'choosy': 'cuda:0'}
    """
    return _by(lambda task, finish, loss: loss, graph, machine, costs)


def _by(weigh: Weigh, graph: Graph, machine: Machine, costs: Costs) -> Placement:
    problem = Problem.of(graph, machine, costs)
    return by_weight(problem, Possible(problem), weigh)
