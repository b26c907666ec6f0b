"""Schedule tasks in given sequences per device, such as pipeline orders.

List scheduling over the graph, with one more edge between neighbours of a sequence. Tasks are
issued in the order of their predicted ends. Tasks that are in no sequence run as soon as they can
start. Copies are planned as lowering and the simulator make them, on the copy streams that they
occupy; copies that write inputs back at the end are left out.

A pipeline is a policy and not a graph transformation: micro-batches are added to the graph one
after another, as the serial run executes them, and ``in_order`` gives the order on each device. So
one graph serves all pipeline orders, and dropout draws the same random numbers as the serial run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.placement import Placement
from autosched.policies.base.kernels import send
from autosched.problem import Policy, Problem


def in_order(sequences: Mapping[str, Sequence[str]]) -> Policy:
    """Return the policy that runs the tasks of ``sequences[device]`` on that device, in that order.

    All other tasks must be bound to a device, by ``on=`` or because they share memory with one that
    is. They start when they can, before those in sequences; of several that could start at the same
    time, the one added first does. The policy raises ScheduleError if sequences contradict the
    graph, and MachineError or GraphError for unknown devices and tasks.

    >>> from autosched import Machine
    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> in_order({"cuda:0": ["c", "a"], "cpu": ["b"]})(Problem(graph, Machine.emulated(gpus=1)))
    Placement(device={'a': 'cuda:0', 'b': 'cpu', 'c': 'cuda:0'}, order=('b', 'c', 'a'))
    """
    lists = [*sequences.values()] if isinstance(sequences, Mapping) else [None]
    if any(isinstance(names, str) or not isinstance(names, Sequence) for names in lists):
        what = "sequences must be a mapping of devices to lists of tasks"
        raise ScheduleError(f"{what}, got {shown(sequences)}")
    given = {device: tuple(names) for device, names in sequences.items()}

    def policy(problem: Problem) -> Placement:
        previous = _previous(problem.graph, given)
        devices = _devices(problem, given)
        for task, p in enumerate(devices):
            if math.isinf(problem.seconds[task][p]):
                raise ScheduleError(
                    f"task {problem.tasks[task]!r} must run on {problem.devices[p]!r}, "
                    "but its seconds there are infinite"
                )
        plan = _Plan(problem, devices, previous)
        if len(plan.order) < len(devices):
            raise _contradiction(problem, plan.missing, previous, devices)
        return problem.placement(devices, plan.order)

    policy.__name__ = "in_order"
    return policy


def _previous(graph: Graph, sequences: Mapping[str, Sequence[str]]) -> dict[int, int]:
    """Return the predecessor of each task in its sequence; all tasks are indices."""
    number: dict[str, int] = {}
    for name in chain.from_iterable(sequences.values()):
        if name in number:
            raise ScheduleError(f"task {name!r} is in sequences twice; each task runs once")
        number[name] = graph.task(name).index
    pairs = chain.from_iterable(map(pairwise, sequences.values()))
    return {number[task]: number[before] for before, task in pairs}


def _devices(problem: Problem, sequences: Mapping[str, Sequence[str]]) -> list[int]:
    """Return the device of each task: that of a sequence, or the only one it may run on.

    A sequence determines the device of its tasks and of all tasks in their groups.
    """
    group = problem.lists.group
    found: dict[int, tuple[str, str]] = {}  # by group: the device, and a task in its sequence
    for device, names in sequences.items():
        p = problem.devices.index(problem.machine.device(device).name)
        for name in names:
            task = problem.graph.task(name).index
            if not problem.allowed[task, p]:
                must = problem.devices[problem.allowed[task].argmax()]
                raise ScheduleError(
                    f"task {name!r} is in the sequence of {device!r}, but must run on {must!r}"
                )
            before, other = found.setdefault(group[task], (device, name))
            if before != device:
                raise ScheduleError(
                    f"task {other!r} is in the sequence of {before!r} and {name!r} in that of "
                    f"{device!r}, but they share memory, or are kept together"
                )
    placed = []
    for task, allowed in enumerate(problem.allowed):
        if group[task] in found:
            placed.append(problem.devices.index(found[group[task]][0]))
        elif allowed.sum() == 1:
            placed.append(int(allowed.argmax()))
        else:
            raise ScheduleError(
                f"task {problem.tasks[task]!r} is in no sequence and is bound to no device; "
                "bind it with on="
            )
    return placed


class _Plan:
    """The schedule of all tasks whose predecessors can be planned; tasks and devices are numbers."""

    def __init__(self, problem: Problem, device: Sequence[int], previous: Mapping[int, int]):
        streams = problem.lists.streams
        self.problem = problem
        # By end: copies run in order of issue, and none should wait for a later one.
        self.order: list[int] = []
        self.device = device
        self.next = {before: task for task, before in previous.items()}
        # Tasks in no sequence run before those in one, since other devices wait for them.
        self.in_sequence = {*previous, *previous.values()}
        self.missing = [len(row) + (t in previous) for t, row in enumerate(problem.before)]
        self.ready = [0.0 for _ in device]
        self.copies = _copies(problem, device)
        self.out_free = [0.0 for _ in streams]
        self.in_free = [0.0 for _ in streams]
        self.idle = list(streams)  # by device, how many streams
        self.waiting: list[list[tuple[bool, int]]] = [[] for _ in streams]  # tasks, for a stream
        # Time, number of earlier starts, task: its data have arrived (-1), or it ends.
        self.events: list[tuple[float, int, int]] = []
        self.started = 0
        self._run()

    def _run(self) -> None:
        for p in range(len(self.idle)):
            self._send(~p, p, 0.0)
        for task, count in enumerate(self.missing):
            if not count:
                heappush(self.events, (self.ready[task], -1, task))
        while self.events:
            time, started, task = heappop(self.events)
            if started < 0:
                heappush(self.waiting[self.device[task]], (task in self.in_sequence, task))
            else:
                self._end(time, task)
            while not self.events or self.events[0][0] > time:
                able = [
                    self.waiting[p][0][1] for p, n in enumerate(self.idle) if n and self.waiting[p]
                ]
                if not able:
                    break
                self._start(min(able), time)

    def _start(self, task: int, time: float) -> None:
        p = self.device[task]
        heappop(self.waiting[p])
        self.idle[p] -= 1
        heappush(self.events, (time + self.problem.seconds[task][p], self.started, task))
        self.started += 1

    def _end(self, end: float, task: int) -> None:
        self.order.append(task)
        self.idle[self.device[task]] += 1
        self._send(task, self.device[task], end)
        for user in self.problem.after[task]:
            self._release(user, end)
        if task in self.next:
            self._release(self.next[task], end)

    def _send(self, maker: int, source: int, since: float) -> None:
        """Copy what a task produced to the devices that need it."""
        t = self.problem.lists
        for copy in self.copies.get(maker, ()):
            start = send(
                t, copy.path, since, copy.seconds, self.out_free, source, self.in_free, copy.device
            )
            for reader in copy.readers:
                self.ready[reader] = max(self.ready[reader], start + copy.seconds)

    def _release(self, task: int, time: float) -> None:
        self.ready[task] = max(self.ready[task], time)
        self.missing[task] -= 1
        if not self.missing[task]:
            heappush(self.events, (self.ready[task], -1, task))


class _Copy(NamedTuple):
    """A copy of a datum: its path, its duration, its destination, and who reads it there."""

    path: int
    seconds: float
    device: int
    readers: list[int]


def _copies(problem: Problem, device: Sequence[int]) -> dict[int, list[_Copy]]:
    """Return the copies of each task's results; of sources on device ``p``, under key ``~p``."""
    t = problem.lists
    found: dict[tuple[int, int], _Copy] = {}
    copies: dict[int, list[_Copy]] = {}
    for task, here in enumerate(device):
        for datum in problem.reads[task]:
            maker = t.maker[datum]
            source = device[maker] if maker >= 0 else t.home[datum]
            if source == here:
                continue
            if (datum, here) not in found:
                row = source if maker >= 0 else t.row[datum]
                path = row * len(problem.devices) + here
                copy = _Copy(path, problem.copy_seconds(datum, row, here), here, [])
                found[datum, here] = copy
                copies.setdefault(maker if maker >= 0 else ~source, []).append(copy)
            found[datum, here].readers.append(task)
    return copies


