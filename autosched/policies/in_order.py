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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

from autosched.costs.costs import Costs
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Use
from autosched.machine.machine import Machine
from autosched.placement import Placement, choices, home
from autosched.policies.base.problem import Path, Policy

__all__ = ["in_order"]


def in_order(sequences: Mapping[str, Sequence[str]]) -> Policy:
    """Return the policy that runs the tasks of ``sequences[device]`` on that device, in that order.

    All other tasks must be bound to a device, by ``on=`` or because they share memory with one that
    is. They start when they can, before those in sequences; of several that could start at the same
    time, the one added first does. The policy raises ScheduleError if sequences contradict the
    graph, and MachineError or GraphError for unknown devices and tasks.

    >>> graph = Graph()
    >>> tasks = [graph.add(int, name=name) for name in "abc"]
    >>> in_order({"cuda:0": ["c", "a"], "cpu": ["b"]})(graph, Machine.emulated(gpus=1), Costs())
    Placement(device={'a': 'cuda:0', 'b': 'cpu', 'c': 'cuda:0'}, order=('b', 'c', 'a'))
    """
    kept = {device: tuple(names) for device, names in sequences.items()}

    def policy(graph: Graph, machine: Machine, costs: Costs) -> Placement:
        behind = _neighbours(graph, kept)
        devices = _devices(graph, machine, kept)
        plan = _Plan(graph, machine, costs, devices, behind)
        plan.run()
        if len(plan.order) < len(devices):
            raise _contradiction(graph, plan.missing, behind, devices)
        names = [task.name for task in graph.tasks]
        return Placement(
            dict(zip(names, devices, strict=True)), tuple(names[task] for task in plan.order)
        )

    policy.__name__ = "in_order"
    return policy


def _neighbours(graph: Graph, sequences: Mapping[str, Sequence[str]]) -> dict[int, int]:
    """Return the predecessor of each task in its sequence; all tasks are indices."""
    seen: dict[str, None] = {}
    for name in (name for names in sequences.values() for name in names):
        if name in seen:
            raise ScheduleError(f"task {name!r} stands in sequences twice; each task runs once")
        seen[name] = None
    number = {name: graph.task(name).index for name in seen}
    return {
        number[task]: number[before]
        for names in sequences.values()
        for before, task in pairwise(names)
    }


def _devices(graph: Graph, machine: Machine, sequences: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the device of each task: that of a sequence, or the only one it may run on.

    A sequence determines the device of its tasks and of all tasks in their groups.
    """
    allowed = choices(graph, machine)
    found: dict[int, tuple[str, str]] = {}  # by group: the device, and a task in its sequence
    for device, names in sequences.items():
        machine.device(device)
        for name in names:
            task = graph.task(name).index
            if device not in allowed.devices[task]:
                must = allowed.devices[task][0]
                raise ScheduleError(
                    f"task {name!r} stands in the sequence of {device!r}, but must run on {must!r}"
                )
            before, other = found.setdefault(allowed.group[task], (device, name))
            if before != device:
                raise ScheduleError(
                    f"task {other!r} stands in the sequence of {before!r} and {name!r} in that of {device!r}, "
                    "but they share memory, or are kept together"
                )
    for task, (group, possible) in enumerate(zip(allowed.group, allowed.devices, strict=True)):
        if group not in found and len(possible) > 1:
            name = graph.tasks[task].name
            raise ScheduleError(
                f"task {name!r} stands in no sequence and is bound to no device; bind it with on="
            )
    return [
        found[g][0] if g in found else possible[0]
        for g, possible in zip(allowed.group, allowed.devices, strict=True)
    ]


class _Plan:
    """A partial schedule. Tasks and devices are numbers, tasks in insertion order."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        costs: Costs,
        devices: Sequence[str],
        behind: Mapping[int, int],
    ):
        number = {name: p for p, name in enumerate(machine.names)}
        self.users = graph.users
        self.order: list[
            int
        ] = []  # by end: copies run in order of issue, and none should wait for a later one
        self.device = [number[name] for name in devices]
        self.seconds = list(_seconds(graph, machine, costs, devices))
        self.next = {before: task for task, before in behind.items()}
        self.kept = {
            *behind,
            *behind.values(),
        }  # in a sequence: other tasks run first, since other devices wait for them
        self.missing = [len(task.dependencies) + (task.index in behind) for task in graph.tasks]
        self.ready = [0.0 for _ in devices]
        self.copies = _copies(graph, machine, costs, self.device)
        self.path = cache(
            lambda q, p: Path.between(machine, machine.devices[q], machine.devices[p])
        )
        self.out_free = [0.0 for _ in number]
        self.in_free = [0.0 for _ in number]
        self.streams = [
            [0.0] * device.streams for device in machine.devices
        ]  # heaps of the times at which they are free
        self.running: list[tuple[float, int, int]] = []  # end, number of earlier starts, task
        self.started = 0
        # By device, the tasks that wait for the device alone: by arrival of their data; and, if
        # these have arrived, by task.
        self.later: list[list[tuple[float, int]]] = [[] for _ in number]
        self.now: list[list[tuple[bool, int]]] = [[] for _ in number]
        self.offer: list[tuple[float, int] | None] = [None for _ in number]
        self.offers: list[
            tuple[float, int, int]
        ] = []  # start, task, device; stale unless it is that device's offer

    def run(self) -> None:
        """Plan all tasks whose predecessors can be planned."""
        for p in range(len(self.streams)):
            self._send(~p, p, 0.0)
        for task, count in enumerate(self.missing):
            if not count:
                self._release(task)
        while self.offers or self.running:
            if self.running and (not self.offers or self.running[0][0] <= self.offers[0][0]):
                self._end(*heappop(self.running))
                continue
            start, task, p = heappop(self.offers)
            if self.offer[p] == (start, task):
                self._start(task, p, start)

    def _start(self, task: int, p: int, start: float) -> None:
        if self.now[p]:
            heappop(self.now[p])
        else:
            heappop(self.later[p])
        end = start + self.seconds[task]
        heapreplace(self.streams[p], end)
        heappush(self.running, (end, self.started, task))
        self.started += 1
        self._choose(p)

    def _end(self, end: float, _: int, task: int) -> None:
        self.order.append(task)
        self._send(task, self.device[task], end)
        for user in self.users[task]:
            self._come(user, end)
        if task in self.next:
            self._come(self.next[task], end)

    def _send(self, maker: int, source: int, since: float) -> None:
        """Copy what a task produced to the devices that need it."""
        for seconds, p, readers in self.copies.get(maker, ()):
            path = self.path(source, p)
            out = self.out_free[source] if path.holds_out else 0.0
            into = self.in_free[p] if path.holds_in else 0.0
            end = max(since, out, into) + seconds
            if path.holds_out:
                self.out_free[source] = end
            if path.holds_in:
                self.in_free[p] = end
            for reader in readers:
                self.ready[reader] = max(self.ready[reader], end)

    def _come(self, task: int, time: float) -> None:
        """Count down the predecessors of a task, one of which has ended."""
        self.ready[task] = max(self.ready[task], time)
        self.missing[task] -= 1
        if not self.missing[task]:
            self._release(task)

    def _release(self, task: int) -> None:
        p = self.device[task]
        heappush(self.later[p], (self.ready[task], task))
        self._choose(p)

    def _choose(self, p: int) -> None:
        """Offer the task that a device could start first."""
        free = self.streams[p][0]
        now = self.now[p]
        later = self.later[p]
        while later and later[0][0] <= free:
            task = heappop(later)[1]
            heappush(now, (task in self.kept, task))
        self.offer[p] = offer = (free, now[0][1]) if now else later[0] if later else None
        if offer is not None:
            heappush(self.offers, (*offer, p))


