"""Find conflicting memory accesses and the lifetimes of blocks.

A *block* is memory on one device, made by a run or a copy, or present from the start. In-place
writes change the version that it holds; views share it. Hazards are between parts of blocks, not
between tasks or values: a reader of an older copy on another device, or of another part, does not
delay a writer. (Policies use the dependencies between tasks, which are only more conservative.) A
freed value may be copied again, into another block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autosched.graph.flow import rows_of
from autosched.graph.graph import Graph, Task, Use
from autosched.graph.regions import Accesses
from autosched.machine.machine import Machine
from autosched.placement import home
from autosched.program.program import Copy, Free, Run, Stream, occupied
from autosched.program.residency import Standing

__all__ = ["Block", "Hazards", "alone", "find_hazards"]

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

    Ragged tables are pairs: where each row begins, and the entries of all rows.
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
        return cls(*ragged(after), *names, list(map(_owner, blocks)), *ragged(uses))

    def ending(self, count: int) -> tuple[Ints, Ints]:
        """Return for each instruction the blocks that it uses last, as a ragged table."""
        last = np.maximum.reduceat(self.uses, self.uses_at[:-1]) if len(self.uses) else self.uses
        at = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(last, minlength=count), out=at[1:])
        return at, np.argsort(last, kind="stable")


def _owner(block: Block) -> Stream:
    assert block.owner is not None, f"block of {block.value!r} was never read on its device"
    return block.owner


def ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return where each row begins, and the entries of all rows in one array."""
    at = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(list(map(len, rows)), out=at[1:])
    return at, np.fromiter(chain.from_iterable(rows), np.int64, at[-1])


def alone(instructions: Sequence[Run | Copy | Free], hazards: Hazards) -> frozenset[Stream]:
    """Return the single-copy streams that wait for no other of them, as ``vector_clocks`` needs.

    Streams that own memory are excluded, since they wait for all users of it.
    """
    held = Counter(instruction.stream for instruction in instructions)
    held.update(i.also for i in instructions if type(i) is Copy and i.also is not None)
    found = {
        i: each.stream
        for i, each in enumerate(instructions)
        if type(each) is Copy and held[each.stream] == 1
    }
    found = {i: stream for i, stream in found.items() if len(occupied(instructions[i])) == 1}
    lone = np.zeros(len(instructions), bool)
    lone[list(found)] = True
    at = hazards.after_at
    after = hazards.after
    rows = rows_of(hazards.after_at)
    waited = [
        found[before]
        for i, before in zip(
            *(column[lone[rows] & lone[after]].tolist() for column in (rows, after)), strict=True
        )
        if not any(
            before in after[at[other] : at[other + 1]] for other in after[at[i] : at[i + 1]]
        )  # another predecessor already implies it
    ]
    return frozenset(found.values()).difference(waited, hazards.owners)


# A value on a device: its block and its maker. The maker of a view did not write the block.
_Held = tuple[Block, int]


def find_hazards(
    graph: Graph,
    machine: Machine,
    tasks: Sequence[Task],
    instructions: Sequence[Run | Copy | Free],
    outputs: Mapping[str, str],
) -> Hazards:
    """Return the hazards of runs and copies in issue order; ``outputs`` has their final devices.

    ``tasks`` are those of the runs, in the same order. If the instructions contain frees, memory is
    limited: an allocation on a device then comes after all earlier frees there.
    """
    walk = _Walk(graph, machine)
    coming = iter(tasks)
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Run):
            walk.run(i, instruction.stream, next(coming))
        elif isinstance(instruction, Copy):
            walk.copy(i, instruction)
        else:
            walk.free(i, instruction)
    for label, device in outputs.items():
        value = graph.outputs[label]
        walk.held(value, graph.last_version(value), device)[0].kept = True
    for block, device in walk.unread:
        block.owner = block.owner or Stream(device, "compute")
    return Hazards.of(
        walk.after, [block for block in walk.blocks if not block.kept and not block.freed]
    )


