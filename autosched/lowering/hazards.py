"""Find conflicting memory accesses and the lifetimes of blocks.

A *block* is memory on one device, made by a run or a copy, or present from the start. In-place
writes change the version that it holds; views share it. Hazards are between parts of blocks, not
between tasks or values: a reader of an older copy on another device, or of another part, does not
delay a writer. (Policies use the dependencies between tasks, which are only more conservative.) A
freed value may be copied again, into another block.

For ``y = f(h)`` on another device, and then ``h.mul_(2)``:

    position  instruction             block A on cuda:0    block B on cuda:1    must follow
    0         cuda:0  run h           makes it: h                               -
    1         cuda:0  copy h          reads it             makes it: h          0, the writer of A
    2         cuda:1  run y                                reads it             1, the maker of B
    3         cuda:0  run mul_        writes it: h@1                            0 and 1, all that used A

3 does not follow 2, which reads the copy. A is used last by 3, and B by 2: there they may be freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autosched.graph.flow import grouped, ragged
from autosched.graph.graph import Graph
from autosched.graph.regions import Accesses, Region
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Instruction, Receive, Run, Send, Stream
from autosched.program.residency import Buffer, Buffers, Step

Line = Run | Copy | Send | Receive | Free
"""An instruction before events are inserted."""

Ints = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Block:
    """Memory on one device, named by the value and version that it holds.

    Positions are those of runs and copies.
    """

    value: str
    version: int
    owner: Stream | None  # the stream that allocated it and frees it
    uses: dict[Stream, int] = field(default_factory=dict)  # the last use by each stream
    accesses: Accesses = field(default_factory=Accesses)
    kept: bool = False  # inputs, constants and outputs are not freed
    freed: bool = False


@dataclass(frozen=True, eq=False)
class Hazards:
    """The positions that each run or copy must follow, and the blocks to be freed.

    Ragged tables are pairs (CSR): row offsets, and the entries of all rows.
    """

    after_at: Ints
    after: Ints  # [instruction], the positions that it must follow, sorted
    values: Sequence[str]  # [block], the value that it holds
    versions: Sequence[int]  # [block], the version of that value
    owners: Sequence[Stream]  # [block], the stream that frees it
    uses_at: Ints
    uses: Ints  # [block], the last use by each stream, ordered by first use

    @classmethod
    def of(cls, after: Sequence[Sequence[int]], blocks: Sequence[Block]) -> Hazards:
        """Return the arrays of hazards that were found step by step."""
        names = [block.value for block in blocks], [block.version for block in blocks]
        uses = [[*block.uses.values()] for block in blocks]
        owners = [block.owner for block in blocks if block.owner is not None]
        assert len(owners) == len(blocks), "a block was never read on its device"
        return cls(*ragged(after), *names, owners, *ragged(uses))

    def ending(self, count: int) -> tuple[Ints, Ints]:
        """Return for each instruction the blocks that it uses last, as a ragged table."""
        last = np.maximum.reduceat(self.uses, self.uses_at[:-1]) if len(self.uses) else self.uses
        return grouped(last, np.arange(len(last)), count)


def owner_of(line: Instruction) -> Stream | None:
    """Return the stream that allocates what an instruction makes, if it is one of its own."""
    if isinstance(line, Copy):
        return line.also or (line.stream if line.stream.device == line.destination else None)
    return line.stream


def find_hazards(
    problem: Problem, instructions: Sequence[Line], outputs: Mapping[str, str]
) -> Hazards:
    """Return the hazards of runs and copies in issue order; ``outputs`` has their final devices.

    If the instructions contain frees, memory is limited: an allocation on a device then comes after
    all earlier frees there.
    """
    buffers = Buffers(problem.graph, problem.homes)
    walk = _Walk(problem.graph, buffers)
    for step in buffers.walk(instructions):
        walk.step(step)
    return walk.hazards(outputs)


class _Walk:
    """The block of each buffer, and the positions that each instruction must follow."""

    def __init__(self, graph: Graph, buffers: Buffers):
        self.graph = graph
        self.values = graph.values
        self.buffers = buffers
        self.blocks: dict[Buffer, Block] = {}
        self.after: list[list[int]] = []
        self.ran: dict[int, int] = {}  # by task, its position
        self.frees: dict[str, dict[Stream, int]] = {}  # by device, the last free of each stream
        for source in buffers.sources.values():
            self._allocate(source, None).kept = True

    def step(self, step: Step) -> None:
        """Add the positions that an instruction must follow.

        1. Tasks with an order dependency.
        2. For each argument: its maker, and the accesses with which the access conflicts.
        3. For each new block: the frees that made room. For an input that is overwritten: its
           earlier accesses.
        4. For a free: all uses of the block.
        """
        i = step.at
        stream = step.instruction.stream
        found: list[int] = []
        if isinstance(step.instruction, Free):
            block = self.blocks[step.reads[0].block]
            block.owner = stream
            block.freed = True
            self.frees.setdefault(stream.device, {})[stream] = i
            found += block.uses.values()
        if step.task is not None:
            found += [self.ran[d.task] for d in step.task.dependencies if d.kind == "order"]
            self.ran[step.task.index] = i
        for access in self.buffers.accesses(step):
            found += self._access(i, stream, *access)
        for made in step.made:
            if made is not None and made.base is None and made not in self.blocks:
                self._allocate(made, owner_of(step.instruction)).uses[stream] = i
                if made.device in self.frees:
                    found += self.frees[made.device].values()
        earlier = {position for position in found if 0 <= position < i}
        self.after.append(sorted(earlier) if len(earlier) > 1 else list(earlier))

    def hazards(self, outputs: Mapping[str, str]) -> Hazards:
        """Return what was found; ``outputs`` are not freed."""
        for label, device in outputs.items():
            value = self.graph.outputs[label]
            final = self.buffers.find(value, self.graph.last_version(value), device)
            self.blocks[final.block].kept = True
        freed: list[Block] = []
        for buffer, block in self.blocks.items():
            block.version = buffer.version
            if not block.kept and not block.freed:
                block.owner = block.owner or Stream(buffer.device, "compute")
                freed.append(block)
        return Hazards.of(self.after, freed)

    def _access(
        self, i: int, stream: Stream, buffer: Buffer, region: Region, writes: bool
    ) -> list[int]:
        block = self.blocks[buffer.base or buffer]
        if block.owner is None and stream.device == buffer.device:
            block.owner = stream
        block.uses[stream] = i
        if not writes:
            found = block.accesses.read(region, i)
            found.append(buffer.maker)
            return found
        writers, readers = block.accesses.write(region, i)
        return [buffer.maker, *writers, *readers]

    def _allocate(self, buffer: Buffer, owner: Stream | None) -> Block:
        value = self.values[buffer.value]
        block = self.blocks[buffer] = Block(value.name, buffer.version, owner)
        if buffer.maker >= 0:
            block.accesses.write(value.region, buffer.maker)
        return block
