"""Whether a program may run, by brute force: slow, short, and without versions, clocks or anything else of ``verify``.

A block of memory holds what some tasks wrote, in the order of their issue. A task sees a value
rightly in a block in which exactly those tasks wrote the part of the value that wrote it before in
the serial run, in that order. And of any two accesses to one block that meet, one of which writes,
one must surely end before the other begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from autosched.graph.graph import Graph, Task
from autosched.graph.regions import Region
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied

WHOLE = Region()


class RefusedError(Exception):
    pass


def need(holds: Any, what: str) -> None:
    if not holds:
        raise RefusedError(what)


def happens_before(program: Program) -> list[int]:
    """Of each instruction, as a bit set, those that have surely ended when it begins."""
    before: list[int] = []
    last: dict[Stream, int] = {}
    recorded: dict[int, int] = {}
    for i, instruction in enumerate(program):
        direct = [last[stream] for stream in occupied(instruction) if stream in last]
        if isinstance(instruction, Record):
            need(instruction.event not in recorded, "an event is recorded twice")
            recorded[instruction.event] = i
        if isinstance(instruction, Wait) and not instruction.ago:
            need(instruction.event in recorded, "a wait has no record before it")
            direct.append(recorded[instruction.event])
        before.append(0)
        for j in direct:
            before[i] |= before[j] | 1 << j
        last.update(dict.fromkeys(occupied(instruction), i))
    return before


@dataclass(eq=False)
class Block:
    owners: set[Stream]  # who may free it; none: any stream of the device
    device: str
    writers: list[int]  # tasks
    holds: dict[str, int]  # values, and what put them there (a position)
    accesses: list[tuple[int, Region, bool]] = field(default_factory=list)
    kept: bool = False
    freed: bool = False


class Serial:
    """What the serial run of a graph says: which tasks write what."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.writers = functools.cache(self._writers)
        self.written = functools.cache(self._written)
        self.expected = functools.cache(self._expected)

    def _writers(self, name: str, part: Region, until: int) -> list[int]:
        """The tasks before ``until`` that write a part of the memory behind a value."""
        root = self.graph.value(name).root
        return [
            t.index
            for t in self.graph.tasks[:until]
            if any(part.overlaps(p) for p in self.written(t.index, root))
        ]

    def _written(self, task: int, root: int) -> list[Region]:
        writes = self.graph.tasks[task].writes
        values = [self.graph.values[use.value] for use in writes]
        return [
            self.graph.touched(self.graph.tasks[task], v.index) or v.region
            for v in values
            if v.root == root
        ]

    def _expected(self, name: str, version: int) -> list[int]:
        """The tasks that wrote a value in this version."""
        value = self.graph.value(name)
        wrote = self.writers(name, value.region, len(self.graph))
        made = -1 if value.producer is None else value.producer
        first = [task for task in wrote if task < made]
        return first + [task for task in wrote if task > made][:version]


serial_run = functools.lru_cache(maxsize=1)(Serial)  # many programs of one graph are checked


