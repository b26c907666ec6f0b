"""Find what touches the same memory: which run or copy must come after which, and how long each block lives.

A *block* is memory on one device: made by a run or a copy, or there from the start. In-place writes carry it from one
version to the next; views share it. Hazards are between blocks, not values: a reader of an older copy on another
device disturbs no writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosched.graph import Graph, Task
from autosched.machine import Machine
from autosched.placement import home
from autosched.program import Copy, Run, Stream

__all__ = ["Block", "Hazards", "find_hazards"]


@dataclass(eq=False)
class Block:
    """Memory on one device, named by the value and version that it holds; positions are those of runs and copies."""

    value: str
    version: int
    owner: Stream | None  # the stream that allocated it, and frees it
    writer: int  # -1 where it was there from the start
    readers: list[int] = field(default_factory=list)  # since the last write
    uses: dict[Stream, int] = field(default_factory=dict)  # the last of each stream
    kept: bool = False  # inputs, constants and outputs are not freed


class Hazards(NamedTuple):
    """For each run or copy the positions that it must come after; and the blocks to be freed."""

    after: list[list[int]]
    blocks: list[Block]


class _Place(NamedTuple):
    value: int
    version: int
    device: str


def find_hazards(
    graph: Graph, machine: Machine, instructions: Sequence[Run | Copy], outputs: Mapping[str, str]
) -> Hazards:
    """Return the hazards of runs and copies in issue order; ``outputs`` says where each output must be at the end."""
    walk = _Walk(graph, machine)
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            walk.run(i, instruction, graph.task(instruction.task))
        else:
            walk.copy(i, instruction)
    for label, device in outputs.items():
        value = graph.outputs[label]
        walk.block[_Place(value, graph.last_version(value), device)].kept = True
    return Hazards(walk.after, [block for block in walk.blocks if not block.kept])


class _Walk:
    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.block: dict[_Place, Block] = {}
        self.maker: dict[_Place, int] = {}  # what put the value there; of a view, not the same as the block's writer
        self.home: dict[int, Block] = {}  # of inputs and constants
        self.blocks: list[Block] = []
        self.after: list[list[int]] = []
        self.ran: dict[int, int] = {}
        for value in graph.sources:
            place = _Place(value.index, 0, home(graph, machine, value))
            self.home[value.index] = self._new(place, None, -1)
            self.home[value.index].kept = True

    def _new(self, place: _Place, owner: Stream | None, maker: int) -> Block:
        block = Block(self.graph.values[place.value].name, place.version, owner, maker)
        self.blocks.append(block)
        self.block[place], self.maker[place] = block, maker
        return block

    def _read(self, i: int, stream: Stream, place: _Place) -> Block:
        block = self.block[place]
        block.owner = block.owner or (stream if stream.device == place.device else None)
        self.after[i] += [block.writer, self.maker[place]]
        block.uses[stream] = i
        return block

    def run(self, i: int, run: Run, task: Task) -> None:
        """Note what a run reads, writes and makes, and which tasks it was told to follow."""
        stream, device = run.stream, run.stream.device
        self.after.append([self.ran[d.task] for d in task.dependencies if d.kind == "order"])
        self.ran[task.index] = i
        blocks = {use: self._read(i, stream, _Place(*use, device)) for use in task.reads}
        written = {id(blocks[use]): blocks[use] for use in task.writes}
        for block in blocks.values():
            if id(block) not in written:
                block.readers.append(i)
        for block in written.values():
            self.after[i] += block.readers
            block.writer, block.readers, block.version = i, [], block.version + 1
        for use in task.writes:
            for member in self.graph.members(use.value):
                self._carry(_Place(member, use.version, device))
        for use in task.outputs:
            self._make(i, stream, task, _Place(*use, device))
        self._tidy(i)

    def _carry(self, place: _Place) -> None:
        """Let a value that shares written memory go on as its next version."""
        if place in self.block:
            later = place._replace(version=place.version + 1)
            self.block[later], self.maker[later] = self.block.pop(place), self.maker.pop(place)

    def _make(self, i: int, stream: Stream, task: Task, place: _Place) -> None:
        value = self.graph.values[place.value]
        if not self.graph.is_used(value.index):
            return
        if value.root == value.index:
            self._new(place, stream, i).uses[stream] = i
            return
        base = next(use.value for use in task.reads if self.graph.values[use.value].root == value.root)
        self.block[place], self.maker[place] = self.block[place._replace(value=base)], i

    def copy(self, i: int, copy: Copy) -> None:
        """Note what a copy reads, and the block that it fills."""
        value = self.graph.value(copy.value).index
        self.after.append([])
        self._read(i, copy.stream, _Place(value, copy.version, copy.source)).readers.append(i)
        place = _Place(value, copy.version, copy.destination)
        if copy.overwrite:
            block = self.home[value]
            self.after[i] += [block.writer, *block.readers]
            block.writer, block.readers, block.version = i, [], copy.version
            self.block[place], self.maker[place] = block, i
        else:
            owner = copy.also or (copy.stream if copy.stream.device == copy.destination else None)
            block = self._new(place, owner, i)
        block.uses[copy.stream] = i
        self._tidy(i)

    def _tidy(self, i: int) -> None:
        self.after[i] = sorted({p for p in self.after[i] if 0 <= p < i})
