"""HEFT with lookahead at the finish times of successors.

Bittencourt, Sakellariou, Madeira, "DAG scheduling using a lookahead variant of the heterogeneous
earliest finish time algorithm", Euromicro PDP 2010. Tasks are placed by descending upward rank,
each on the device from which the last of its successors finishes first, if these are placed next
by HEFT. This takes the time of HEFT times the number of devices, and once more for each successor.

Extensions of the paper: those of ``heft``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot, by_priority
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import upward_ranks
from autosched.problem import Problem

__all__ = ["lookahead"]


def lookahead(problem: Problem) -> Placement:
    """Place tasks by upward rank where their successors finish first (Bittencourt et al. 2010).

    Predecessors of successors that are not placed yet are ignored. The order is that of planned
    starts; ties go to the task added earlier, to its own earlier finish and to the earlier device.
    Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> a = graph.add(int, name="a", seconds={"cpu": 1, "cuda:0": 2}, nbytes=10**12)
    >>> b = graph.add(abs, a, name="b", seconds={"cpu": 9, "cuda:0": 2})
    >>> lookahead(Problem(graph, Machine.emulated(gpus=1))).device
    {'a': 'cuda:0', 'b': 'cuda:0'}
    """
    possible = Possible(problem)
    rank = upward_ranks(problem, possible)
    after = [sorted(tasks, key=lambda task: -rank[task]) for tasks in problem.after]

    def pick(plan: Plan, task: int, devices: Sequence[int]) -> Slot:
        slots = sorted(plan.slots(task, devices), key=lambda slot: plan.end(task, slot))
        if not slots:
            raise plan.nowhere(task)
        best = slots[0]
        least = math.inf
        for slot in slots:
            last = _last(plan, possible, task, slot, after[task], least)
            if last < least:
                best = slot
                least = last
        return best

    return by_priority(problem, possible, rank, pick)


def _last(
    plan: Plan, possible: Possible, task: int, slot: Slot, after: Iterable[int], limit: float
) -> float:
    """Return when the last of a task and its successors ``after`` would finish.

    Infinity if that is not below ``limit``. Restore the plan.
    """
    group = plan.problem.lists.group
    undo = []
    last = plan.end(task, slot)
    placed = task, slot
    for other in after:
        if last >= limit:
            break
        undo.append(plan.attempt(*placed))
        devices = [slot.device] if group[other] == group[task] else possible.devices(other)
        found = plan.find(other, devices)
        if found is None:
            last = math.inf
            break
        last = max(last, plan.end(other, found))
        placed = other, found
    for take_back in reversed(undo):
        take_back()
    return last if last < limit else math.inf