class Reference:
    """Walks a program once; raises RefusedError where it may go wrong."""

    def __init__(self, program: Program, graph: Graph):
        self.program, self.graph = program, graph
        self.serial = serial_run(graph)
        self.before = happens_before(program)
        self.blocks: list[Block] = []
        self.ran: dict[str, int] = {}
        self.parts: dict[int, Block] = {}  # by root, the only block whose parts are written
        inputs = dict(program.inputs)
        need(sorted(inputs) == sorted(v.name for v in graph.sources), "inputs")
        self.home = {name: self.block(set(), device, {name: -1}) for name, device in inputs.items()}
        for block in self.home.values():
            block.kept = True
        for i, instruction in enumerate(program):
            match instruction:
                case Run():
                    self.run(i, instruction)
                case Copy():
                    self.copy(i, instruction)
                case Free():
                    self.free(i, instruction)
        self.end(dict(program.outputs))

    def block(
        self, owners: set[Stream], device: str, holds: dict[str, int], writers: Any = ()
    ) -> Block:
        self.blocks.append(Block(owners, device, list(writers), holds))
        return self.blocks[-1]

    # ---- what the program does

    def seen(self, block: Block, name: str, part: Region) -> list[int]:
        root = self.graph.value(name).root
        seen = [
            task
            for task in block.writers
            if any(part.overlaps(p) for p in self.serial.written(task, root))
        ]
        return self.sorted(seen, root)

    def sorted(self, tasks: list[int], root: int) -> list[int]:
        """Return them in the order of the serial run, as far as what they write is apart."""
        parts = {index: self.serial.written(index, root) for index in tasks}
        for end in range(len(tasks) - 1, 0, -1):
            for k in range(end):
                a, b = tasks[k : k + 2]
                if a > b and not any(p.overlaps(q) for p in parts[a] for q in parts[b]):
                    tasks[k : k + 2] = b, a
        return tasks

    def find(self, i: int, name: str, device: str, part: Region, expected: list[int]) -> Block:
        for block in self.blocks:
            if (
                block.device == device
                and name in block.holds
                and self.seen(block, name, part) == expected
            ):
                need(not block.freed, f"{name} is read after it was freed")
                need(self.is_behind(i, block.holds[name]), f"{name} may not be there yet")
                return block
        raise RefusedError(f"{name} is not on {device} as it must be")

    def is_behind(self, i: int, j: int) -> bool:
        return j < 0 or bool(self.before[i] >> j & 1)

    def access(self, i: int, block: Block, part: Region, writes: bool) -> None:
        for j, other, wrote in block.accesses:
            if (wrote or writes) and part.overlaps(other) and j != i:
                need(self.is_behind(i, j), f"{i} does not wait for {j}")
        block.accesses.append((i, part, writes))

    def run(self, i: int, run: Run) -> None:
        need(run.task in self.graph.names and run.task not in self.ran, "runs twice, or is no task")
        task, device = self.graph.task(run.task), run.stream.device
        need(task.device in (None, device), "place")
        for d in task.dependencies:
            if d.kind == "order":
                before = self.graph.tasks[d.task].name
                need(before in self.ran and self.is_behind(i, self.ran[before]), "order")
        used: dict[int, Block] = {}
        for value, version in task.reads:
            name, part = self.graph.values[value].name, self.graph.touched(task, value)
            expected = (
                self.serial.expected(name, version)
                if part is None
                else self.serial.writers(name, part, task.index)
            )
            part = part or self.graph.values[value].region
            used[value] = self.find(i, name, device, part, expected)
        written = {use.value for use in task.writes}
        for value, block in used.items():
            self.in_parts(task, value, block, value in written)
            self.access(
                i,
                block,
                self.graph.touched(task, value) or self.graph.values[value].region,
                value in written,
            )
        self.changed(task, device, [used[value] for value in written])
        for block in {id(used[value]): used[value] for value in written}.values():
            block.writers.append(task.index)
        for use in task.outputs:
            value = self.graph.values[use.value]
            if not self.graph.is_used(use.value):
                continue
            if value.root == value.index:
                made = self.block({run.stream}, device, {value.name: i})
                made.accesses.append((i, WHOLE, True))
            else:
                base = next(v for v in used if self.graph.values[v].root == value.root)
                used[base].holds[value.name] = i
        self.ran[run.task] = i

    def in_parts(self, task: Task, value: int, block: Block, writes: bool) -> None:
        """Parts of a value have versions of their own, which no copy of the whole has."""
        root = self.graph.values[value].root
        if not self.graph.in_parts(value) or (
            self.graph.touched(task, value) is None and not writes
        ):
            return
        need(self.parts.get(root, block) is block, "parts are written elsewhere")
        if writes:
            self.parts[root] = block

    def changed(self, task: Task, device: str, written: list[Block]) -> None:
        """What a device has of a value is in one block while it is written."""
        for value, version in task.changes:
            name, part = self.graph.values[value].name, self.graph.values[value].region
            for block in self.blocks:
                apart = block.device == device and name in block.holds and block not in written
                if apart and not block.freed:
                    seen = self.seen(block, name, part)
                    need(seen != self.serial.expected(name, version), f"{name} is elsewhere, too")

    def copy(self, i: int, copy: Copy) -> None:
        need(copy.value in {v.name for v in self.graph.values}, "no value")
        need(
            copy.source != copy.destination
            and copy.stream.device in (copy.source, copy.destination),
            "ends",
        )
        part, expected = (
            self.graph.value(copy.value).region,
            self.serial.expected(copy.value, copy.version),
        )
        source = self.find(i, copy.value, copy.source, part, expected)
        self.access(i, source, part, False)
        for block in self.blocks:
            held = block.device == copy.destination and copy.value in block.holds
            need(not held or self.seen(block, copy.value, part) != expected, "is there already")
        if copy.overwrite:
            block = self.home.get(copy.value)
            need(block is not None and block.device == copy.destination, "no home")
            assert block is not None
            self.access(i, block, WHOLE, True)
            block.writers, block.holds = list(source.writers), {copy.value: i}
        else:
            owners = [stream for stream in occupied(copy) if stream.device == copy.destination][:1]
            block = self.block(set(owners), copy.destination, {copy.value: i}, source.writers)
            block.accesses.append((i, WHOLE, True))

    def free(self, i: int, free: Free) -> None:
        need(free.value in {v.name for v in self.graph.values}, "no value")
        part, expected = (
            self.graph.value(free.value).region,
            self.serial.expected(free.value, free.version),
        )
        need(
            free.version <= self.graph.last_version(self.graph.value(free.value).index),
            "no such version",
        )
        for block in self.blocks:
            held = block.device == free.stream.device and free.value in block.holds
            if held and self.seen(block, free.value, part) == expected and not block.freed:
                need(
                    not block.kept and (not block.owners or free.stream in block.owners),
                    "not to be freed here",
                )
                self.access(i, block, WHOLE, True)
                block.freed = True
                return
        raise RefusedError("nothing to free")

    def end(self, outputs: dict[str, str]) -> None:
        need(len(self.ran) == len(self.graph), "a task does not run")
        need(sorted(outputs) == sorted(self.graph.outputs), "outputs")
        for label, index in self.graph.outputs.items():
            value = self.graph.values[index]
            self.final(value.name, outputs[label]).kept = True
        for name, block in self.home.items():
            need(self.final(name, block.device) is block, f"{name} does not come home")
        for block in self.blocks:
            released = self.program.in_flight > 1
            need(block.freed or block.kept or released, f"{list(block.holds)} is never freed")
            need(not (block.freed and block.kept), "freed and needed")

    def final(self, name: str, device: str) -> Block:
        part = self.graph.value(name).region
        for block in self.blocks:
            expected = self.serial.writers(name, part, len(self.graph))
            if (
                block.device == device
                and name in block.holds
                and self.seen(block, name, part) == expected
            ):
                return block
        raise RefusedError(f"{name} is not there at the end")


