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


@dataclass(eq=False, slots=True)
class Block:
    """Memory on one device, named by the value and version that it holds; positions are those of runs and copies."""

    value: str
    version: int
    owner: Stream | None  # the stream that allocated it, and frees it
    writer: int  # -1 where it was there from the start
    uses: dict[Stream, int] = field(default_factory=dict)  # the last of each stream, which is behind those before
    kept: bool = False  # inputs, constants and outputs are not freed


class Hazards(NamedTuple):
    """For each run or copy the positions that it must come after; and the blocks to be freed."""

    after: list[tuple[int, ...]]
    blocks: list[Block]


_Place = tuple[int, int, str]  # value, version, device


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
        walk.block[value, graph.last_version(value), device].kept = True
    return Hazards(walk.after, [block for block in walk.blocks if not block.kept])


class _Walk:
    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.block: dict[_Place, Block] = {}
        self.maker: dict[_Place, int] = {}  # what put the value there; of a view, not the same as the block's writer
        self.home: dict[int, Block] = {}  # of inputs and constants
        self.blocks: list[Block] = []
        self.after: list[tuple[int, ...]] = []
        self.found: list[int] = []  # what the run or copy at hand must come after
        self.ran: dict[int, int] = {}
        for value in graph.sources:
            self.home[value.index] = self._new((value.index, 0, home(graph, machine, value)), None, -1)
            self.home[value.index].kept = True

    def _new(self, place: _Place, owner: Stream | None, maker: int) -> Block:
        value, version, _ = place
        block = Block(self.graph.values[value].name, version, owner, maker)
        self.blocks.append(block)
        self.block[place], self.maker[place] = block, maker
        return block

    def _read(self, i: int, stream: Stream, place: _Place) -> Block:
        block = self.block[place]
        if block.owner is None and stream.device == place[2]:
            block.owner = stream
        self.found += (block.writer, self.maker[place])
        block.uses[stream] = i
        return block

    def _write(self, i: int, block: Block, version: int) -> None:
        self.found += block.uses.values()
        block.writer, block.version = i, version

    def run(self, i: int, run: Run, task: Task) -> None:
        """Note what a run reads, writes and makes, and which tasks it was told to follow."""
        stream, device = run.stream, run.stream.device
        self.found += [self.ran[d.task] for d in task.dependencies if d.kind == "order"]
        self.ran[task.index] = i
        blocks = {use: self._read(i, stream, (*use, device)) for use in task.reads}
        for block in {id(blocks[use]): blocks[use] for use in task.writes}.values():
            self._write(i, block, block.version + 1)
        for use in task.writes:
            for member in self.graph.members(use.value):
                self._carry(member, use.version, device)
        for use in task.outputs:
            self._make(i, stream, task, (*use, device))
        self._close(i)

    def _carry(self, value: int, version: int, device: str) -> None:
        """Let a value that shares written memory go on as its next version."""
        place, later = (value, version, device), (value, version + 1, device)
        if place in self.block:
            self.block[later], self.maker[later] = self.block.pop(place), self.maker.pop(place)

    def _make(self, i: int, stream: Stream, task: Task, place: _Place) -> None:
        index, version, device = place
        value = self.graph.values[index]
        if not self.graph.is_used(value.index):
            return
        if value.root == value.index:
            self._new(place, stream, i).uses[stream] = i
            return
        base = next(use.value for use in task.reads if self.graph.values[use.value].root == value.root)
        self.block[place], self.maker[place] = self.block[base, version, device], i

    def copy(self, i: int, copy: Copy) -> None:
        """Note what a copy reads, and the block that it fills."""
        value = self.graph.value(copy.value).index
        self._read(i, copy.stream, (value, copy.version, copy.source))
        place = (value, copy.version, copy.destination)
        if copy.overwrite:
            block = self.home[value]
            self._write(i, block, copy.version)
            self.block[place], self.maker[place] = block, i
        else:
            owner = copy.also or (copy.stream if copy.stream.device == copy.destination else None)
            block = self._new(place, owner, i)
        block.uses[copy.stream] = i
        self._close(i)

    def _close(self, i: int) -> None:
        self.after.append(tuple(sorted({p for p in self.found if 0 <= p < i})))
        self.found.clear()
