"""Predict how many bytes each device holds: one walk over a program in issue order.

That is when torch's caching allocator hands memory out and takes it back: on the host, as instructions are issued,
whenever devices come to them. Reads a program and the bytes of values, and decides nothing. Does not know what a task
takes for itself while it runs, results that nothing uses among that, nor what the allocator rounds up and keeps.
"""

from __future__ import annotations

from autosched.collecting import without_collecting
from autosched.costs import Costs
from autosched.graph import Graph, Task
from autosched.machine import Machine
from autosched.program import Copy, Free, Program, Run
from autosched.standing import Standing

__all__ = ["footprint"]


@without_collecting()
def footprint(program: Program, graph: Graph, machine: Machine, costs: Costs) -> dict[str, tuple[float, ...]]:
    """Return the bytes that each device holds: before the first instruction, and after each.

    Inputs and constants are held where they live, as if no two shared memory; what runs and copies make, until it is
    freed; views and writes in place take none. A value whose bytes are not known counts ``default_nbytes``.

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


class _Walk:
    """What stands where, each with the number of its memory, and the bytes that each device holds."""

    def __init__(self, program: Program, graph: Graph, machine: Machine, costs: Costs):
        self.graph, self.costs = graph, costs
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
        """Hold what a run makes; take values that it writes on to their next version."""
        memory: dict[int, int] = {}  # of what it reads, by root
        for value, version in task.reads:
            partly = self.graph.touched(task, value) is not None
            stands = self.standing.held(value, device) if partly else self.standing.get(value, version, device)
            assert stands is not None, f"{self.graph.values[value].name}@{version} is not on {device}"
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
        """Hold a copy, unless it goes into the input that it overwrites."""
        value = self.graph.value(copy.value).index
        if copy.overwrite:
            self.standing.put(value, copy.version, copy.destination, self.home[value])
        else:
            self._new(value, copy.version, copy.destination)

    def free(self, free: Free) -> None:
        """Give back what a value lies in."""
        device = free.stream.device
        number = self.standing.get(self.graph.value(free.value).index, free.version, device)
        assert number is not None, f"{free} on {device}, where it is not"
        self.held[device] -= self.sizes[number]
        self.sizes[number] = 0.0
