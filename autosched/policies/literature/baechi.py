"""Earliest task first (m-ETF) and small communication times (m-SCT), with enough memory.

Jeon, Cai, Srivastava, Jiang, Ke, Meng, Xie, Gupta, "Baechi: fast device placement of machine
learning graphs", SoCC 2020, after Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems
with interprocessor communication times", SIAM J. Comput. 18(2), 1989. Of all tasks whose
predecessors are placed, and all devices with enough free memory for them, the pair with the
earliest start is placed next.

Extensions of the paper: memory of values without further readers is freed. If no device has enough
memory, the task goes to the device that lacks the least, because lowering can spill values to the
host and reload them. Start times are computed again when a task is considered, for a few tasks in
each step, so the policies compute O(tasks x devices) of them.

m-SCT is after Hanen, Munier, "An approximation algorithm for scheduling dependent tasks on m
processors with small communication delays", Discrete Applied Mathematics 108, 2001. Each task has
at most one favourite child, and is the favourite child of at most one task. A device that has run a
task is reserved for its favourite child, unless another task could start there and nowhere else as
early. The paper computes favourite children by a linear program. This module uses a greedy matching
instead, which needs no solver: tasks by descending upward rank each choose, among the readers not
yet chosen, the one with the longest path to the end, including the copy to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import upward_ranks
from autosched.policies.base.room import Room
from autosched.problem import Problem

__all__ = ["m_etf", "m_sct"]

_MOST_TRIED = 8  # tasks whose start times are computed again in one step, at most


def m_etf(problem: Problem) -> Placement:
    """Place the task that can start first on a device with enough memory (Jeon et al., SoCC 2020).

    The order is that of planned starts; ties go to the higher upward rank, the task added earlier,
    the earlier device. Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> from dataclasses import replace
    >>> machine = Machine.emulated(gpus=2)
    >>> cpu, *gpus = machine.devices
    >>> machine = Machine([cpu, *(replace(gpu, nbytes=8) for gpu in gpus)], machine.links)
    >>> graph = Graph()
    >>> seconds = {"cuda:0": 1, "cuda:1": 9}
    >>> graph.output(*(graph.add(int, name=n, seconds=seconds, nbytes=8) for n in "ab"))
    >>> m_etf(Problem(graph, machine)).device
    {'a': 'cuda:0', 'b': 'cuda:1'}
    """
    return _earliest_start(problem, {})


def m_sct(problem: Problem) -> Placement:
    """Place tasks by earliest start, favourite children with their parents (Hanen, Munier 2001).

    Ties and errors as of ``m_etf``.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> a = graph.add(int, name="a", seconds=1, nbytes=1e9)
    >>> b, c = (graph.add(abs, a, name=name, seconds=s) for name, s in (("b", 1), ("c", 9)))
    >>> placed = m_sct(Problem(graph, Machine.emulated(gpus=2))).device
    >>> placed["c"] == placed["a"]
    True
    """
    return _earliest_start(problem, _favourites(problem))


def _favourites(problem: Problem) -> dict[int, int]:
    """Return the favourite child of tasks with readers, each of at most one task."""
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


class _Offer(NamedTuple):
    """A possible start of a task, ordered by least excess of memory, then by start."""

    excess: float
    finish: float
    start: float
    slot: Slot


def _earliest_start(problem: Problem, favourite: Mapping[int, int]) -> Placement:
    """Place tasks by earliest start on devices with enough memory.

    ``favourite`` is the favourite child of some tasks. For as long as copies to that child would
    take on another device, other tasks start on the device only if they could start nowhere else as
    early.
    """
    listing = _Listing(problem, favourite)
    listing.run()
    order = sorted(
        range(len(problem.tasks)), key=lambda task: (listing.plan.start[task], listing.turn[task])
    )
    return problem.placement(listing.plan.device, order)


class _Listing:
    def __init__(self, problem: Problem, favourite: Mapping[int, int]):
        self.problem = problem
        self.possible = Possible(problem)
        self.plan = Plan(problem)
        self.room = Room(problem)
        self.rank = upward_ranks(problem, self.possible)
        self.favourite = favourite
        # By device, the task for which it is reserved, and until when.
        self.reserved: dict[int, tuple[int, float]] = {}
        self.turn = [0] * len(self.rank)
        self.missing = [len(before) for before in self.problem.before]

    def run(self) -> None:
        """Place all tasks."""
        ready: list[tuple[float, float, float, int]] = []
        for task, missing in enumerate(self.missing):
            if not missing:
                self._push(ready, task)
        turns = 0
        while ready:
            task, offer = self._next(ready)
            if self.possible.choose(task, offer.slot.device):
                self._commit(task, offer.slot)
                self.turn[task] = turns = turns + 1
                for user in self.problem.after[task]:
                    self.missing[user] -= 1
                    if not self.missing[user]:
                        self._push(ready, user)
            else:
                self._push(ready, task)

    def _next(self, ready: list[tuple[float, float, float, int]]) -> tuple[int, _Offer]:
        """Return the task that can start first among the first few of the queue."""
        tried: list[tuple[tuple[float, float, float, int], _Offer]] = []
        while (
            ready
            and len(tried) < _MOST_TRIED
            and not (tried and min(key for key, _ in tried) <= ready[0])
        ):
            task = heapq.heappop(ready)[-1]
            offer = self._offer(task)
            tried.append((self._key(task, offer), offer))
        tried.sort(key=lambda item: item[0])
        for key, _ in tried[1:]:
            heapq.heappush(ready, key)
        return tried[0][0][-1], tried[0][1]

    def _push(self, ready: list[tuple[float, float, float, int]], task: int) -> None:
        heapq.heappush(ready, self._key(task, self._offer(task)))

    def _key(self, task: int, offer: _Offer) -> tuple[float, float, float, int]:
        return offer.excess, offer.start, -self.rank[task], task

    def _offer(self, task: int) -> _Offer:
        offers = []
        for device in self.possible.devices(task):
            slot = self.plan.earliest_finish(task, (device,))
            child, until = self.reserved.get(device, (task, 0.0))
            start = slot.start if child == task else max(slot.start, until)
            finish = start + self.problem.seconds[task][device]
            offers.append(_Offer(self.room.excess(task, device), finish, start, slot))
        return min(offers, key=lambda offer: (offer.excess, offer.finish, offer.start))

    def _commit(self, task: int, slot: Slot) -> None:
        self.plan.commit(task, slot)
        self.room.place(task, slot.device)
        child = self.favourite.get(task)
        if child is None:
            self.reserved.pop(slot.device, None)
        else:
            self.reserved[slot.device] = (
                child,
                self.plan.finish[task] + self._away(task, child, slot.device),
            )

    def _away(self, task: int, child: int, device: int) -> float:
        """Return how long a reader would wait for copies on the nearest other device."""
        problem = self.problem
        data = [d for d in problem.reads[child] if problem.lists.maker[d] == task]
        others = [p for p in self.possible.devices(child) if p != device]
        waits = (sum(problem.copy_seconds(d, device, p) for d in data) for p in others)
        return min(waits, default=0.0)