class _Walk:
    def __init__(self, graph: Graph, machine: Machine):
        self.graph = graph
        self.values = graph.values
        self.standing: Standing[int, _Held] = Standing()
        self.home: dict[int, Block] = {}  # of inputs and constants
        self.blocks: list[Block] = []
        self.after: list[list[int]] = []
        self.ran: dict[int, int] = {}
        self.room: dict[str, dict[Stream, int]] = {}  # by device, the last free of each stream
        self.unread: list[
            tuple[Block, str]
        ] = []  # copied blocks not yet used by a stream of their device
        for value in graph.sources:
            self.home[value.index] = self._new(
                -1, Use(value.index, 0), home(graph, machine, value), None
            )
            self.home[value.index].kept = True

    def _new(self, i: int, use: Use, device: str, owner: Stream | None) -> Block:
        index, version = use
        value = self.values[index]
        block = Block(value.name, version, owner)
        self.blocks.append(block)
        self.standing.put(index, version, device, (block, i))
        if i >= 0:
            block.accesses.write(value.region, i)
        return block

    def held(self, value: int, version: int, device: str) -> _Held:
        """Return the block of a version on a device, which must be there, and its maker."""
        found = self.standing.get(value, version, device)
        assert found is not None, f"{self.values[value].name}@{version} is not on {device}"
        return found

    def run(self, i: int, stream: Stream, task: Task) -> None:
        """Add the accesses of a run, its results, and its order dependencies."""
        device = stream.device
        values = self.values
        found = [self.ran[d.task] for d in task.dependencies if d.kind == "order"]
        self.ran[task.index] = i
        blocks: dict[int, Block] = {}
        for use in task.reads:
            value, version = use
            part = None if task.region is None else self.graph.touched(task, value)
            held = (
                self.standing.get(value, version, device)
                if part is None
                else self.standing.held(value, device)
            )
            assert held is not None, f"{values[value].name}@{version} is not on {device}"
            block, maker = held
            blocks[value] = block
            if block.owner is None:
                block.owner = stream
            block.uses[stream] = i
            found.append(maker)
            if use in task.writes:
                writers, readers = block.accesses.write(part or values[value].region, i)
                found += writers + readers
            else:
                found += block.accesses.read(part or values[value].region, i)
        if task.changes:
            self._change(task, device)
        for use in task.outputs:
            if self.graph.is_used(use.value):
                found += self._make(i, stream, use, blocks)
        self.after.append(_earlier(i, found))

    def _change(self, task: Task, device: str) -> None:
        """Advance the versions that a run writes, and the name of the block that holds them."""
        for value, version in task.changes:
            stands = self.standing.change(value, version, device)
            held = self.standing.held(value, device)
            if stands is not None and held is not None and held[0].value == self.values[value].name:
                held[0].version = stands

    def _make(
        self, i: int, stream: Stream, use: Use, blocks: Mapping[int, Block]
    ) -> Collection[int]:
        """Put a result into a new block, or that of its base; return the frees that made room."""
        root = self.values[use.value].root
        if root == use.value:
            self._new(i, use, stream.device, stream).uses[stream] = i
            return self._frees(stream.device)
        base = next(block for value, block in blocks.items() if self.values[value].root == root)
        self.standing.put(*use, stream.device, (base, i))
        return ()

    def copy(self, i: int, copy: Copy) -> None:
        """Add the read of a copy, and the block that it fills."""
        stream = copy.stream
        value = self.graph.value(copy.value)
        use = Use(value.index, copy.version)
        part = value.region
        source, maker = self.held(*use, copy.source)
        if source.owner is None and stream.device == copy.source:
            source.owner = stream
        source.uses[stream] = i
        found = source.accesses.read(part, i)
        found.append(maker)
        if copy.overwrite:
            block = self.home[use.value]
            writers, readers = block.accesses.write(part, i)
            found += writers + readers
            self.standing.put(*use, copy.destination, (block, i))
        else:
            owner = copy.also or (stream if stream.device == copy.destination else None)
            block = self._new(i, use, copy.destination, owner)
            found += self._frees(copy.destination)
            if owner is None:
                self.unread.append((block, copy.destination))
        block.uses[stream] = i
        self.after.append(_earlier(i, found))

    def free(self, i: int, free: Free) -> None:
        """Add the free of a block, after all its users."""
        block, _ = self.held(self.graph.value(free.value).index, free.version, free.stream.device)
        block.owner = free.stream
        block.freed = True
        self.room.setdefault(free.stream.device, {})[free.stream] = i
        self.after.append(_earlier(i, [*block.uses.values()]))

    def _frees(self, device: str) -> Collection[int]:
        return self.room[device].values() if device in self.room else ()


def _earlier(i: int, found: Sequence[int]) -> list[int]:
    """Return the positions before ``i``, sorted and without duplicates."""
    kept = {p for p in found if 0 <= p < i}
    return sorted(kept) if len(kept) > 1 else list(kept)
