"""Place the ready task of highest priority, repeatedly.

Priorities and the choice of a device are supplied by the policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot
from autosched.policies.base.possible import Possible
from autosched.problem import Problem

__all__ = ["by_priority"]

Pick = Callable[[Plan, int, Sequence[int]], Slot]


def by_priority(
    problem: Problem, possible: Possible, priority: Sequence[float], pick: Pick
) -> Placement:
    """Place ready tasks by priority, each in the slot ``pick(plan, task, devices)`` returns.

    Ties go to the task added earlier. O(m + n log n) for m dependencies, plus one call of ``pick``
    per task.
    """
    plan = Plan(problem)
    placed = list[int]()
    waits = [len(before) for before in problem.before]
    ready = [(-priority[task], task) for task, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    while ready:
        _, task = heapq.heappop(ready)
        slot = pick(plan, task, possible.devices(task))
        while not possible.choose(task, slot.device):
            slot = pick(plan, task, possible.devices(task))
        plan.commit(task, slot)
        placed.append(task)
        for other in _released(problem.after[task], waits):
            heapq.heappush(ready, (-priority[other], other))
    return _placement(plan, placed)


def _released(after: Iterable[int], waits: list[int]) -> list[int]:
    """Decrement the counts of unplaced predecessors, and return the tasks that became ready."""
    found = []
    for other in after:
        waits[other] -= 1
        if not waits[other]:
            found.append(other)
    return found


def _placement(plan: Plan, placed: Sequence[int]) -> Placement:
    """Return a plan's placement: tasks by start, ties in the order in which they were placed."""
    return plan.problem.placement(plan.device, sorted(placed, key=plan.start.__getitem__))
