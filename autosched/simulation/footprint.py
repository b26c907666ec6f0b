"""Predict how many bytes each device holds.

``footprint`` walks a program in issue order, and ``memory_over_time`` uses the times of a timeline.
Issue order is the order in which torch's caching allocator hands out and takes back memory: on the
host, when instructions are issued, not when devices execute them. This module reads a program and
the bytes of values, and decides nothing. It does not know the temporary memory of a running task
(which includes results that nothing uses), or the rounding and caching of the allocator.
"""

from __future__ import annotations

from autosched._lib.gc_pause import without_collecting
from autosched.costs.costs import Costs
from autosched.graph.graph import Graph, Task
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.program.residency import Standing
from autosched.timeline.timeline import Timeline

__all__ = ["footprint", "memory_over_time"]

Course = tuple[tuple[float, float], ...]


@without_collecting()
def footprint(
    program: Program, graph: Graph, machine: Machine, costs: Costs
) -> dict[str, tuple[float, ...]]:
    """Return the bytes that each device holds: before the first instruction, and after each.

    Inputs and constants are held on their own devices, as if no two shared memory. Results of runs
    and copies are held until they are freed. Views and in-place writes take no memory. A value of
    unknown size counts ``default_nbytes``.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=asc.Costs(default_nbytes=8))
    >>> footprint(schedule.program, graph, schedule.machine, schedule.costs)
    {'cpu': (8.0, 16.0)}
    """
    walk = _Walk(program, graph, machine, costs)
    courses = {name: [held] for name, held in walk.held.items()}
    for instruction in program:
        match instruction:
            case Run(stream, name):
                walk.run(graph.task(name), stream.device)
            case Copy():
                walk.copy(instruction)
            case Free():
                walk.free(instruction)
        for name, held in walk.held.items():
            courses[name].append(held)
    return {name: tuple(course) for name, course in courses.items()}


def memory_over_time(
    program: Program, graph: Graph, machine: Machine, costs: Costs, timeline: Timeline
) -> dict[str, Course]:
    """Return for each device the (seconds, bytes) at which its memory use changes.

    Times come from a predicted or measured timeline. Results of runs and copies are held from their
    start until their stream reaches the ``free``. If streams take turns, a device never holds more
    than ``footprint`` returns; if one stream allocates and frees all its memory, it holds at most
    that much, too. Streams that run concurrently do not keep the order of issue, so then it may be
    more or less.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=(graph.input("x") + 1) * 2)
    >>> costs = asc.Costs(default_nbytes=8, seconds={"add": 1.0, "mul": 1.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> memory_over_time(schedule.program, graph, schedule.machine, costs, schedule.simulate())
    {'cpu': ((0.0, 8.0), (0.0, 16.0), (1.0, 24.0), (2.0, 16.0))}
    """
    courses = footprint(program, graph, machine, costs)
    moments = _moments(program, timeline)
    order = sorted(range(len(program)), key=lambda i: (moments[i], i))
    return {name: _over_time(course, moments, order) for name, course in courses.items()}


def _moments(program: Program, timeline: Timeline) -> list[float]:
    """Return when each instruction allocates or frees: when it starts, or its stream reaches it."""
    spans = {span.instruction: span for span in timeline.spans}
    clock: dict[Stream, float] = dict.fromkeys(program.streams, 0.0)
    events: dict[int, float] = {}
    moments = []
    for i, instruction in enumerate(program):
        stream = instruction.stream
        moments.append(clock[stream])
        match instruction:
            case Record(_, event):
                events[event] = clock[stream]
            case Wait(_, event):
                clock[stream] = max(clock[stream], events[event])
            case Run() | Copy() if span := spans.get(i):
                moments[i] = span.start
                clock |= dict.fromkeys(span.streams, span.end)
    return moments


def _over_time(course: tuple[float, ...], moments: list[float], order: list[int]) -> Course:
    held = course[0]
    points = [(0.0, held)]
    for i in order:
        if course[i + 1] != course[i]:
            held += course[i + 1] - course[i]
            points.append((moments[i], held))
    return tuple(points)


class _Walk:
    """The memory block of each version on each device, and the bytes that each device holds."""

    def __init__(self, program: Program, graph: Graph, machine: Machine, costs: Costs):
        self.graph = graph
        self.costs = costs
        self.held = {device.name: 0.0 for device in machine.devices}
        self.standing: Standing[int, int] = Standing()
        self.sizes: list[float] = []
        homes = {graph.value(name).index: device for name, device in program.inputs}
        self.home = {value: self._new(value, 0, device) for value, device in homes.items()}

    def _new(self, value: int, version: int, device: str) -> int:
        self.sizes.append(self.costs.value_nbytes(self.graph.values[value]))
        self.standing.put(value, version, device, len(self.sizes) - 1)
        self.held[device] += self.sizes[-1]
        return len(self.sizes) - 1

    def run(self, task: Task, device: str) -> None:
        """Hold the results of a run; advance the versions of values that it writes."""
        memory: dict[int, int] = {}  # by root, the block of what it reads
        for value, version in task.reads:
            partly = self.graph.touched(task, value) is not None
            stands = (
                self.standing.held(value, device)
                if partly
                else self.standing.get(value, version, device)
            )
            assert stands is not None, (
                f"{self.graph.values[value].name}@{version} is not on {device}"
            )
            memory.setdefault(self.graph.values[value].root, stands)
        for value, version in task.changes:
            self.standing.change(value, version, device)
        for value, version in task.outputs:
            root = self.graph.values[value].root
            if root != value:
                self.standing.put(value, version, device, memory[root])
            elif self.graph.is_used(value):
                self._new(value, version, device)

    def copy(self, copy: Copy) -> None:
        """Hold a copy, unless it overwrites an input."""
        value = self.graph.value(copy.value).index
        if copy.overwrite:
            self.standing.put(value, copy.version, copy.destination, self.home[value])
        else:
            self._new(value, copy.version, copy.destination)

    def free(self, free: Free) -> None:
        """Free the memory block of a value."""
        device = free.stream.device
        number = self.standing.get(self.graph.value(free.value).index, free.version, device)
        assert number is not None, f"{free} on {device}, where it is not"
        self.held[device] -= self.sizes[number]
        self.sizes[number] = 0.0