def _contradiction(
    problem: Problem, missing: Sequence[int], previous: Mapping[int, int], device: Sequence[int]
) -> ScheduleError:
    """Return an error with the tasks that wait for each other.

    Of consecutive tasks that wait for the same reason, the first and the last are named.
    """
    cycle = _cycle(problem, missing, previous)
    corners = [(task, needs) for i, (task, needs) in enumerate(cycle) if needs != cycle[i - 1][1]]
    says = []
    for (_, needs), (other, _) in pairwise([*corners, corners[0]]):
        name = problem.tasks[other]
        says.append(
            f"needs {name!r}"
            if needs
            else f"comes after {name!r} in the sequence of {problem.devices[device[other]]!r}"
        )
    first = problem.tasks[corners[0][0]]
    return ScheduleError(f"sequences contradict the graph: {first!r} {', which '.join(says)}")


def _cycle(
    problem: Problem, missing: Sequence[int], previous: Mapping[int, int]
) -> list[tuple[int, bool]]:
    """Return a cycle of tasks that each wait for the next, with whether the graph requires that.

    For the first task it does, for the last it does not.
    """
    visited: dict[int, bool] = {}
    task = next(task for task, count in enumerate(missing) if count)
    while task not in visited:
        needed = [other for other in problem.before[task] if missing[other]]
        visited[task] = bool(needed)
        task = needed[0] if needed else previous[task]
    cycle = list(visited.items())[list(visited).index(task) :]
    first = next(i for i, (_, needs) in enumerate(cycle) if needs and not cycle[i - 1][1])
    return cycle[first:] + cycle[:first]
