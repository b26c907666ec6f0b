"""Prove that a program cannot race.

The laws:

    order       accesses to the same memory, and tasks with ``after=``, are ordered by streams and
                events
    events      each event is recorded once, and earlier in the list than its waits
    presence    what is read is present: made on this device, or copied to it, and not freed; on the
                device of a task that writes a value, that value and its views are in one memory;
                parts of a value are written in one memory, and then touched there
    single      each task runs once, each version is on a device at most once at a time
    free        memory is freed once, on the stream that allocated it, after all its uses; only
                inputs, constants and outputs are kept, and in a loop what is released when the
                run has ended
    result      outputs, and the inputs that tasks wrote, end where the program says
    place       tasks run where they are constrained to, and with those that the graph keeps with
                them; only tasks that read files run on storage, to which nothing is copied; where a
                machine is given, on its devices and links, and on no more compute streams than it
                has
    rank        an event is recorded and waited for on one rank, and tasks that share state run on
                one; where a machine is given, its devices are of the ranks that the program says
    exchange    a copy between ranks is on a stream of its source and on one of its destination

Of a copy between ranks, the receive follows the send, and the send follows nothing of the receiver.
No rank waits for another that waits for it, because each issues its part in the order of one list.

The proof derives from the graph what must be ordered. It shares only the clock arithmetic with
lowering. A walk over the program checks all laws but order, and lists the pairs of lines that must
be ordered, as it finds them. Vector clocks tell which of them are not. So the first law that is
broken is found: a pair that stands before what the walk refuses is asked about before. To name a
pair in words, the walk is repeated up to it. The time grows with instructions times streams. Of a
loop, this proves each run by itself, since waits for earlier runs have no effect in the first run;
that the runs do not race with each other is proved by unrolling the loop (``loops``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from autosched._lib.allowed import is_storage
from autosched.errors import GraphError, ProgramError
from autosched.graph.constraints import Bond, bonds, by_value
from autosched.graph.flow import flow, rows_of
from autosched.graph.graph import HOST, STORAGE, Graph, Task, Use, Value
from autosched.graph.regions import Region
from autosched.machine.machine import Machine
from autosched.program.clocks import ordered
from autosched.program.parts import crosses
from autosched.program.program import (
    Copy,
    Free,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Stream,
    Wait,
    excerpt,
)
from autosched.verification.conflicts import Conflicts
from autosched.verification.loops import Access, check_runs, check_waits, in_words

if TYPE_CHECKING:
    from autosched.problem import Problem


def verify(program: Program, graph: Graph | Problem, machine: Machine | None = None) -> None:
    """Raise ProgramError if some legal interleaving could differ from the serial run.

    A problem has the machine, too, and constraints that are not in its graph. If the graph has grown
    since the program was made, pass ``schedule.problem``, which has not.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=x + 1)
    >>> asc.verify(asc.Program.parse("input x on cpu"), graph)
    Traceback (most recent call last):
    autosched.errors.ProgramError: task 'add' never runs
    """
    if not isinstance(program, Program):
        raise ProgramError(
            f"verify needs a Program, got {program!r}; Program.parse reads one from text"
        )
    if any(type(i) is Send or type(i) is Receive for i in program):
        raise ProgramError("this is the part of one rank; pass the program of all ranks")
    bound: Mapping[str, str | None] = {}
    kept: Mapping[int, Sequence[Bond]]
    if isinstance(graph, Graph):
        kept = by_value(graph.kept_together)
    else:
        bound = graph.constraints.place
        kept = graph.kept
        machine = graph.machine
        graph = graph.graph
    if machine is not None:
        check_machine(program, machine)
    check_waits(program)
    at: dict[str, str | None] = {HOST: None, STORAGE: None}
    if machine is not None:
        at = {HOST: machine.host, STORAGE: (*machine.storage, machine.host)[0]}
    devices = ((task, bound.get(task.name, task.device)) for task in graph.tasks)
    must = {task.index: at.get(device, device) for task, device in devices if device}
    memory = check_run(program, graph, must, kept)
    if program.in_flight > 1:
        check_runs(program, graph, memory)


def check_machine(program: Program, machine: Machine) -> None:
    """Check a program against the devices, compute streams and links of a machine."""
    if dict(program.ranks) != machine.ranks:
        raise ProgramError(
            "the devices of the program are of other ranks than those of the machine (law: rank)"
        )
    computing: dict[str, int] = {}
    for stream in program.streams:
        if stream.device not in machine.names:
            raise ProgramError(
                f"stream {stream} is on no device of the machine: {', '.join(machine.names)} (law: "
                "place)"
            )
        if not stream.name.startswith("copy-"):
            computing[stream.device] = computing.get(stream.device, 0) + 1
            most = machine.device(stream.device).streams
            if computing[stream.device] > most:
                raise ProgramError(
                    f"{stream} is one compute stream too many: the device has {most} (law: place)"
                )
    ends = dict.fromkeys(
        [(i.source, i.destination) for i in program.instructions if type(i) is Copy]
    )
    apart = [pair for pair in ends if machine.link(*pair) is None]
    for at, copy in enumerate(program.instructions if apart else ()):
        if isinstance(copy, Copy) and (copy.source, copy.destination) in apart:
            what = f"no link joins {copy.source} and {copy.destination}"
            raise ProgramError(excerpt(program, at, "place", what, None))


# A version of a value on a device, as one number: that of the value, plus _DEVICE times that of the
# device, plus _VERSION times the version.
_Place = int
_DEVICE = 1 << 32
_VERSION = 1 << 64
_GIVEN = -1  # the maker of inputs and constants

# What is said of pairs that are not ordered.
_NOT_AFTER = "{about} is not waited for"
_NOT_MADE = "{about} is made by {other}, which is not waited for"
_OVERWRITES = "{writing} memory that {other} wrote, which is not waited for"
_READ = "{writing} memory that {other} reads, which is not waited for"
_IN_USE = "{about} is freed while {other} may still use it"


class _Memory:
    """A block: who accessed it, and who may free it. Accesses are lines."""

    __slots__ = ("accesses", "freed", "kept", "maker", "owner", "place", "uses")

    def __init__(self, place: _Place, owner: Stream | None, accesses: Conflicts | None, line: int):
        self.place = place  # for which it was made
        self.owner = owner  # None if any stream of the device may free it
        self.accesses = accesses  # None if nothing writes it after it is made
        self.maker = line
        self.uses = [line]
        self.freed = False
        self.kept = False  # inputs, constants and outputs are not freed


class _Devices(dict[str, int]):
    """The number of each device, times ``_DEVICE``."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self) * _DEVICE
        return self[name]