class _Copy(NamedTuple):
    """A copy of a datum: its duration, its destination, and the tasks that read it there."""

    seconds: float
    device: int
    readers: list[int]


def _copies(
    graph: Graph, machine: Machine, costs: Costs, device: Sequence[int]
) -> dict[int, list[_Copy]]:
    """Return the copies of each task's results.

    Of the sources on device ``p``, under key ``~p``.
    """
    number = {name: p for p, name in enumerate(machine.names)}
    found: dict[tuple[Use, int], _Copy] = {}
    copies: dict[int, list[_Copy]] = {}
    for task, here in zip(graph.tasks, device, strict=True):
        for use in graph.needs(task):
            value = graph.values[use.value]
            maker = graph.maker(use)
            source = number[home(graph, machine, value)] if maker is None else device[maker]
            if source == here:
                continue
            if (use, here) not in found:
                ends = machine.devices[source], machine.devices[here]
                path = Path.between(
                    machine, *ends, pageable=maker is None and value.name in costs.pageable
                )
                found[use, here] = copy = _Copy(path.seconds(costs.value_nbytes(value)), here, [])
                copies.setdefault(~source if maker is None else maker, []).append(copy)
            found[use, here].readers.append(task.index)
    return copies


def _seconds(
    graph: Graph, machine: Machine, costs: Costs, devices: Sequence[str]
) -> Iterator[float]:
    """Yield the duration of each task. Raises ScheduleError if one is infinite."""
    for task, name in zip(graph.tasks, devices, strict=True):
        seconds = costs.task_seconds(task, machine.device(name))
        if math.isinf(seconds):
            raise ScheduleError(
                f"task {task.name!r} must run on {name!r}, but its seconds there are infinite"
            )
        yield seconds


def _contradiction(
    graph: Graph, missing: Sequence[int], behind: Mapping[int, int], devices: Sequence[str]
) -> ScheduleError:
    """Return an error with the tasks that wait for each other.

    Of consecutive tasks that wait for the same reason, the first and the last are named.
    """
    circle = _circle(graph, missing, behind)
    corners = [(task, needs) for i, (task, needs) in enumerate(circle) if needs != circle[i - 1][1]]
    says = []
    for (_, needs), (other, _) in pairwise([*corners, corners[0]]):
        name = graph.tasks[other].name
        says.append(
            f"needs {name!r}"
            if needs
            else f"stands behind {name!r} in the sequence of {devices[other]!r}"
        )
    first = graph.tasks[corners[0][0]].name
    return ScheduleError(f"sequences contradict the graph: {first!r} {', which '.join(says)}")


def _circle(
    graph: Graph, missing: Sequence[int], behind: Mapping[int, int]
) -> list[tuple[int, bool]]:
    """Return a cycle of tasks that each wait for the next, with whether the graph requires that.

    For the first task it does, for the last it does not.
    """
    walked: dict[int, bool] = {}
    task = next(task for task, count in enumerate(missing) if count)
    while task not in walked:
        needed = [
            dependency.task
            for dependency in graph.tasks[task].dependencies
            if missing[dependency.task]
        ]
        walked[task] = bool(needed)
        task = needed[0] if needed else behind[task]
    circle = list(walked.items())[list(walked).index(task) :]
    first = next(i for i, (_, needs) in enumerate(circle) if needs and not circle[i - 1][1])
    return circle[first:] + circle[:first]
