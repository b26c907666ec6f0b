"""Heterogeneous earliest finish time (HEFT).

Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
computing", IEEE TPDS 13(3), 2002. Tasks are placed by descending upward rank, each on the device
where it finishes first; a task may be inserted into a gap between tasks placed earlier.
O(e p + n log n) for e reads and p devices, since few gaps are examined.

Extensions of the paper: a device may have several compute streams; a value is copied to a device
once; links may differ; and where the machine models contention, copies occupy copy streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from autosched._lib.gc_pause import without_collecting
from autosched._lib.jit import Mode, mode
from autosched._lib.topological import topological_order
from autosched.errors import ScheduleError
from autosched.placement import Placement
from autosched.policies.base.kernels import (
    Planning,
    arrive,
    earliest_gap,
    issue,
    list_schedule,
    sources,
    take,
)
from autosched.policies.base.listing import Listing
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import MeanLinks, longest, mean_seconds, ranks
from autosched.problem import Problem


@without_collecting()
def heft(problem: Problem) -> Placement:
    """Place tasks by upward rank where each finishes first (Topcuoglu, Hariri, Wu, IEEE TPDS 2002).

    The order is that of planned starts; ties go to the task added earlier and to the earlier
    device. Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> durations = {"short": 1, "long": 3, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> placed = heft(Problem(graph, Machine.emulated(gpus=1)))
    >>> placed.device, placed.order
    ({'short': 'cuda:0', 'long': 'cpu', 'middle': 'cuda:0'}, ('long', 'middle', 'short'))
    """
    possible = Possible(problem)
    if possible.partial:
        return by_rank(problem, possible)
    steps = 4 * len(problem.tasks) * len(problem.devices)
    listing = Listing(problem.tables, mode(steps, list_schedule, longest))
    return listing.placement(problem, listing.plan(listing.order(listing.mean)))


def by_rank(problem: Problem, possible: Possible) -> Placement:
    """Do the same where the choice of a device may rule out others for tasks to come."""
    mask = possible.mask()
    mean = mean_seconds(problem.by_task(problem.tables.seconds), mask)
    rank = ranks(problem.lists, Mode(False), mean, MeanLinks.of(problem.tables, mask))
    plan = _Plan(problem)
    order = topological_order(problem.before, (-rank).tolist())
    for task in order:
        slot = plan.best(task, possible.devices(task))
        while not possible.choose(task, slot.device):
            slot = plan.best(task, possible.devices(task))
        plan.commit(task, slot)
    return problem.placement(plan.device, sorted(order, key=plan.start.__getitem__))


class _Slot(NamedTuple):
    """A device, a gap of a stream, and a time at which a task could start."""

    device: int
    stream: int
    gap: int
    start: float


class _Plan:
    """A partial schedule, to which tasks are added as ``kernels.list_schedule`` does."""

    def __init__(self, problem: Problem):
        self.problem = problem
        tasks = len(problem.tasks)
        self.device = [-1] * tasks
        self.start = [math.nan] * tasks
        self.finish = [0.0] * tasks
        self.state = Planning.of(problem.tables, Mode(False), tasks + 1)

    def best(self, task: int, devices: Iterable[int]) -> _Slot:
        """Return the slot of least finish time; ties go to the device named earlier.

        The first task of a group decides for all. Raises ScheduleError if none is finite.
        """
        t, s = self.problem.lists, self.state
        before = t.before[t.before_at[task] : t.before_at[task + 1]]
        after = max([self.finish[other] for other in before], default=0.0)
        count = sources(t, task, self.device, self.finish, s)
        found = []
        for device in devices:
            ready = arrive(t, device, count, after, math.inf, s, False)
            if s.issues:
                ready = issue(t, self._where(task, device), ready, s, False)
            seconds = self.problem.seconds[task][device]
            start, stream, gap = earliest_gap(s, device, ready, seconds, math.inf)
            finish = start + self.problem.together[task][device]
            if finish < math.inf:
                found.append((finish, _Slot(device, stream, gap, start)))
        if not found:
            name = self.problem.tasks[task]
            raise ScheduleError(
                f"task {name!r} would end later than a float can say, wherever it runs"
            )
        return min(found, key=itemgetter(0))[1]

    def commit(self, task: int, slot: _Slot) -> None:
        """Plan a task and its copies in this slot."""
        device, stream, gap, start = slot
        t, s = self.problem.lists, self.state
        count = sources(t, task, self.device, self.finish, s)
        arrive(t, device, count, 0.0, math.inf, s, True)
        if s.issues:
            issue(t, self._where(task, device), 0.0, s, True)
        finish = start + self.problem.seconds[task][device]
        take(s, stream, gap, start, finish)
        self.device[task] = device
        self.start[task] = start
        self.finish[task] = finish

    def _where(self, task: int, device: int) -> int:
        return task * len(self.problem.devices) + device
