"""Find what touches the same memory: which run or copy must come after which, and how long each block lives.

A *block* is memory on one device: made by a run or a copy, or there from the start. In-place writes carry it from one
version to the next; views share it. Hazards are between parts of blocks, not values: a reader of an older copy on
another device, or of another part, disturbs no writer. What was freed may come again, in another block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autosched.graph import Graph, Task, Use
from autosched.machine import Machine
from autosched.parts import Accesses
from autosched.placement import home
from autosched.program import Copy, Free, Run, Stream
from autosched.standing import Standing

__all__ = ["Block", "Hazards", "find_hazards"]


@dataclass(eq=False, slots=True)
class Block:
    """Memory on one device, named by the value and version that it holds; positions are those of runs and copies."""

    value: str
    version: int
    owner: Stream | None  # the stream that allocated it, and frees it
    uses: dict[Stream, int] = field(default_factory=dict)  # the last of each stream, which is behind those before
    accesses: Accesses = field(default_factory=Accesses)
    kept: bool = False  # inputs, constants and outputs are not freed
    freed: bool = False


class Hazards(NamedTuple):
    """For each run or copy the positions that it must come after; and the blocks to be freed."""

    after: list[tuple[int, ...]]
    blocks: list[Block]


class _Held(NamedTuple):
    """A value on a device: its block, and what put it there; of a view, that is not who wrote the block."""

    block: Block
    maker: int


def find_hazards(
    graph: Graph, machine: Machine, instructions: Sequence[Run | Copy | Free], outputs: Mapping[str, str]
) -> Hazards:
    """Return the hazards of runs and copies in issue order; ``outputs`` says where each output must be at the end.

    Where frees stand among them memory is limited: what takes memory on a device comes after all frees there before it.
    """
    walk = _Walk(graph, machine)
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            walk.run(i, instruction, graph.task(instruction.task))
        elif isinstance(instruction, Copy):
            walk.copy(i, instruction)
        else:
            walk.free(i, instruction)
    for label, device in outputs.items():
        value = graph.outputs[label]
        walk.held(value, graph.last_version(value), device).block.kept = True
    for block, device in walk.unread:
        block.owner = block.owner or Stream(device, "compute")
    return Hazards(walk.after, [block for block in walk.blocks if not block.kept and not block.freed])


class _Walk:
    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.standing: Standing[int, _Held] = Standing()
        self.home: dict[int, Block] = {}  # of inputs and constants
        self.blocks: list[Block] = []
        self.after: list[tuple[int, ...]] = []
        self.found: list[int] = []  # what the run or copy at hand must come after
        self.ran: dict[int, int] = {}
        self.room: dict[str, dict[Stream, int]] = {}  # of each device, the last free of each stream
        self.unread: list[tuple[Block, str]] = []  # what no stream of its device had touched when it came
        for value in graph.sources:
            self.home[value.index] = self._new(-1, Use(value.index, 0), home(graph, machine, value), None)
            self.home[value.index].kept = True

    def _new(self, i: int, use: Use, device: str, owner: Stream | None) -> Block:
        block = Block(self.graph.values[use.value].name, use.version, owner)
        self.blocks.append(block)
        self.standing.put(*use, device, _Held(block, i))
        if i >= 0:
            block.accesses.write(self.graph.values[use.value].part, i)
            self.found += self.room.get(device, {}).values()
        return block

    def held(self, value: int, version: int, device: str) -> _Held:
        """Return what a device holds of a version, which must be there."""
        found = self.standing.get(value, version, device)
        assert found is not None, f"{self.graph.values[value].name}@{version} is not on {device}"
        return found

    def _touched(self, i: int, stream: Stream, held: _Held) -> Block:
        if held.block.owner is None:
            held.block.owner = stream
        held.block.uses[stream] = i
        self.found.append(held.maker)
        return held.block

    def run(self, i: int, run: Run, task: Task) -> None:
        """Note what a run reads, writes and makes, and which tasks it was told to follow."""
        stream, device = run.stream, run.stream.device
        self.found += [self.ran[d.task] for d in task.dependencies if d.kind == "order"]
        self.ran[task.index] = i
        written = {use.value for use in task.writes}
        blocks: dict[int, Block] = {}
        for value, version in task.reads:
            part = self.graph.touched(task, value)
            held = self.held(value, version, device) if part is None else self.standing.held(value, device)
            assert held is not None
            block = blocks[value] = self._touched(i, stream, held)
            part = part or self.graph.values[value].part
            if value in written:
                writers, readers = block.accesses.write(part, i)
                self.found += writers + readers
            else:
                self.found += block.accesses.read(part, i)
        for value, version in task.changes:
            stands = self.standing.change(value, version, device)
            held = self.standing.held(value, device)
            if stands is not None and held is not None and held.block.value == self.graph.values[value].name:
                held.block.version = stands
        for use in task.outputs:
            if self.graph.is_used(use.value):
                self._make(i, stream, use, blocks)
        self._close(i)

    def _make(self, i: int, stream: Stream, use: Use, blocks: Mapping[int, Block]) -> None:
        """Put a result into memory of its own, or into that of the argument of which it is a view."""
        root = self.graph.values[use.value].root
        if root == use.value:
            self._new(i, use, stream.device, stream).uses[stream] = i
            return
        base = next(block for value, block in blocks.items() if self.graph.values[value].root == root)
        self.standing.put(*use, stream.device, _Held(base, i))

    def copy(self, i: int, copy: Copy) -> None:
        """Note what a copy reads, and the block that it fills."""
        use = Use(self.graph.value(copy.value).index, copy.version)
        part = self.graph.values[use.value].part
        source = self.held(*use, copy.source)
        if copy.stream.device == copy.source:
            self._touched(i, copy.stream, source)
        else:
            source.block.uses[copy.stream] = i
            self.found.append(source.maker)
        self.found += source.block.accesses.read(part, i)
        if copy.overwrite:
            block = self.home[use.value]
            writers, readers = block.accesses.write(part, i)
            self.found += writers + readers
            self.standing.put(*use, copy.destination, _Held(block, i))
        else:
            owner = copy.also or (copy.stream if copy.stream.device == copy.destination else None)
            block = self._new(i, use, copy.destination, owner)
            if owner is None:
                self.unread.append((block, copy.destination))
        block.uses[copy.stream] = i
        self._close(i)

    def free(self, i: int, free: Free) -> None:
        """Note that a block goes back, behind all who used it."""
        block = self.held(self.graph.value(free.value).index, free.version, free.stream.device).block
        block.owner, block.freed = free.stream, True
        self.found += block.uses.values()
        self.room.setdefault(free.stream.device, {})[free.stream] = i
        self._close(i)

    def _close(self, i: int) -> None:
        self.after.append(tuple(sorted({p for p in self.found if 0 <= p < i})))
        self.found.clear()
