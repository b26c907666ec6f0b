"""Small communication times on devices with enough memory (m-SCT).

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, after Hanen,
Munier, "An approximation algorithm for scheduling dependent tasks on m processors with small
communication delays", Discrete Applied Mathematics 108, 2001. Each task has at most one favourite
child, and is the favourite child of at most one task. A device that has run a task is reserved for
its favourite child, unless another task could start there and nowhere else as early. Otherwise the
policy and its complexity are those of ``m_etf``.

The paper computes favourite children by a linear program. This module uses a greedy matching
instead, which needs no solver: tasks by descending upward rank each choose, among the readers not
yet chosen, the one with the longest path to the end, including the copy to it.
"""

from __future__ import annotations

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import upward_ranks
from autosched.policies.literature.m_etf import earliest_start
from autosched.problem import Problem

__all__ = ["m_sct"]


def m_sct(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place tasks by earliest start, favourite children with their parents (Hanen, Munier 2001).

    Ties and errors as of ``m_etf``.

    >>> graph = Graph()
    >>> a = graph.add(int, name="a", seconds=1, nbytes=1e9)
    >>> b, c = (graph.add(abs, a, name=name, seconds=s) for name, s in (("b", 1), ("c", 9)))
    >>> placed = m_sct(graph, Machine.emulated(gpus=2), Costs()).device
    >>> placed["c"] == placed["a"]
    True
    """
    return earliest_start(graph, machine, costs, _favourites(graph, machine, costs))


def _favourites(graph: Graph, machine: Machine, costs: Costs) -> dict[int, int]:
    """Return the favourite child of tasks with readers.

    Each task is the favourite of at most one.
    """
    problem = Problem.of(graph, machine, costs)
    rank = upward_ranks(problem, Possible(problem))
    nbytes: dict[int, dict[int, float]] = {}  # by task, the bytes that each reader reads
    for task, reads in enumerate(problem.reads):
        for datum in reads:
            if (maker := problem.lists.maker[datum]) >= 0:
                taken = nbytes.setdefault(maker, {})
                taken[task] = taken.get(task, 0.0) + problem.lists.nbytes[datum]
    rate = min(problem.lists.rate)
    favourite: dict[int, int] = {}
    taken_already: set[int] = set()
    for task in sorted(nbytes, key=lambda task: -rank[task]):
        left = [reader for reader in nbytes[task] if reader not in taken_already]
        if left:
            favourite[task] = max(
                left, key=lambda reader: (rank[reader] + nbytes[task][reader] / rate, -reader)
            )
            taken_already.add(favourite[task])
    return favourite
