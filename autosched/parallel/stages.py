"""Cut a captured model into stages.

Stages are balanced by cost, or given by the user. A model is a sequence of blocks, each a call of a
module or a line of code, in the order in which they run; cuts are between blocks. Backward goes in
the opposite direction and belongs to the blocks of its forward. Knows costs and memory, no order in
time.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autosched import Costs, Graph, Machine, ScheduleError, Task

__all__ = ["Block", "Cuts", "balanced", "blocks_of", "by_map"]


@dataclass(frozen=True)
class Block:
    """Tasks (indices) that stay together: those of forward, and those of backward."""

    name: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True)
class Cuts:
    """A model cut into stages. ``print`` it to see the blocks and the device of each.

    ``devices``: the device of each stage. ``seconds``: the predicted seconds of each stage for a
    micro-batch, forward and backward. ``nbytes``: the bytes that each stage sends to the next.
    """

    blocks: tuple[Block, ...]
    ends: tuple[int, ...]  # of each stage, the block after its last
    devices: tuple[str, ...]
    seconds: tuple[float, ...]
    nbytes: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def stages(self, graph: Graph) -> dict[str, int]:
        """Return the stage of each task, by name, of the graph that was cut, or of one for other sizes.

        Operators may differ by size; blocks of the same name are in the same stage then.
        """
        blocks = blocks_of(graph)
        own = [
            number
            for number, end in enumerate(self.ends)
            for _ in range(end - (0, *self.ends)[number])
        ]
        if len(blocks) != len(own):
            named = {
                block.name: stage
                for block, stage in zip(reversed(self.blocks), reversed(own), strict=True)
            }
            own = list(accumulate((named.get(block.name, 0) for block in blocks), max))
        found: dict[str, int] = {}
        for block, stage in zip(blocks, own, strict=True):
            found.update(
                (graph.tasks[task].name, stage) for task in (*block.forward, *block.backward)
            )
        return found

    def __str__(self) -> str:
        lines = []
        for number, (start, end) in enumerate(zip((0, *self.ends), self.ends, strict=False)):
            names = list(dict.fromkeys(block.name for block in self.blocks[start:end]))
            what = (
                names[0]
                if len(names) == 1
                else f"{names[0]} ... {names[-1]}"
                if names
                else "nothing"
            )
            lines.append(
                f"stage {number} on {self.devices[number]}: {what}, {self.seconds[number] * 1e3:.3g} ms"
            )
            if number < len(self) - 1:
                lines[-1] += f"; {self.nbytes[number] / 1e6:.3g} MB to the next"
        return "\n".join(lines)


def blocks_of(graph: Graph) -> list[Block]:
    """Return the blocks of a captured step: consecutive forward tasks that belong together.

    Tasks of one line in one call of a module stay together, and so does everything that runs
    between them.
    """
    key = {task.index: task.origin._replace(phase="") for task in graph.tasks}
    forward = [task for task in graph.tasks if task.origin.phase != "backward"]
    last = {key[task.index]: task.index for task in forward}
    found: list[list[Task]] = []
    end = -1
    for task in forward:
        if task.index > end:
            found.append([])
        end = max(end, last[key[task.index]])
        found[-1].append(task)
    block = {key[task.index]: number for number, tasks in enumerate(found) for task in tasks}
    backward: list[list[int]] = [[] for _ in found]
    number = len(found) - 1
    of = dict[int, int]()
    for task in graph.tasks:
        if task.origin.phase == "backward":
            number = block.get(key[task.index], number)
            behind = [of[d.task] for d in task.dependencies if d.task in of]
            of[task.index] = (
                min(number, *behind) if behind else number
            )  # it flows from later blocks to earlier ones
            backward[of[task.index]].append(task.index)
    return [
        Block(_name(tasks), tuple(task.index for task in tasks), tuple(behind))
        for tasks, behind in zip(found, backward, strict=True)
    ]


def _name(tasks: Sequence[Task]) -> str:
    """Return the module of tasks, or their source line."""
    for task in tasks:
        if task.origin.module:
            return task.origin.module
    return tasks[0].name


# ---- cutting


def balanced(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    devices: Sequence[str],
    held: Mapping[str, float] | None = None,
    least: Costs | None = None,
) -> Cuts:
    """Cut into as many stages as there are ``devices``, in that order, so that the slowest is as fast as possible.

    Dynamic programming over cut points minimizes the time of the longest stage, computing or
    sending, and then the bytes sent in total; ``O(stages * blocks ** 2)``. A device that is named
    twice gets two stages. ``held`` is the number of bytes that remain with each parameter, by name,
    in addition to the activations of one micro-batch, by ``least`` if that is given; devices hold
    no more than their memory. Raises ScheduleError if there are fewer blocks than stages, or no cut
    that fits.
    """
    blocks = blocks_of(graph)
    if len(blocks) < len(devices):
        raise ScheduleError(
            f"{len(devices)} stages need as many blocks of the model, and it has {len(blocks)}"
        )
    table = _Table(graph, costs, machine, blocks, held or {}, least)
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    shares = {name: devices.count(name) for name in devices}
    for number, device in enumerate(devices):
        after: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        stages_left = len(devices) - number - 1
        ends = (
            [len(blocks)] if not stages_left else range(number + 1, len(blocks) - stages_left + 1)
        )
        for end in ends:
            options = []
            for start, ((so_far, sent), cuts) in best.items():
                if start < end and table.fits(start, end, device, shares[device]):
                    crossing = (
                        table.sending(end, device, devices[number + 1]) if stages_left else 0.0
                    )
                    longest = max(so_far, table.seconds(start, end, device), crossing)
                    options.append(((longest, sent + crossing), (*cuts, end)))
            if options:
                after[end] = min(options)
        best = after
    if len(blocks) not in best:
        raise ScheduleError(
            "no cut leaves each device with no more than its memory; name more devices, or checkpoint"
        )
    return table.cuts(best[len(blocks)][1], devices)


def by_map(graph: Graph, costs: Costs, machine: Machine, split: Mapping[str, str]) -> Cuts:
    """Cut by the user's map of modules to devices.

    A block that no pattern matches joins the one before.

    Patterns are those of the shell, ``{"layer1.*": "cuda:0"}``, and also match the modules inside;
    the first match counts. Raises ScheduleError for one that matches nothing.
    """
    blocks = blocks_of(graph)
    for pattern, device in split.items():
        machine.device(device)
        if not any(_fits(block.name, pattern) for block in blocks):
            names = ", ".join(dict.fromkeys(block.name for block in blocks))
            raise ScheduleError(
                f"split= names {pattern!r}, which fits no module that was called; there are {names}"
            )
    device = next(
        (split[p] for block in blocks for p in split if _fits(block.name, p)), machine.names[0]
    )
    devices: list[str] = []
    ends: list[int] = []
    for number, block in enumerate(blocks):
        device = next((split[pattern] for pattern in split if _fits(block.name, pattern)), device)
        if not devices or device != devices[-1]:
            devices.append(device)
            ends.append(number)
        ends[-1] = number + 1
    return _Table(graph, costs, machine, blocks, {}).cuts(ends, devices)


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")


class _Table:
    """Costs of blocks as cumulative sums, so that the cost of a stage is a difference."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        machine: Machine,
        blocks: Sequence[Block],
        held: Mapping[str, float],
        least: Costs | None = None,
    ):
        self.graph = graph
        self.costs = costs
        self.machine = machine
        self.blocks = blocks
        self.least = costs if least is None else least
        self._seconds: dict[object, list[float]] = {}
        self.readers: dict[int, list[int]] = {}  # of memory, by the value that it is of
        for task in graph.tasks:
            for use in task.reads:
                self.readers.setdefault(graph.values[use.value].root, []).append(task.index)
        self.crossing = self._crossing()
        self._memory = [0.0, *accumulate(self._held(block, held) for block in blocks)]

    def seconds(self, start: int, end: int, device: str) -> float:
        """Return the seconds of blocks on a device, forward and backward."""
        found = self.machine.device(device)
        rates = (found.flops_per_second, found.bytes_per_second, found.launch_seconds)
        if rates not in self._seconds:
            each = [
                sum(
                    self.costs.task_seconds(self.graph.tasks[i], found)
                    for i in (*block.forward, *block.backward)
                )
                for block in self.blocks
            ]
            self._seconds[rates] = [0.0, *accumulate(each)]
        sums = self._seconds[rates]
        return sums[end] - sums[start]

    def sending(self, end: int, device: str, other: str) -> float:
        """Return the seconds to send the values that are read after a block to the next device."""
        return (
            self.machine.copy_seconds(device, other, self.crossing[end - 1])
            if device != other
            else 0.0
        )

    def fits(self, start: int, end: int, device: str, shares: int) -> bool:
        """Whether a device can hold blocks, ``shares`` times."""
        return (self._memory[end] - self._memory[start]) * shares <= self.machine.device(
            device
        ).nbytes

    def cuts(self, ends: Sequence[int], devices: Sequence[str]) -> Cuts:
        """Return cuts with their costs."""
        starts = (0, *ends)
        return Cuts(
            tuple(self.blocks),
            tuple(ends),
            tuple(devices),
            tuple(self.seconds(s, e, d) for s, e, d in zip(starts, ends, devices, strict=False)),
            tuple(self.crossing[end - 1] for end in ends),
        )

    def _crossing(self) -> list[float]:
        """Return the bytes sent forward after each block: values made before, and read after it."""
        block = {task: number for number, found in enumerate(self.blocks) for task in found.forward}
        change = [0.0] * (len(self.blocks) + 1)
        for value in self.graph.values:
            if value.producer not in block or value.root != value.index:
                continue
            first = block[value.producer]
            readers = self.readers.get(value.index, ())
            final = max((block[user] for user in readers if user in block), default=first)
            change[first] += self.costs.value_nbytes(value)
            change[final] -= self.costs.value_nbytes(value)
        return list(accumulate(change))[:-1]

    def _held(self, block: Block, held: Mapping[str, float]) -> float:
        """Return the bytes that a block keeps: its parameters, and forward results that its backward needs."""
        forward = set(block.forward)
        backward = set(block.backward)
        read = {
            self.graph.values[use.value].name
            for task in forward
            for use in self.graph.tasks[task].reads
        }
        total = sum(nbytes for name, nbytes in held.items() if name in read)
        for task in forward:
            for use in self.graph.tasks[task].outputs:
                value = self.graph.values[use.value]
                if value.root == value.index and not backward.isdisjoint(
                    self.readers.get(use.value, ())
                ):
                    total += self.least.value_nbytes(value)
        return total