class _Table:
    """The memory of versions of values on devices, where lowering has ``program.residency``."""

    def __init__(self) -> None:
        self.held: dict[_Place, _Memory] = {}
        # The makers of views, and of what was copied over inputs. They did not make the memory.
        self.makers: dict[_Place, int] = {}
        # By value and device, the version that came last, if it is not 0, and those written before
        # their turn.
        self.last: dict[_Place, int] = {}
        self.early: dict[_Place, set[int]] = {}

    def put(self, place: _Place, block: _Memory, maker: int) -> None:
        """Note that a version is on a device."""
        self.held[place] = block
        if maker != block.maker or self.makers:
            self.makers[place] = maker
        if place >= _VERSION or self.last:
            version, where = divmod(place, _VERSION)
            self.last[where] = version
            self.early.pop(where, None)

    def get(self, place: _Place) -> _Memory | None:
        """Return what a device has of a version, all parts of which are there."""
        if self.early and place % _VERSION in self.early:
            return None
        return self.held.get(place)

    def latest(self, where: _Place) -> _Place | None:
        """Return the place of the version of a value that a device has; ``where`` is any of them."""
        where %= _VERSION
        place = where + self.last.get(where, 0) * _VERSION
        return place if place in self.held else None

    def change(self, place: _Place) -> None:
        """Apply a write, which leaves the next version, unless others have still to come."""
        version, where = divmod(place, _VERSION)
        block = self.held.pop(place, None)
        early = self.early.setdefault(where, set())
        if block is None:
            early.add(version)
            return
        version += 1
        while version in early:
            early.remove(version)
            version += 1
        if not early:
            del self.early[where]
        changed = where + version * _VERSION
        self.held[changed] = block
        self.makers[changed] = self.makers.pop(place, block.maker)
        self.last[where] = version


