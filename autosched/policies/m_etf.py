"""Earliest task first (m-ETF), with enough memory.

Jeon, Cai, Srivastava, Jiang, Ke, Meng, Xie, Gupta, "Baechi: fast device placement of machine
learning graphs", SoCC 2020, after Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems
with interprocessor communication times", SIAM J. Comput. 18(2), 1989. Of all tasks whose
predecessors are placed, and all devices with enough free memory for them, the pair with the
earliest start is placed next.

Extensions of the paper: memory of values without further readers is freed. If no device has enough
memory, the task goes to the device that lacks the least, because lowering can spill values to the
host and reload them. Start times are computed again when a task is considered, for a few tasks in
each step, so the policy computes O(tasks x devices) of them.
"""

from __future__ import annotations

import heapq

from autosched.graph.graph import Task
from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import upward_ranks
from autosched.problem import Problem

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
    listing = _Listing(problem)
    listing.run()
    order = sorted(listing.turn, key=listing.plan.start.__getitem__)
    return problem.placement(listing.plan.device, order)


_Key = tuple[float, float, float, int]  # excess of memory, start, negative rank, task


class _Listing:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.possible = Possible(problem)
        self.plan = Plan(problem)
        self.room = _Room(problem)
        self.rank = upward_ranks(problem, self.possible)
        self.turn: list[int] = []  # tasks as they were placed
        self.ready: list[_Key] = []

    def run(self) -> None:
        """Place all tasks."""
        missing = [len(before) for before in self.problem.before]
        for task, count in enumerate(missing):
            if not count:
                self._push(task)
        while self.ready:
            task, slot = self._next()
            if not self.possible.choose(task, slot.device):
                self._push(task)
                continue
            self.plan.commit(task, slot)
            self.room.place(task, slot.device)
            self.turn.append(task)
            for user in self.problem.after[task]:
                missing[user] -= 1
                if not missing[user]:
                    self._push(user)

    def _next(self) -> tuple[int, Slot]:
        """Return the task that can start first among the first few of the queue, and its slot."""
        tried: list[tuple[_Key, Slot]] = []
        while (
            self.ready
            and len(tried) < _MOST_TRIED
            and not (tried and min(key for key, _ in tried) <= self.ready[0])
        ):
            tried.append(self._keyed(heapq.heappop(self.ready)[-1]))
        tried.sort(key=lambda item: item[0])
        for key, _ in tried[1:]:
            heapq.heappush(self.ready, key)
        return tried[0][0][-1], tried[0][1]

    def _push(self, task: int) -> None:
        heapq.heappush(self.ready, self._keyed(task)[0])

    def _keyed(self, task: int) -> tuple[_Key, Slot]:
        """Return the place of a task in the queue, and its best slot."""
        seconds = self.problem.seconds[task]

        def key(slot: Slot) -> tuple[float, float, float]:
            excess = self.room.excess(task, slot.device)
            return excess, slot.start + seconds[slot.device], slot.start

        best = min(self.plan.slots(task, self.possible.devices(task)), key=key)
        return (key(best)[0], best.start, -self.rank[task], task), best


class _Room:
    """The bytes that each device holds while tasks are placed.

    A value is held on the device of its producer, and on each device that it was copied to, until
    its last reader is placed. Outputs stay. Values that share memory count once.
    """

    def __init__(self, problem: Problem):
        self.graph = graph = problem.graph
        machine = problem.machine
        self.nbytes = [problem.costs.value_nbytes(value) for value in graph.values]
        self.limit = [device.nbytes for device in machine.devices]
        self.held = [0.0 for _ in machine.devices]
        self.where: dict[int, set[int]] = {}  # by root
        self.readers = [0] * len(graph.values)  # by root, the number of readers not yet placed
        outputs = [graph.values[value].root for value in graph.outputs.values()]
        for root in (*(value.index for value in graph.sources), *outputs):
            self.readers[root] += 1  # a reader that is never placed
        for task in graph.tasks:
            for root in self._read(task):
                self.readers[root] += 1
        for value, home in problem.homes.items():
            self._put(value, machine.names.index(home))

    def excess(self, task: int, device: int) -> float:
        """Return by how many bytes a device would exceed its memory if a task ran there next."""
        new = sum(self.nbytes[root] for root in self._new(self.graph.tasks[task], device))
        return max(0.0, self.held[device] + new - self.limit[device])

    def place(self, task: int, device: int) -> None:
        """Place a task on a device, and free values without further readers."""
        placed = self.graph.tasks[task]
        for root in self._new(placed, device):
            self._put(root, device)
        for root in self._read(placed):
            self.readers[root] -= 1
            if not self.readers[root]:
                for holder in self.where.pop(root):
                    self.held[holder] -= self.nbytes[root]

    def _read(self, task: Task) -> dict[int, None]:
        return dict.fromkeys(self.graph.values[use.value].root for use in task.reads)

    def _new(self, task: Task, device: int) -> list[int]:
        made = [
            self.graph.values[use.value].root
            for use in task.outputs
            if self.graph.is_used(use.value)
        ]
        roots = dict.fromkeys([*self._read(task), *made])
        return [root for root in roots if device not in self.where.get(root, ())]

    def _put(self, root: int, device: int) -> None:
        self.where.setdefault(root, set()).add(device)
        self.held[device] += self.nbytes[root]
