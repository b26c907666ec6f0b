"""Whether a program may run, by brute force: slow, short, and without clocks, regions or anything else of ``verify``.

The graph is run once on small tensors, one task after another. So the addresses of the bytes are known that each value
sees and that each task writes. A block of memory holds what some tasks wrote, in the order of their issue. A task sees
a value rightly in a block that has the version which the graph names: its versions say in which order tasks change it.
There, exactly those tasks must have written bytes of the value that did so before in the serial run. And of any two
accesses to one block that share bytes, one of which writes, one must surely end before the other begins.

``verify`` knows no shapes, so it may take two parts of a tensor to overlap that have no byte in common. With
``cautious``, the same is decided by the regions that the graph notes. So what is refused by addresses, ``verify`` must
refuse; what it refuses, the cautious reference must refuse.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from autosched.graph.graph import Graph, Task, called_with
from autosched.graph.regions import Region
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied
from tests.strategies import inputs_for


class Bytes(frozenset[int]):
    """A set of addresses."""

    def overlaps(self, other: Bytes) -> bool:
        return not self.isdisjoint(other)


Part = Bytes | Region | None  # None: all of a block
WHOLE = None


def share(one: Any, other: Any) -> bool:
    """Whether two parts of a block have a byte in common."""
    return one is WHOLE or other is WHOLE or one.overlaps(other)


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
    accesses: list[tuple[int, Part, bool]] = field(default_factory=list)
    kept: bool = False
    freed: bool = False


class Serial:
    """What the serial run of a graph says: which bytes each value has, and which tasks write what."""

    def __init__(self, graph: Graph, cautious: bool):
        self.graph = graph
        self.sees: dict[int, Part] = {}  # by value
        self.touched: dict[tuple[int, int], Part] = {}  # by task and argument, if not all of it
        self._regions() if cautious else self._run()
        self.writers = functools.cache(self._writers)
        # By value, the tasks that change it, in the order of its versions.
        self.changes: dict[int, list[int]] = {value.index: [] for value in graph.values}
        for task in graph.tasks:
            for use in task.changes:
                self.changes[use.value].append(task.index)

    def _run(self) -> None:
        """Run the tasks on small tensors, all of which are kept, so that no address is used twice.

        If no task writes and no values share memory, each has an address of its own, and nothing runs.
        """
        if self.graph.is_plain:
            self.sees = {value.index: Bytes([value.index]) for value in self.graph.values}
            return
        data: dict[int, Any] = {}
        for value in self.graph.sources:
            given = inputs_for(self.graph)[value.name] if value.tensor is None else value.tensor
            data[value.index] = given.clone()
            self.sees[value.index] = addresses(data[value.index])
        for task in self.graph.tasks:
            args, kwargs = called_with(task, data)
            if task.region is not None and not task.view:  # x[key] = y
                self.touched[task.index, task.region[0]] = addresses(args[0][args[1]])
            with torch.no_grad():
                made = dict(task.results(task.fn(*args, **kwargs)))  # type: ignore[misc]
            data.update(made)
            self.sees.update((index, addresses(item)) for index, item in made.items())
            if task.region is not None and task.view:
                # A view is an access to what it sees; of several, to all of its argument.
                seen = self.sees[next(iter(made))] if len(made) == 1 else self.sees[task.region[0]]
                self.touched[task.index, task.region[0]] = seen
        self.data = data

    def _regions(self) -> None:
        self.sees = {value.index: value.region for value in self.graph.values}
        for task in self.graph.tasks:
            if task.region is not None:
                self.touched[task.index, task.region[0]] = task.region[1]

    def part(self, task: Task, value: int) -> Part:
        """What a task touches of an argument."""
        return self.touched.get((task.index, value), self.sees[value])

    def written(self, task: int) -> list[Part]:
        """What a task writes."""
        return [
            self.part(self.graph.tasks[task], use.value) for use in self.graph.tasks[task].writes
        ]

    def _writers(self, root: int, part: Part, until: int) -> list[int]:
        """The tasks before ``until`` that write some of a part of a storage."""
        return [task for task in range(until) if self.writes(task, root, part)]

    def writes(self, task: int, root: int, part: Part) -> bool:
        """Whether a task writes some of a part of a storage."""
        uses = self.graph.tasks[task].writes
        return any(self.graph.values[use.value].root == root for use in uses) and any(
            share(part, one) for one in self.written(task)
        )


def addresses(tensor: torch.Tensor) -> Bytes:
    """The addresses of a tensor's bytes."""
    places = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + k * stride for place in places for k in range(size)]
    width, begin = tensor.element_size(), tensor.data_ptr()
    return Bytes(begin + place * width + k for place in places for k in range(width))


serial_run = functools.lru_cache(maxsize=2)(Serial)  # many programs of one graph are checked


