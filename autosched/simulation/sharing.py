"""Determine how much longer tasks take that share a device.

``Costs`` say for which part of its seconds a task takes all that a device can do. As long as the
tasks on the streams of a device together take no more than all of it, they do not disturb each
other. Otherwise those that take some of it slow down by the same factor, so that together they take
just all of it (processor sharing: Kleinrock, "Time-shared systems", JACM 14(2), 1967). Logical devices on one
physical device share that. A real GPU starts kernels of another stream when those before them leave
room, which takes as long in total.

CPU streams divide the threads of the CPU, whether others are idle or not, so each can do a fixed part
of all (Amdahl, AFIPS 1967).

The result is a duration for each instruction, and all that depends on durations follows. Copies are
not slowed down. In a loop, tasks of other runs in flight are there as well. Instead of finding out
which, all tasks of a device are slowed down so far that its busiest stream takes as long as the
device needs for a whole run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from autosched.problem import Problem
from autosched.program.program import Program, Run
from autosched.simulation.issuing import System, issuing

_Place = tuple[str | None, str]
_Key = TypeVar("_Key")


def shared(seconds: Sequence[float], program: Program, problem: Problem) -> Sequence[float]:
    """Return the seconds of instructions that share devices; ``seconds`` are those alone.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> m = graph.input("m")
    >>> graph.output(m @ m, m @ m)
    >>> gpu = asc.Device("cuda:0", streams=2, launch_seconds=0.0)
    >>> costs = asc.Costs(work={"matmul": asc.Work(1e9, 0), "matmul_1": asc.Work(1e9, 0)})
    >>> made = asc.schedule(graph, asc.Machine([gpu]), policy="single", costs=costs)
    >>> [span.seconds for span in made.simulate().spans]
    [0.0002, 0.0002]
    """
    machine = problem.machine
    costs = problem.costs
    if not machine.contention or not (any(costs.shares.values()) or costs.work):
        return seconds
    streams: dict[_Place, int] = {}
    for stream in program.streams:
        place = machine.device(stream.device).hardware
        streams[place] = streams.get(place, 0) + stream.name.startswith("compute")
    if max(streams.values(), default=0) < 2:
        return seconds
    found = list(seconds)
    parts: dict[int, float] = {}  # by instruction, the part of an accelerator that a task takes
    places: dict[int, _Place] = {}
    for i, instruction in enumerate(program.instructions):
        if type(instruction) is not Run or not 0 < seconds[i] < math.inf:
            continue
        device = machine.device(instruction.stream.device)
        place = device.hardware
        busy = 0.0
        if streams[place] > 1:
            busy = costs.busy_seconds(problem.graph.task(instruction.task), device)
        if busy and device.is_accelerator:
            parts[i] = busy / seconds[i]
            places[i] = place
        elif busy:
            found[i] += busy * (streams[place] - 1)
    if parts:
        alone = [(places[i], part * found[i]) for i, part in parts.items()]
        _Sharing(found, System(program, found, issuing(program, problem)), parts, places).fill()
        if program.in_flight > 1:
            _slow_down(found, program, _sums(alone), places)
    return found


def _slow_down(
    seconds: list[float],
    program: Program,
    needed: Mapping[_Place, float],
    places: Mapping[int, _Place],
) -> None:
    """Make tasks longer, so that the busiest stream of each device takes as long as is needed."""
    streams = _sums(
        (program.instructions[i].stream, taken) for i, taken in enumerate(seconds) if taken
    )
    busiest: dict[_Place, float] = {}
    for i, place in places.items():
        taken = streams[program.instructions[i].stream]
        busiest[place] = max(busiest.get(place, 0.0), taken)
    for i, place in places.items():
        seconds[i] *= max(1.0, needed[place] / busiest[place])


def _sums(pairs: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    found: dict[_Key, float] = {}
    for key, number in pairs:
        found[key] = found.get(key, 0.0) + number
    return found


class _Sharing:
    """One run of a program, event by event.

    A node of the system comes when all nodes that it waits for have come, and its own seconds have
    passed; those of a task that shares a device pass while the device works on it.
    """

    def __init__(
        self,
        seconds: list[float],
        system: System,
        parts: Mapping[int, float],
        places: Mapping[int, _Place],
    ):
        self.seconds = seconds
        self.node = system.node
        self.parts = {system.node[i]: (i, part) for i, part in parts.items()}  # what is to come
        self.places = places
        self.devices = {place: _Device() for place in places.values()}
        self.own = list(system.seconds)
        self.time = [0.0] * len(self.own)  # the latest of what has come
        self.missing = [0] * len(self.own)  # what has not come
        self.users: list[list[int]] = [[] for _ in self.own]
        for needed, node, ago in system.edges:
            if not ago:
                self.users[needed].append(node)
                self.missing[node] += 1

    def fill(self) -> None:
        """Replace the seconds of tasks that share devices by those that they take."""
        self._come([node for node, count in enumerate(self.missing) if not count])
        # What has not come needs one of the tasks on devices, so the earliest event is the next.
        while (event := min((d.next() for d in self.devices.values()), default=_NEVER)) < _NEVER:
            when, i = event
            device = self.devices[self.places[i]]
            device.go_on(when)
            node = self.node[i]
            if i in device.arriving:
                device.begin(i, self.seconds[i], self.parts[node][1])
            else:
                self.own[node] = self.seconds[i] = device.end(i)
                self.parts.pop(node)
                self._come([node])

    def _come(self, nodes: list[int]) -> None:
        """Note that all that these nodes wait for has come, and what comes by that."""
        while nodes:
            node = nodes.pop()
            if node in self.parts:
                i, _ = self.parts[node]
                self.devices[self.places[i]].arriving[i] = self.time[node]
                continue
            when = self.time[node] + self.own[node]
            for user in self.users[node]:
                self.time[user] = max(self.time[user], when)
                self.missing[user] -= 1
                if not self.missing[user]:
                    nodes.append(user)


_NEVER = math.inf, -1
_ROUNDING = 1e-9


class _Device:
    """A physical device on which tasks (instructions) arrive, and which works on all at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.arriving: dict[int, float] = {}  # when
        self.left: dict[int, float] = {}  # seconds, of the device alone
        self.parts: dict[int, float] = {}
        self.seconds: dict[int, float] = {}  # that tasks take, as far as is known

    @property
    def factor(self) -> float:
        """How much longer tasks take at present."""
        taken = sum(self.parts.values())
        return 1.0 if taken <= 1 + _ROUNDING else taken

    def next(self) -> tuple[float, int]:
        """Return when the next task arrives or ends, and which."""
        factor = self.factor
        arrivals = ((when, i) for i, when in self.arriving.items())
        ends = ((self.now + seconds * factor, i) for i, seconds in self.left.items())
        return min(chain(arrivals, ends), default=_NEVER)

    def go_on(self, when: float) -> None:
        """Work until a time at which a task arrives or ends."""
        passed = max(0.0, when - self.now)
        factor = self.factor
        self.now = max(self.now, when)
        for i in self.left:
            self.left[i] -= passed / factor
            if factor > 1:
                self.seconds[i] += passed - passed / factor

    def begin(self, i: int, seconds: float, part: float) -> None:
        """Begin with a task that has arrived."""
        self.arriving.pop(i)
        self.left[i] = self.seconds[i] = seconds
        self.parts[i] = part

    def end(self, i: int) -> float:
        """End a task; return the seconds that it took."""
        del self.left[i], self.parts[i]
        return self.seconds.pop(i)
