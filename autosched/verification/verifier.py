"""Check the laws of a program, in one walk with vector clocks: see ``verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from autosched.errors import GraphError, ProgramError
from autosched.graph.graph import Graph, Task, Use, Value
from autosched.graph.regions import Accesses, Region
from autosched.program.program import (
    Copy,
    Free,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    excerpt,
)
from autosched.program.residency import Residency
from autosched.program.vector_clocks import Clocks, Stamp, single_copy_streams
from autosched.verification.loops import Access, in_words
from autosched.verification.ranks import RankLaws

__all__ = ["Verifier"]


_Place = tuple[str, int, str]  # a version of a value on a device
_GIVEN = -1  # the maker of inputs and constants


@dataclass(eq=False, slots=True)
class _Memory:
    """A block: who accessed it, and who may free it. Accesses are positions in the program."""

    owners: tuple[Stream, ...]  # empty if any stream of the device may free it
    accesses: Accesses = field(default_factory=Accesses)
    uses: dict[int, int] = field(default_factory=dict)  # by stream, its last use
    freed: bool = False
    kept: bool = False  # inputs, constants and outputs are not freed


# A value on a device: its memory and its maker. The maker of a view did not write the memory.
_Held = tuple[_Memory, int]


class Verifier:
    """One walk over a program; ``at`` has the devices of tasks on the host and on storage."""

    def __init__(self, program: Program, graph: Graph, at: Mapping[str, str | None]):
        self.program = program
        self.graph = graph
        self.places = at  # of tasks constrained to the host or to storage
        # By set of values kept together, the first run that made or wrote one.
        self.bound: dict[tuple[int, ...], Run] = {}
        self.clocks = Clocks(program.streams, single_copy_streams(program.instructions))
        self.index = self.clocks.index
        self.streams = list(self.index)
        self.laws = RankLaws(program, self._fail)
        # By position, the stamp of the receive of a copy between ranks.
        self.received: dict[int, Stamp] = {}
        self.own = 0  # the stream of the current instruction
        self.clock: tuple[int, ...] = ()  # the clock of the current instruction
        self.events: dict[int, Stamp] = {}
        self.names = [value.name for value in graph.values]
        self.inputs = dict(program.inputs)
        self.outputs = dict(program.outputs)
        self.at = -1
        self.table: Residency[str, _Held] = Residency()
        # By root of a storage written by regions, the one block that is written.
        self.written: dict[int, _Memory] = {}
        self.blocks: dict[_Memory, _Place] = {}  # with the place for which each was made
        self.home: dict[str, _Memory] = {}
        self.shared: dict[_Memory, list[Access]] = {}  # accesses to memory that runs share
        self.ran: dict[int, int] = {}  # by task, its position in the program
        self.stamps: dict[int, Stamp] = {}  # of runs and copies, by position

    def run(self) -> dict[str, list[Access]]:
        """Check all laws of one run; return the accesses to memory of inputs and constants."""
        self.laws.check_devices()
        self._inputs()
        for at, instruction in enumerate(self.program.instructions):
            self.at = at
            if isinstance(instruction, Run):
                self._run(instruction)
            elif isinstance(instruction, Copy):
                self._copy(instruction)
            elif isinstance(instruction, Free):
                self._free(instruction)
            elif isinstance(instruction, Record):
                self._record(instruction)
            elif isinstance(instruction, Wait):
                self._wait(instruction)
        self._end()
        return {name: self.shared[block] for name, block in self.home.items()}

    def _inputs(self) -> None:
        found = sorted(name for name, _ in self.program.inputs)
        names = sorted(v.name for v in self.graph.sources)
        if found != names:
            self._fail("result", f"the program's inputs are {found}, the graph's {names}")
        for name, device in self.program.inputs:
            self.home[name] = block = self._new((name, 0, device), ())
            block.kept = True
            self.shared[block] = []

    def _record(self, record: Record) -> None:
        if record.event in self.events:
            self._fail("events", f"event e{record.event} is recorded twice")
        self.events[record.event] = self.clocks.stamp(self.index[record.stream])
        self.laws.record(record)

    def _wait(self, wait: Wait) -> None:
        if wait.ago:
            return
        if wait.event not in self.events:
            self._fail("events", f"event e{wait.event} is waited for but not recorded before")
        self.laws.wait(wait)
        self.clocks.wait_for(self.index[wait.stream], self.events[wait.event])

    def _advance(self, stream: Stream, also: Stream | None = None) -> None:
        """Advance the clocks by a run or copy, which becomes the current instruction."""
        self.own = self.index[stream]
        stamp = self.clocks.advance(self.own, None if also is None else self.index[also])
        self.stamps[self.at] = stamp
        self.clock = stamp[2]

    def _run(self, run: Run) -> None:
        task = self._task(run)
        device = run.stream.device
        if task.index in self.ran:
            self._fail("single", f"task {task.name!r} runs twice")
        self._place(run, task)
        self._advance(run.stream)
        for dependency in task.dependencies:
            if dependency.kind == "order":
                self._follow(task, self.graph.tasks[dependency.task])
        used = {
            use.value: self._access(device, task, use, use in task.writes) for use in task.reads
        }
        written = [used[use.value] for use in task.writes]
        for value, version in task.changes:
            self._change((self.names[value], version, device), task, written)
        for use in task.outputs:
            if self.graph.is_used(use.value):
                self._make(run, use, used)
        self.ran[task.index] = self.at

    def _place(self, run: Run, task: Task) -> None:
        must = None if task.device is None else self.places.get(task.device, task.device)
        if must not in (None, run.stream.device):
            self._fail("place", f"task {task.name!r} must run on {must}")
        for values in self.graph.bonds(task) if self.graph.kept_together else ():
            first = self.bound.setdefault(values, run)
            if first.stream.device != run.stream.device:
                self._fail(
                    "place",
                    f"task {task.name!r} must run with {first.task!r} on {first.stream.device}",
                )
        self.laws.share(task, run)

    def _change(self, place: _Place, task: Task, written: Sequence[_Memory]) -> None:
        """Apply a write: what a device has of a value is in the memory that is written."""
        held = self.table.at(*place)
        if held is not None and held[0] not in written and not held[0].freed:
            self._fail(
                "presence",
                f"task {task.name!r} changes {_named(place)}, which is there in memory of its own",
            )
        self.table.change(*place)

    def _follow(self, task: Task, before: Task) -> None:
        what = f"task {before.name!r}, after which {task.name!r} must run,"
        if before.index not in self.ran:
            self._fail("order", f"{what} has not run")
        if not self._is_earlier(self.ran[before.index]):
            self._fail("order", f"{what} is not waited for", self.ran[before.index])

    def _access(self, device: str, task: Task, use: Use, writes: bool) -> _Memory:
        """Check one argument of a task."""
        value = self.graph.values[use.value]
        region = None if task.region is None else self.graph.touched(task, use.value)
        if region is None:
            place = value.name, use.version, device
            block = self._use(place, self.table.get(*place), value.region, writes)
        else:  # the versions of other regions are irrelevant
            present = self.table.latest(value.name, device)
            place = value.name, use.version if present is None else present, device
            block = self._use(place, self.table.held(value.name, device), region, writes)
            self._check_region(task, value, block, region)
        if (
            writes
            and self.graph.in_parts(value.index)
            and self.written.setdefault(value.root, block) is not block
        ):
            self._fail(
                "presence",
                f"task {task.name!r} writes a part of {value.name!r}, others of which are "
                "elsewhere",
            )
        return block

    def _check_region(self, task: Task, value: Value, block: _Memory, region: Region) -> None:
        """Check that a task sees exactly the writes of a region that were added before it."""
        if self.written.get(value.root, block) is not block:
            self._fail(
                "presence",
                f"task {task.name!r} touches a part of {value.name!r}, which is written elsewhere",
            )
        for dependency in task.dependencies:
            before = self.graph.tasks[dependency.task]
            if dependency.kind == "data" and before.index not in self.ran:
                self._fail(
                    "presence",
                    f"task {task.name!r} needs what task {before.name!r} does, which has not run",
                )
        for other in block.accesses.writers(region):
            late = self.program.instructions[other]
            if isinstance(late, Run) and self.graph.task(late.task).index > task.index:
                self._fail(
                    "presence", f"{value.name!r} was overwritten by task {late.task!r}", other
                )

    def _make(self, run: Run, use: Use, used: Mapping[int, _Memory]) -> None:
        """Put a result into a new block, or into that of its base if it is a view."""
        root = self.graph.values[use.value].root
        place = (self.names[use.value], use.version, run.stream.device)
        if root == use.value:
            block = self._new(place, (run.stream,))
            block.uses[self.own] = self.at
            block.accesses.write(self.graph.values[root].region, self.at)
        else:
            base = next(
                block for value, block in used.items() if self.graph.values[value].root == root
            )
            self.table.put(*place, (base, self.at))

    def _copy(self, copy: Copy) -> None:
        """Check a copy: a read of the source, then a write of the destination.

        Between ranks, these two are on different streams.
        """
        if copy.source == copy.destination or copy.stream.device not in (
            copy.source,
            copy.destination,
        ):
            self._fail(
                "presence",
                f"a copy from {copy.source} to {copy.destination} is on a stream of one of the two",
            )
        source = (copy.value, copy.version, copy.source)
        region = self._region(copy.value)
        if not self.laws.crosses(copy):
            self._advance(copy.stream, copy.also)
            self._use(source, self.table.get(*source), region, writes=False)
            self._fill(copy, region)
            return
        assert copy.also is not None
        sender, receiver = self.index[copy.stream], self.index[copy.also]
        before = self.clocks.clock[receiver]
        self.own = sender
        self.stamps[self.at], self.received[self.at] = self.clocks.exchange(sender, receiver)
        self.clock = self.clocks.clock[sender]
        self._use(source, self.table.get(*source), region, writes=False)
        self.own = receiver
        self.clock = before
        self._fill(copy, region)

    def _fill(self, copy: Copy, region: Region) -> None:
        """Check that a copy may write its destination."""
        target = (copy.value, copy.version, copy.destination)
        if (there := self.table.get(*target)) is not None and not there[0].freed:
            self._fail("single", f"{_named(target)} is there already")
        if copy.overwrite:
            block = self.home.get(copy.value)
            if block is None or self.inputs[copy.value] != copy.destination:
                self._fail(
                    "presence", f"{copy.value!r} is no input that lives on {copy.destination}"
                )
            self._touch(block, region, writes=True)
            self._empty(block, copy)
            self.table.put(*target, (block, self.at))
        else:
            streams = (copy.stream,) if copy.also is None else (copy.stream, copy.also)
            block = self._new(
                target, tuple([s for s in streams if s.device == copy.destination][:1])
            )
            block.accesses.write(region, self.at)
        block.uses[self.own] = self.at

    def _empty(self, block: _Memory, copy: Copy) -> None:
        """Note that a copy replaces all that a block held: a value, and views of it."""
        for index in self.graph.members(self.graph.value(copy.value).index):
            for version in range(self.graph.last_version(index) + 1):
                place = self.names[index], version, copy.destination
                held = self.table.at(*place)
                if held is not None and held[0] is block:
                    self.table.drop(*place)

    def _region(self, name: str) -> Region:
        try:
            return self.graph.value(name).region
        except GraphError as error:
            self._fail("presence", str(error))

    def _free(self, free: Free) -> None:
        place = (free.value, free.version, free.stream.device)
        held = self.table.get(*place)
        if held is None:
            self._fail("free", f"{_named(place)} is not there to be freed")
        block = held[0]
        if block.freed:
            self._fail("free", f"{_named(place)} is freed twice")
        if block.kept:
            self._fail("free", f"{_named(place)} belongs to the caller and is not to be freed")
        if block.owners and free.stream not in block.owners:
            self._fail(
                "free",
                f"{_named(place)} was allocated on {block.owners[0]}, and only that stream may "
                "free it",
            )
        self.own = self.index[free.stream]
        self.clock = self.clocks.clock[self.own]
        for use in block.uses.values():
            if not self._is_earlier(use):
                self._fail(
                    "free",
                    f"{_named(place)} is freed while {in_words(self.program, use)} may still use it",
                    use,
                )
        block.freed = True

    def _end(self) -> None:
        self.at = len(self.program)
        for task in self.graph.tasks:
            if task.index not in self.ran:
                self._fail("single", f"task {task.name!r} never runs")
        found = sorted(label for label, _ in self.program.outputs)
        labels = sorted(self.graph.outputs)
        if found != labels:
            self._fail("result", f"the program's outputs are {found}, the graph's {labels}")
        for label, index in self.graph.outputs.items():
            place = (self.names[index], self.graph.last_version(index), self.outputs[label])
            self._final(place, f"output {label!r}").kept = True
        for value in self.graph.sources:
            place = (value.name, self.graph.last_version(value.index), self.inputs[value.name])
            if self._final(place, f"input {value.name!r}") is not self.home[value.name]:
                self._fail("result", f"{_named(place)} is not in the caller's memory at the end")
        for block, place in self.blocks.items() if self.program.in_flight == 1 else ():
            if not block.freed and not block.kept:
                self._fail("free", f"{_named(place)} is never freed")

    def _final(self, place: _Place, what: str) -> _Memory:
        held = self.table.get(*place)
        if held is None:
            self._fail("result", f"{what}, {_named(place)}, is not there at the end")
        if held[0].freed:
            self._fail("result", f"{what}, {_named(place)}, is freed")
        return held[0]

    def _new(self, place: _Place, owners: tuple[Stream, ...]) -> _Memory:
        self.blocks[block := _Memory(owners)] = place
        self.table.put(*place, (block, self.at))
        return block

    def _use(self, place: _Place, held: _Held | None, region: Region, writes: bool) -> _Memory:
        """Check a read: present, not freed, and after its writer and its maker."""
        if held is None:
            self._fail("presence", f"{_named(place)} is read but {self._missing(place)}")
        block, maker = held
        if block.freed:
            self._fail("presence", f"{_named(place)} is read after it was freed")
        if not self._is_earlier(maker):
            self._fail(
                "order",
                f"{_named(place)} is made by {in_words(self.program, maker)}, which is not waited for",
                maker,
            )
        self._touch(block, region, writes, place)
        return block

    def _touch(
        self, block: _Memory, region: Region, writes: bool, place: _Place | None = None
    ) -> None:
        """Check that an access happens after all accesses with which it conflicts."""
        if block in self.shared:
            self.shared[block].append(Access(self.at, region, writes))
        readers: Sequence[int] = ()
        if writes:
            writers, readers = block.accesses.write(region, self.at)
        else:
            writers = block.accesses.read(region, self.at)
        for before in writers:
            if not self._is_earlier(before):
                what = f"{self._writing()} memory that {in_words(self.program, before)} wrote"
                if place is not None:
                    what = f"{_named(place)} is made by {in_words(self.program, before)}"
                self._fail("order", f"{what}, which is not waited for", before)
        for before in readers:
            if not self._is_earlier(before):
                what = f"{self._writing()} memory that {in_words(self.program, before)} reads"
                self._fail("order", f"{what}, which is not waited for", before)
        block.uses[self.own] = self.at

    def _missing(self, place: _Place) -> str:
        value, version, device = place
        present = self.table.latest(value, device)
        if present is not None and present > version:
            return f"was overwritten by version {present}"
        elsewhere = [other for other in self.table.devices(value, version) if other != device]
        if present is not None and present == version:
            return "a part of it was overwritten by what comes later"
        where = (
            f"it is on {elsewhere[0]}: a copy is missing" if elsewhere else "nothing made it before"
        )
        return f"not there; {where}"

    def _is_earlier(self, before: int) -> bool:
        """Whether an earlier access happens before the current one, which the clocks contain."""
        if before == _GIVEN:
            return True
        stamp = self.received.get(before)  # accesses to one memory are of one rank
        if stamp is None or self._rank(stamp[0]) != self._rank(self.own):
            stamp = self.stamps[before]
        stream, position, _ = stamp
        return stream == self.own or self.clocks.includes(self.clock, stream, position)

    def _rank(self, stream: int) -> int | None:
        return self.laws.rank.get(self.streams[stream].device)

    def _task(self, run: Run) -> Task:
        try:
            return self.graph.task(run.task)
        except GraphError as error:
            self._fail("single", str(error))

    def _writing(self) -> str:
        instruction = self.program.instructions[self.at]
        return (
            f"task {instruction.task!r} writes"
            if isinstance(instruction, Run)
            else "the copy overwrites"
        )

    def _fail(self, law: str, what: str, other: int | None = None) -> NoReturn:
        raise ProgramError(excerpt(self.program, self.at, law, what, other))


def _named(place: _Place) -> str:
    value, version, device = place
    return f"{value!r}{f' (version {version})' if version else ''} on {device}"