class Reference:
    """Walks a program once; raises RefusedError where it may go wrong."""

    def __init__(self, program: Program, graph: Graph, cautious: bool = False):
        self.program, self.graph = program, graph
        self.serial = serial_run(graph, cautious)
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

    def has(self, block: Block, name: str, device: str, version: int) -> bool:
        """Whether a block has a version of a value on a device: the tasks that made it wrote there."""
        if block.device != device or name not in block.holds:
            return False
        changes = self.serial.changes[self.graph.value(name).index]
        return self.sorted([task for task in block.writers if task in changes]) == changes[:version]

    def sorted(self, tasks: list[int]) -> list[int]:
        """Return them in the order of the serial run, as far as what they write is apart."""
        parts = {index: self.serial.written(index) for index in tasks}
        for end in range(len(tasks) - 1, 0, -1):
            for k in range(end):
                a, b = tasks[k : k + 2]
                if a > b and not any(share(p, q) for p in parts[a] for q in parts[b]):
                    tasks[k : k + 2] = b, a
        return tasks

    def check(self, block: Block, name: str, part: Part, until: int) -> None:
        """Refuse a block unless just those tasks wrote some of a part that did in the serial run."""
        root = self.graph.value(name).root
        wrote = [task for task in block.writers if self.serial.writes(task, root, part)]
        expected = self.serial.writers(root, part, until)
        need(self.sorted(wrote) == expected, f"{name} has other bytes than in the serial run")

    def find(self, i: int, name: str, device: str, version: int) -> Block:
        for block in self.blocks:
            if self.has(block, name, device, version):
                need(not block.freed, f"{name} is read after it was freed")
                need(self.is_behind(i, block.holds[name]), f"{name} may not be there yet")
                return block
        raise RefusedError(f"{name}@{version} is not on {device}")

    def find_part(self, i: int, name: str, device: str, part: Part, until: int) -> Block:
        """Find a value of which a task touches a part: the versions of the rest do not matter."""
        root = self.graph.value(name).root
        expected = self.serial.writers(root, part, until)
        for block in self.blocks:
            wrote = [task for task in block.writers if self.serial.writes(task, root, part)]
            held = block.device == device and name in block.holds
            if held and self.sorted(wrote) == expected:
                need(not block.freed, f"{name} is read after it was freed")
                need(self.is_behind(i, block.holds[name]), f"{name} may not be there yet")
                return block
        raise RefusedError(f"{name} is not on {device} as it must be")

    def is_behind(self, i: int, j: int) -> bool:
        return j < 0 or bool(self.before[i] >> j & 1)

    def access(self, i: int, block: Block, part: Part, writes: bool) -> None:
        for j, other, wrote in block.accesses:
            if (wrote or writes) and share(part, other) and j != i:
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
            name, part = self.graph.values[value].name, self.serial.part(task, value)
            if self.graph.touched(task, value) is None:
                used[value] = self.find(i, name, device, version)
                self.check(used[value], name, part, task.index)
            else:
                used[value] = self.find_part(i, name, device, part, task.index)
        written = {use.value for use in task.writes}
        for value, block in used.items():
            self.in_parts(task, value, block, value in written)
            self.access(i, block, self.serial.part(task, value), value in written)
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
            name = self.graph.values[value].name
            for block in self.blocks:
                if block not in written and not block.freed:
                    need(not self.has(block, name, device, version), f"{name} is elsewhere, too")

    def copy(self, i: int, copy: Copy) -> None:
        need(copy.value in {v.name for v in self.graph.values}, "no value")
        need(
            copy.source != copy.destination
            and copy.stream.device in (copy.source, copy.destination),
            "ends",
        )
        source = self.find(i, copy.value, copy.source, copy.version)
        self.access(i, source, self.serial.sees[self.graph.value(copy.value).index], False)
        for block in self.blocks:
            there = self.has(block, copy.value, copy.destination, copy.version)
            need(not there, "is there already")
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
        need(
            free.version <= self.graph.last_version(self.graph.value(free.value).index),
            "no such version",
        )
        for block in self.blocks:
            if self.has(block, free.value, free.stream.device, free.version) and not block.freed:
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
        index = self.graph.value(name).index
        last = len(self.serial.changes[index])
        for block in self.blocks:
            if self.has(block, name, device, last):
                self.check(block, name, self.serial.sees[index], len(self.graph))
                return block
        raise RefusedError(f"{name} is not there at the end")


class LoopReference(Reference):
    """Checks one run as ``Reference`` does, and then every two accesses of different runs, one by one."""

    def __init__(self, program: Program, graph: Graph, cautious: bool = False, runs: int = 3):
        super().__init__(program, graph, cautious)
        before = happens_before_of_runs(program, runs)
        count = len(program)
        accesses = [access for block in self.home.values() for access in self.pairs(block.accesses)]
        for a, b in [*accesses, *self.sharing()]:
            for later in range(runs):
                for earlier in range(later):
                    seen = before[later * count + b] >> (earlier * count + a) & 1
                    need(seen, f"{b} does not wait for {a} of {later - earlier} runs ago")

    def pairs(self, accesses: list[tuple[int, Part, bool]]) -> list[tuple[int, int]]:
        return [
            (i, j)
            for i, part, writes in accesses
            for j, other, wrote in accesses
            if (writes or wrote) and share(part, other)
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
