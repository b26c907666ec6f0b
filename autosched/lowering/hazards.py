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

The blocks of values that tasks write, or that share memory, are found line by line. All others, most
of a graph, are written once: their blocks are found for all lines at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autosched.graph.flow import flow, grouped, rows_of, starts
from autosched.graph.regions import Accesses
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Instruction, Receive, Run, Send, Stream
from autosched.program.residency import Buffer, Buffers

Line = Run | Copy | Send | Receive | Free
"""An instruction before events are inserted."""

Ints = NDArray[np.int64]


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
    return _Memory(problem, instructions, outputs).hazards()


class _Memory:
    """The blocks of a program, and the lines that use and free them, as arrays.

    Blocks, values and devices are numbers. Lines are positions of instructions. Line -1 makes what
    is present from the start, and line ``end`` uses the outputs.
    """

    def __init__(self, problem: Problem, lines: Sequence[Line], outputs: Mapping[str, str]):
        self.problem = problem
        self.graph = graph = problem.graph
        self.lines = lines
        self.end = len(lines)
        self.number = {name: p for p, name in enumerate(problem.devices)}
        known: dict[Stream, int] = {}
        streams = [known.setdefault(line.stream, len(known)) for line in lines]
        self.streams = [*known]
        self.stream = np.array(streams, np.int64)  # by line, its number
        self.outputs = [(graph.outputs[label], name) for label, name in outputs.items()]
        index = {task.name: task.index for task in graph.tasks}
        runs = [(index[line.task], at) for at, line in enumerate(lines) if type(line) is Run]
        tasks, at = _columns(runs, 2)
        self.line = np.empty(len(runs), np.int64)  # by task
        self.line[tasks] = at
        flown = flow(graph)
        # Pairs of lines, of which the first must follow the second.
        self.after = [np.stack([self.line[rows_of(flown.after_at)], self.line[flown.after]])]
        # Columns of blocks: the line that makes it, value, version, device; of users: block, line.
        self.blocks, self.users = self._of_unchanging()
        if graph.changing:
            blocks, users = self._of_changing(self.blocks.shape[1])
            self.blocks = np.concatenate([self.blocks, blocks], axis=1)
            self.users = np.concatenate([self.users, users], axis=1)

    def _of_unchanging(self) -> tuple[Ints, Ints]:
        """Return the blocks of values that no task writes and that share no memory, and their users.

        Such a value is the same wherever it is, so what uses it uses the block that was made last on
        the same device. *Moments* are numbers with the order of value, device and line.
        """
        graph = self.graph
        count = len(self.number)
        moments = self.end + 2  # of a value on a device
        first = {value.name: value.index * count for value in graph.values}
        # 1. Moments at which copies make and use values.
        homes = self.problem.homes.items()
        made = [(value * count + self.number[home]) * moments for value, home in homes]
        used = [
            (value * count + self.number[device] + 1) * moments - 1
            for value, device in self.outputs
        ]
        for at, line in enumerate(self.lines, 1):
            if isinstance(line, Run):
                continue
            if isinstance(line, Copy):
                used.append((first[line.value] + self.number[line.source]) * moments + at)
                made.append((first[line.value] + self.number[line.destination]) * moments + at)
            else:
                here = (first[line.value] + self.number[line.stream.device]) * moments + at
                (made if type(line) is Receive else used).append(here)
        # 2. The same of runs.
        flown = flow(graph)
        devices = [self.number[stream.device] for stream in self.streams]
        device = np.array(devices, np.int64)[self.stream]
        changing = np.zeros(len(graph.values), bool)
        changing[list(graph.changing)] = True

        def moments_of(others: Sequence[int], at: Ints, values: Ints) -> Ints:
            line = self.line[rows_of(at)]
            runs = (values * count + device[line]) * moments + line + 1
            found = np.concatenate([np.array(others, np.int64), runs])
            return np.sort(found[~changing[found // (count * moments)]])

        makes = moments_of(made, flown.makes_at, flown.makes)
        uses = moments_of(used, flown.reads_at, flown.reads)
        # 3. The blocks.
        place, maker = np.divmod(makes, moments)
        value, device = np.divmod(place, count)
        blocks = np.stack([maker - 1, value, np.zeros_like(value), device])
        return blocks, np.stack([np.searchsorted(makes, uses) - 1, uses % moments - 1])

    def _of_changing(self, count: int) -> tuple[Ints, Ints]:
        """Return the other blocks, numbered from ``count``, and their users.

        Adds the pairs of lines whose accesses to a block conflict.
        """
        graph = self.graph
        changing = graph.changing
        homes = {value: home for value, home in self.problem.homes.items() if value in changing}
        buffers = Buffers(graph, homes, changing)
        number: dict[Buffer, int] = {}
        made: list[int] = []
        accesses: dict[Buffer, Accesses] = {}
        users: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []

        def add(buffer: Buffer) -> None:
            number[buffer] = count + len(number)
            made.append(buffer.maker)  # later, it may be a copy over an input
            accesses[buffer] = Accesses()
            if buffer.maker >= 0:
                accesses[buffer].write(graph.values[buffer.value].region, buffer.maker)

        for source in buffers.sources.values():
            add(source)
        for step in buffers.walk(self.lines):
            if type(step.instruction) is Free:
                users.append((number[step.reads[0].block], step.at))
            for buffer, region, writes in buffers.accesses(step):
                block = buffer.block
                users.append((number[block], step.at))
                known = accesses[block]
                before = [buffer.maker]
                if writes:
                    before += chain(*known.write(region, step.at))
                else:
                    before += known.read(region, step.at)
                after += [(step.at, earlier) for earlier in before]
            for result in step.made:
                if result is not None and result.base is None and result not in number:
                    add(result)
        for value, device in self.outputs:
            if value in changing:
                final = buffers.find(value, graph.last_version(value), device)
                users.append((number[final.block], self.end))
        self.after.append(_columns(after, 2))
        blocks = [
            (maker, b.value, b.version, self.number[b.device])
            for maker, b in zip(made, number, strict=True)
        ]
        return _columns(blocks, 4), _columns(users, 2)

    def hazards(self) -> Hazards:
        """Return the hazards, and the blocks that are neither freed by a line nor kept."""
        made, value, version, device = self.blocks
        block, user = self.users
        is_free = np.array([*(type(line) is Free for line in self.lines), False])[user]
        freed = np.full(len(made), -1)
        freed[block[is_free]] = user[is_free]
        left = (made >= 0) & (freed < 0)
        left[block[user == self.end]] = False
        is_use = ~is_free & (user < self.end)
        block = np.concatenate([np.arange(len(made)), block[is_use]])
        user = np.concatenate([made, user[is_use]])
        # 1. What uses a block follows its maker, what frees it follows all uses, and what is made
        #    in the room follows that.
        after = [*self.after, np.stack([user, made[block]]), np.stack([freed[block], user])]
        after += self._room(freed[freed >= 0])
        later, earlier = np.concatenate(after, axis=1)
        pairs = np.unique((later * self.end + earlier)[(earlier >= 0) & (earlier < later)])
        later, earlier = np.divmod(pairs, self.end)
        # 2. Number the blocks that are left in the order in which they are made.
        order = np.lexsort((value, made))
        order = order[left[order]]
        rank = np.full(len(made), -1)
        rank[order] = np.arange(len(order))
        block = rank[block]
        block, user = np.divmod(np.sort((block * self.end + user)[block >= 0]), self.end)
        # 3. Of the uses of a block by each stream, find the first and the last.
        key = block * len(self.streams) + self.stream[user]
        by_stream = np.argsort(key, kind="stable")
        new = np.diff(key[by_stream], prepend=-1) != 0
        first = by_stream[new]
        last = by_stream[np.append(new[1:], True)[: len(new)]]
        last = last[np.argsort(first)]
        return Hazards(
            starts(later, self.end),
            earlier,
            [self.graph.values[index].name for index in value[order].tolist()],
            version[order].tolist(),
            self._owners(made[order], device[order], block, user),
            starts(block[last], len(order)),
            user[last],
        )

    def _room(self, freed: Ints) -> Iterator[Ints]:
        """Yield new blocks with the last free before by each stream of their device."""
        made, _, _, device = self.blocks
        frees: dict[Stream, list[int]] = {}
        for at in np.sort(freed).tolist():
            frees.setdefault(self.lines[at].stream, []).append(at)
        for stream, positions in frees.items():
            there = made[device == self.number[stream.device]]
            before = np.searchsorted(positions, there) - 1
            yield np.stack([there, np.array(positions)[before]])[:, before >= 0]

    def _owners(self, made: Ints, device: Ints, block: Ints, user: Ints) -> list[Stream]:
        """Return the stream that frees each block: its maker's, or its first user's there."""
        owners = [owner_of(self.lines[at]) for at in made.tolist()]
        names = [self.problem.devices[number] for number in device.tolist()]
        if None in owners:
            for b, at in zip(block.tolist(), user.tolist(), strict=True):
                stream = self.lines[at].stream
                if owners[b] is None and stream.device == names[b]:
                    owners[b] = stream
        return [owner or Stream(name, "compute") for owner, name in zip(owners, names, strict=True)]


def _columns(rows: Sequence[Sequence[int]], count: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, count).T
