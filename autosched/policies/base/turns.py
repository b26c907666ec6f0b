"""Choose which ready task a list scheduler places next.

Either tasks have static priorities, and the ready task of highest priority is placed next, or all
ready tasks are weighed again before each placement. Priorities and the choice of a device are
supplied by the policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot
from autosched.policies.base.possible import Possible
from autosched.problem import Problem

__all__ = ["by_priority", "by_weight"]

Pick = Callable[[Plan, int, Sequence[int]], Slot]
Weigh = Callable[[int, float], float]
_Known = dict[int, tuple[float, Slot]]  # by device, the end of a task there, and the slot


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


def by_weight(problem: Problem, possible: Possible, weigh: Weigh) -> Placement:
    """Place the ready task of the greatest weight where it finishes first, until all are placed.

    ``weigh(task, finish)`` is called with its finish time. Ties go to the task added earlier.
    O(n w p) slots on p devices for at most w ready tasks; slots that the previous placement did not
    change are reused.
    """
    plan = Plan(problem)
    placed = list[int]()
    waits = [len(before) for before in problem.before]
    ready: dict[int, _Known] = {task: {} for task, count in enumerate(waits) if not count}
    while ready:
        offers = [_offer(plan, possible, weigh, task, known) for task, known in ready.items()]
        _, task, slot = max(offers, key=lambda offer: (offer[0], -offer[1]))
        if not possible.choose(task, slot.device):
            continue
        out_free = plan.state.out_free[:]
        plan.commit(task, slot)
        placed.append(task)
        del ready[task]
        busier = {p for p, end in enumerate(out_free) if plan.state.out_free[p] != end}
        _forget(ready, plan, slot.device, busier)
        for other in _released(problem.after[task], waits):
            ready[other] = {}
    return _placement(plan, placed)


def _offer(
    plan: Plan, possible: Possible, weigh: Weigh, task: int, known: _Known
) -> tuple[float, int, Slot]:
    """Return weight, number and best slot of a ready task; add new slots to ``known``."""
    devices = possible.devices(task)
    if missing := [device for device in devices if device not in known]:
        known.update(
            (slot.device, (plan.end(task, slot), slot)) for slot in plan.slots(task, missing)
        )
    ends = [(known[device][0], device) for device in devices if device in known]
    if not ends:
        raise plan.nowhere(task)
    slot = known[min(ends)[1]][1]
    return weigh(task, slot.start + plan.problem.seconds[task][slot.device]), task, slot


def _forget(ready: dict[int, _Known], plan: Plan, taken: int, busier: set[int]) -> None:
    """Drop the slots that the last placement may have changed.

    These are the slots on the device ``taken``, and those of tasks that read data on a device whose
    copy-out stream became ``busier``.
    """
    for task, known in ready.items():
        known.pop(taken, None)
        if busier and not busier.isdisjoint(map(plan.where, plan.problem.reads[task])):
            known.clear()


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