def check_run(
    program: Program,
    graph: Graph,
    must: Mapping[int, str | None],
    kept: Mapping[int, Sequence[Bond]],
) -> dict[str, list[Access]]:
    """Check all laws of one run; return the accesses to memory that runs of a loop share.

    That is the memory of inputs and constants, by name. ``must`` has the devices of bound tasks, and
    ``kept`` what is kept together.
    """
    walk = _Walk(program, graph, must, kept)
    refusal = None
    try:
        walk.run()
    except ProgramError as error:
        refusal = error
    before, line = (np.frombuffer(pairs, np.int64) for pairs in (walk.before, walk.line))
    found = ordered(program, before, line)
    if not found.all():
        _Walk(program, graph, must, kept, int(found.argmin())).run()
    if refusal is not None:
        raise refusal
    return {name: walk.shared[block] for name, block in walk.home.items()}


class _Walk:
    """One walk over a program; it refuses the pair with the number ``refused``, if there is one.

    The line of an instruction is its position. A copy between ranks has a second line, for its
    receive, which is the number of instructions more.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        must: Mapping[int, str | None],
        kept: Mapping[int, Sequence[Bond]],
        refused: int = -1,
    ):
        self.program = program
        self.graph = graph
        self.must = must
        self.kept = kept
        self.refused = refused
        # By task, those after which it must run by order alone.
        self.follows: dict[int, list[int]] = {}
        known = flow(graph)
        for task, before in zip(
            rows_of(known.after_at).tolist(), known.after.tolist(), strict=True
        ):
            self.follows.setdefault(task, []).append(before)
        # By set of values kept together, the first run that made or wrote one.
        self.bound: dict[tuple[int, ...], Run] = {}
        self.rank = dict(program.ranks)
        self.storage = {s.device for s in program.streams if is_storage(s.device)}
        self.recorder: dict[int, Stream] = {}  # by event
        self.sharing: dict[int, Run] = {}  # by state that tasks share, the first that has it
        self.before = array("q")  # the pairs of lines that must be ordered
        self.line = array("q")
        self.at = -1  # the current instruction,
        self.own = -1  # and its current line
        columns = program.columns
        self.streams: list[int] = columns.stream.tolist()  # of each line
        if columns.apart.any():
            self.streams += columns.also.tolist()
        self.names = [value.name for value in graph.values]
        self.index = {value.name: value.index for value in graph.values}
        self.tasks = {task.name: task for task in graph.tasks}
        self.inputs = dict(program.inputs)
        self.outputs = dict(program.outputs)
        self.devices = _Devices()
        self.table = _Table()
        # The roots that tasks write in place.
        self.rewritten = {graph.values[u.value].root for task in graph.tasks for u in task.writes}
        # By root of a storage written by regions, the one block that is written.
        self.written: dict[int, _Memory] = {}
        self.blocks: list[_Memory] = []
        self.home: dict[str, _Memory] = {}
        self.shared: dict[_Memory, list[Access]] = {}  # accesses to memory that runs share
        self.ran: dict[int, int] = {}  # by task, its position in the program

    def run(self) -> None:
        """Check all laws but the order of pairs, which are collected."""
        self._check_ranks()
        self._inputs()
        checks: dict[type, Callable[[Any], None]] = {
            Run: self._run,
            Copy: self._copy,
            Free: self._free,
            Record: self._record,
            Wait: self._wait,
        }
        for at, instruction in enumerate(self.program.instructions):
            self.at = self.own = at
            checks[type(instruction)](instruction)
        self._end()

    def _check_ranks(self) -> None:
        """Check that each device has one rank, if there are several."""
        if not self.rank:
            return
        program = self.program
        placed = [device for _, device in (*program.inputs, *program.outputs)]
        ends = [end for i in program if type(i) is Copy for end in (i.source, i.destination)]
        for device in (*(stream.device for stream in program.streams), *placed, *ends):
            if device not in self.rank:
                self._fail("rank", f"device {device} is of no rank")
        if len(self.rank) < len(program.ranks):
            self._fail("rank", "a device is of two ranks")

    def _apart(self, one: Stream, other: Stream) -> bool:
        return self.rank.get(one.device) != self.rank.get(other.device)

    def _crosses(self, copy: Copy) -> bool:
        """Whether a copy is between ranks; check that it is on streams of these."""
        if not crosses(copy, self.rank):
            if copy.also is not None and self._apart(copy.stream, copy.also):
                self._fail("exchange", f"a copy within a rank occupies {copy.also}, of another")
            return False
        ends = copy.stream.device, copy.also and copy.also.device
        if ends != (copy.source, copy.destination):
            what = "a copy between ranks is on a stream of its source and of its destination"
            self._fail("exchange", what)
        return True

    def _inputs(self) -> None:
        found = sorted(name for name, _ in self.program.inputs)
        names = sorted(v.name for v in self.graph.sources)
        if found != names:
            self._fail("result", f"the program's inputs are {found}, the graph's {names}")
        for name, device in self.program.inputs:
            place = self.index[name] + self.devices[device]
            self.home[name] = block = self._new(place, None, Conflicts())
            block.kept = True
            self.shared[block] = []

    def _record(self, record: Record) -> None:
        if record.event in self.recorder:
            self._fail("events", f"event e{record.event} is recorded twice")
        self.recorder[record.event] = record.stream

    def _wait(self, wait: Wait) -> None:
        if wait.ago:
            return
        recorder = self.recorder.get(wait.event)
        if recorder is None:
            self._fail("events", f"event e{wait.event} is waited for but not recorded before")
        if self.rank and self._apart(recorder, wait.stream):
            self._fail("rank", f"event e{wait.event} is recorded on {recorder}, on another rank")

    def _run(self, run: Run) -> None:
        task = self.tasks.get(run.task) or self._unknown(run)
        device = self.devices[run.stream.device]
        if task.index in self.ran:
            self._fail("single", f"task {task.name!r} runs twice")
        if run.stream.device in self.storage and not task.reads_file:
            what = f"task {task.name!r} cannot run on {run.stream.device}, which is storage"
            self._fail("place", what)
        if task.index in self.must or self.kept or self.rank:
            self._place(run, task)
        if self.follows:
            for other in self.follows.get(task.index, ()):
                self._follow(task, self.graph.tasks[other])
        writes = task.writes
        used: dict[int, _Memory] = {}
        for use in task.reads:
            used[use[0]] = self._access(device, task, use, bool(writes) and use in writes)
        if writes:
            written = [used[use.value] for use in writes]
            for value, version in task.changes:
                self._change(value + device + version * _VERSION, task, written)
        for use in task.outputs:
            if self.graph.is_used(use.value):
                self._make(run, use.value + device + use.version * _VERSION, use.value, used)
        self.ran[task.index] = self.at

    def _place(self, run: Run, task: Task) -> None:
        must = self.must.get(task.index)
        if must not in (None, run.stream.device):
            self._fail("place", f"task {task.name!r} must run on {must}")
        for values in bonds(task, self.kept):
            first = self.bound.setdefault(values, run)
            if first.stream.device != run.stream.device:
                self._fail(
                    "place",
                    f"task {task.name!r} must run with {first.task!r} on {first.stream.device}",
                )
        for item in task.shared if self.rank else ():
            sharer = self.sharing.setdefault(id(item), run)
            if self._apart(sharer.stream, run.stream):
                what = f"{sharer.task!r} on {sharer.stream.device}, on another rank"
                self._fail("rank", f"task {task.name!r} shares state with {what}")

    def _change(self, place: _Place, task: Task, written: Sequence[_Memory]) -> None:
        """Apply a write: what a device has of a value is in the memory that is written."""
        block = self.table.held.get(place)
        if block is not None and block not in written and not block.freed:
            self._fail(
                "presence",
                f"task {task.name!r} changes {self._named(place)}, which is there in memory of its own",
            )
        self.table.change(place)

    def _follow(self, task: Task, before: Task) -> None:
        what = f"task {before.name!r}, after which {task.name!r} must run,"
        if before.index not in self.ran:
            self._fail("order", f"{what} has not run")
        self._order(self.ran[before.index], "order", _NOT_AFTER, what)

    def _access(self, device: int, task: Task, use: Use, writes: bool) -> _Memory:
        """Check one argument of a task."""
        index, version = use
        region = None if task.region is None else self.graph.touched(task, index)
        if region is None:
            place = index + device + version * _VERSION if version else index + device
            block = self._use(place, self.table.get(place), None, writes)
            if not writes:
                return block
        value = self.graph.values[index]
        if region is not None:  # the versions of other regions are irrelevant
            present = self.table.latest(index + device)
            place = index + device + version * _VERSION if present is None else present
            block = self._use(place, self.table.held.get(place), region, writes)
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
        for other in () if block.accesses is None else block.accesses.writers(region):
            late = self.program.instructions[other % len(self.program)]
            if isinstance(late, Run) and self.graph.task(late.task).index > task.index:
                self._fail(
                    "presence", f"{value.name!r} was overwritten by task {late.task!r}", other
                )

    def _make(self, run: Run, place: _Place, index: int, used: Mapping[int, _Memory]) -> None:
        """Put a result into a new block, or into that of its base if it is a view."""
        made = self.graph.values[index]
        if made.root == index:
            self._new(place, run.stream, self._accesses(made))
        else:
            base = next(
                block for value, block in used.items() if self.graph.values[value].root == made.root
            )
            self.table.put(place, base, self.own)

    def _accesses(self, made: Value) -> Conflicts | None:
        """Return the accesses of a new block; None if nothing writes it after it is made."""
        if made.root not in self.rewritten:
            return None
        accesses = Conflicts()
        accesses.write(made.region, self.own)
        return accesses

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
        if is_storage(copy.destination):
            what = f"{copy.value!r} is copied to {copy.destination}, which is only read"
            self._fail("place", what)
        value = self._value(copy.value)
        index = value.index + copy.version * _VERSION
        source = index + self.devices[copy.source]
        crosses = bool(self.rank) and self._crosses(copy)
        self._use(source, self.table.get(source), None, writes=False)
        if crosses:
            assert copy.also is not None
            self.own = len(self.program) + self.at
        self._fill(copy, value, index + self.devices[copy.destination])

    def _fill(self, copy: Copy, value: Value, target: _Place) -> None:
        """Check that a copy may write its destination."""
        if (there := self.table.get(target)) is not None and not there.freed:
            self._fail("single", f"{self._named(target)} is there already")
        if copy.overwrite:
            block = self.home.get(copy.value)
            if block is None or self.inputs[copy.value] != copy.destination:
                self._fail(
                    "presence", f"{copy.value!r} is no input that lives on {copy.destination}"
                )
            self._touch(block, value.region, writes=True)
            self._empty(block, copy)
            self.table.put(target, block, self.own)
        else:
            owner: Stream | None = copy.stream
            if copy.stream.device != copy.destination:
                also = copy.also
                owner = also if also is not None and also.device == copy.destination else None
            self._new(target, owner, self._accesses(value))

    def _empty(self, block: _Memory, copy: Copy) -> None:
        """Note that a copy replaces all that a block held: a value, and views of it."""
        for index in self.graph.members(self.index[copy.value]):
            for version in range(self.graph.last_version(index) + 1):
                place = index + self.devices[copy.destination] + version * _VERSION
                if self.table.held.get(place) is block:
                    del self.table.held[place]

    def _value(self, name: str) -> Value:
        index = self.index.get(name)
        if index is not None:
            return self.graph.values[index]
        try:
            return self.graph.value(name)
        except GraphError as error:
            self._fail("presence", str(error))

    def _free(self, free: Free) -> None:
        index = self.index.get(free.value)
        place = (index or 0) + self.devices[free.stream.device] + free.version * _VERSION
        block = None if index is None else self.table.get(place)
        if block is None:
            named = _named(free.value, free.version, free.stream.device)
            self._fail("free", f"{named} is not there to be freed")
        if block.freed:
            self._fail("free", f"{self._named(place)} is freed twice")
        if block.kept:
            what = "belongs to the caller and is not to be freed"
            self._fail("free", f"{self._named(place)} {what}")
        if block.owner is not None and free.stream != block.owner:
            what = f"was allocated on {block.owner}, and only that stream may free it"
            self._fail("free", f"{self._named(place)} {what}")
        streams = self.streams
        last = {streams[use]: use for use in block.uses}
        for use in last.values():
            self._order(use, "free", _IN_USE, place)
        block.freed = True
        block.uses.clear()

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
            place = self._last(index, self.outputs[label])
            self._final(place, f"output {label!r}").kept = True
        for value in self.graph.sources:
            place = self._last(value.index, self.inputs[value.name])
            if self._final(place, f"input {value.name!r}") is not self.home[value.name]:
                self._fail(
                    "result", f"{self._named(place)} is not in the caller's memory at the end"
                )
        for block in self.blocks if self.program.in_flight == 1 else ():
            if not block.freed and not block.kept:
                self._fail("free", f"{self._named(block.place)} is never freed")

    def _last(self, index: int, device: str) -> _Place:
        return index + self.devices[device] + self.graph.last_version(index) * _VERSION

    def _final(self, place: _Place, what: str) -> _Memory:
        block = self.table.get(place)
        if block is None:
            self._fail("result", f"{what}, {self._named(place)}, is not there at the end")
        if block.freed:
            self._fail("result", f"{what}, {self._named(place)}, is freed")
        return block

    def _new(self, place: _Place, owner: Stream | None, accesses: Conflicts | None) -> _Memory:
        block = _Memory(place, owner, accesses, self.own)
        self.blocks.append(block)
        self.table.put(place, block, self.own)
        return block

    def _use(
        self, place: _Place, block: _Memory | None, region: Region | None, writes: bool
    ) -> _Memory:
        """Check a read: present, not freed, and after its writer and its maker.

        It is one of the whole value, if no region is given.
        """
        if block is None:
            self._fail("presence", f"{self._named(place)} is read but {self._missing(place)}")
        if block.freed:
            self._fail("presence", f"{self._named(place)} is read after it was freed")
        makers = self.table.makers
        maker = makers.get(place, block.maker) if makers else block.maker
        if maker != _GIVEN:
            self._order(maker, "order", _NOT_MADE, place)
        if block.accesses is None:  # nothing but its maker writes it
            block.uses.append(self.own)
        else:
            whole = self.graph.values[place % _DEVICE].region
            self._touch(block, whole if region is None else region, writes, place)
        return block

    def _touch(
        self, block: _Memory, region: Region, writes: bool, place: _Place | None = None
    ) -> None:
        """Require that an access happens after all accesses with which it conflicts."""
        assert block.accesses is not None
        block.uses.append(self.own)
        if block in self.shared:
            self.shared[block].append(Access(self.at, region, writes))
        readers: Sequence[int] = ()
        if writes:
            writers, readers = block.accesses.write(region, self.own)
        else:
            writers = block.accesses.read(region, self.own)
        for before in writers:
            self._order(before, "order", _OVERWRITES if place is None else _NOT_MADE, place)
        for before in readers:
            self._order(before, "order", _READ, place)

    def _order(self, before: int, law: str, words: str, about: _Place | str | None) -> None:
        """Require that an earlier line has ended when the current one begins."""
        if before == _GIVEN:
            return
        if len(self.line) == self.refused:
            other = before % len(self.program)
            named = self._named(about) if isinstance(about, int) else about
            what = words.format(
                about=named,
                other=in_words(self.program, other),
                writing=self._writing(),
            )
            self._fail(law, what, other)
        self.before.append(before)
        self.line.append(self.own)

    def _missing(self, place: _Place) -> str:
        present = self.table.latest(place)
        if present is not None and present > place:
            return f"was overwritten by version {present // _VERSION}"
        if present == place:
            return "a part of it was overwritten by what comes later"
        elsewhere = [name for name, number in self.devices.items() if self._at(place, number)]
        where = (
            f"it is on {elsewhere[0]}: a copy is missing" if elsewhere else "nothing made it before"
        )
        return f"not there; {where}"

    def _at(self, place: _Place, device: int) -> bool:
        """Whether a version is on a device."""
        version, where = divmod(place, _VERSION)
        return where % _DEVICE + device + version * _VERSION in self.table.held

    def _unknown(self, run: Run) -> NoReturn:
        try:
            self.graph.task(run.task)
        except GraphError as error:
            self._fail("single", str(error))
        raise AssertionError(run)

    def _writing(self) -> str:
        instruction = self.program.instructions[self.at]
        return (
            f"task {instruction.task!r} writes"
            if isinstance(instruction, Run)
            else "the copy overwrites"
        )

    def _named(self, place: _Place) -> str:
        version, where = divmod(place, _VERSION)
        number, index = divmod(where, _DEVICE)
        return _named(self.names[index], version, [*self.devices][number])

    def _fail(self, law: str, what: str, other: int | None = None) -> NoReturn:
        raise ProgramError(excerpt(self.program, self.at, law, what, other))


def _named(value: str, version: int, device: str) -> str:
    return f"{value!r}{f' (version {version})' if version else ''} on {device}"
