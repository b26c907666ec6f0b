"""Predict earliest finish time (PEFT).

Arabnejad, Barbosa, "List scheduling algorithm for heterogeneous systems by an optimistic cost
table", IEEE TPDS 25(3), 2014. Of the ready tasks, the one of highest mean optimistic cost is placed
next, on the device where its finish time plus its optimistic cost is least. O(e p^2 + n log n) for
e reads and p devices; O(e p) in the paper, where all links are alike.

Extensions of the paper: those of ``heft``; optimistic costs account for each link, for groups that
share a device, and for the devices on which tasks may run.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot, by_priority
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import mean, optimistic_costs
from autosched.problem import Problem


def peft(problem: Problem) -> Placement:
    """Place ready tasks by mean optimistic cost on the best device (Arabnejad, Barbosa 2014).

    The best device has the least sum of finish time and optimistic cost. The order is that of
    planned starts; ties go to the task added earlier and to the earlier device. Raises
    ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> a = graph.add(int, name="a", seconds={"cpu": 1, "cuda:0": 2}, nbytes=10**12)
    >>> b = graph.add(abs, a, name="b", seconds={"cpu": 9, "cuda:0": 2})
    >>> peft(Problem(graph, Machine.emulated(gpus=1))).device
    {'a': 'cuda:0', 'b': 'cuda:0'}
    """
    possible = Possible(problem)
    table = optimistic_costs(problem, possible)
    means = [mean(row, possible.devices(task)) for task, row in enumerate(table)]

    def pick(plan: Plan, task: int, devices: Sequence[int]) -> Slot:
        return plan.earliest_finish(task, devices, table[task])

    return by_priority(problem, possible, means, pick)