class LoopReference(Reference):
    """Checks one run as ``Reference`` does, and then every two accesses of different runs, one by one."""

    def __init__(self, program: Program, graph: Graph, runs: int = 3):
        super().__init__(program, graph)
        before = happens_before_of_runs(program, runs)
        count = len(program)
        accesses = [access for block in self.home.values() for access in self.pairs(block.accesses)]
        for a, b in [*accesses, *self.sharing()]:
            for later in range(runs):
                for earlier in range(later):
                    seen = before[later * count + b] >> (earlier * count + a) & 1
                    need(seen, f"{b} does not wait for {a} of {later - earlier} runs ago")

    def pairs(self, accesses: list[tuple[int, Region, bool]]) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i, part, writes in accesses
            for j, other, wrote in accesses
            if (writes or wrote) and part.overlaps(other)
        ]

    def sharing(self) -> list[tuple[int, int]]:
        """The tasks that share state, each with each and itself."""
        return [
            (self.ran[a.name], self.ran[b.name])
            for a in self.graph.tasks
            for b in self.graph.tasks
            if any(item is other for item in a.shared for other in b.shared)
        ]


def happens_before_of_runs(program: Program, runs: int) -> list[int]:
    """As ``happens_before``, of several runs; position i of run r is ``r * len(program) + i``.

    As if no run had to wait until an earlier one has ended.
    """
    need(
        all(
            i.event in {r.event for r in program if isinstance(r, Record)} and i.ago > 0
            for i in program
            if isinstance(i, Wait) and i.ago
        ),
        "a wait for an earlier run has no record",
    )
    before: list[int] = []
    last: dict[Stream, int] = {}
    recorded: dict[tuple[int, int], int] = {}
    for run in range(runs):
        for instruction in program:
            i = len(before)
            direct = [last[stream] for stream in occupied(instruction) if stream in last]
            if isinstance(instruction, Record):
                recorded[run, instruction.event] = i
            if isinstance(instruction, Wait) and instruction.ago <= run:
                direct.append(recorded[run - instruction.ago, instruction.event])
            before.append(0)
            for j in direct:
                before[i] |= before[j] | 1 << j
            last.update(dict.fromkeys(occupied(instruction), i))
    return before
