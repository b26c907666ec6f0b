"""Prove that a program cannot race: walk it once with vector clocks and hold it to the laws.

    order       what touches the same memory, and tasks told to follow each other, are ordered by streams and events
    events      each is recorded once, and earlier in the list than its waits
    presence    what is read is there: made on this device, or copied to it, and not freed
    single      each task runs once, each version reaches a device once
    free        memory goes back once, on the stream that allocated it, behind all who used it; nothing is kept but
                inputs, constants and outputs
    result      outputs, and the inputs that tasks wrote, end where the program says

Derives what must be ordered from the graph by itself; shares with lowering only the clock arithmetic. One pass; time
grows with instructions times streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from autosched.clocks import Clocks, Stamp
from autosched.errors import GraphError, ProgramError
from autosched.graph import Graph, Task
from autosched.program import Copy, Free, Instruction, Program, Record, Run, Stream, Wait

__all__ = ["verify"]


class _Place(NamedTuple):
    """A version of a value on a device."""

    value: str
    version: int
    device: str

    def __str__(self) -> str:
        return f"{self.value!r}{f' (version {self.version})' if self.version else ''} on {self.device}"


class _Access(NamedTuple):
    stamp: Stamp
    position: int  # in the program; -1 for what was there from the start
    verb: str


@dataclass(eq=False)
class _Memory:
    """A block: who wrote it last, who read it since, who may free it."""

    owners: tuple[Stream, ...]  # empty where any stream of the device may free it
    version: int
    write: _Access
    reads: list[_Access] = field(default_factory=list)
    uses: dict[int, _Access] = field(default_factory=dict)  # the last of each stream
    freed: int | None = None
    kept: bool = False  # inputs, constants and outputs stay


_START = _Access(Stamp(0, 0), -1, "given")


def verify(program: Program, graph: Graph) -> None:
    """Raise ProgramError if some legal interleaving of the program could differ from the serial run.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> x = graph.input("x")
    >>> graph.output(y=x + 1)
    >>> asc.verify(asc.Program.parse("input x on cpu"), graph)
    Traceback (most recent call last):
    autosched.errors.ProgramError: task 'add' never runs
    """
    _Verifier(program, graph).run()


class _Verifier:
    def __init__(self, program: Program, graph: Graph):
        self.program = program
        self.graph = graph
        self.clocks = Clocks(program.streams)
        self.names = [value.name for value in graph.values]
        self.inputs = dict(program.inputs)
        self.outputs = dict(program.outputs)
        self.at = -1
        self.memory: dict[_Place, _Memory] = {}
        self.maker: dict[_Place, _Access] = {}  # what put the value there: of a view, not who wrote its memory
        self.blocks: dict[_Place, _Memory] = {}  # under the name with which each was made
        self.home: dict[str, _Memory] = {}
        self.ran: dict[int, _Access] = {}

    def run(self) -> None:
        self._inputs()
        for at, instruction in enumerate(self.program.instructions):
            self.at = at
            match instruction:
                case Run():
                    self._run(instruction)
                case Copy():
                    self._copy(instruction)
                case Record(_, event):
                    if event in self.clocks.events:
                        self._fail("events", f"event e{event} is recorded twice")
                    self.clocks.record(instruction)
                case Wait(_, event):
                    if event not in self.clocks.events:
                        self._fail("events", f"event e{event} is waited for but not recorded before")
                    self.clocks.wait(instruction)
                case Free():
                    self._free(instruction)
        self._end()

    # ---- the laws, an instruction at a time

    def _inputs(self) -> None:
        found, names = sorted(name for name, _ in self.program.inputs), sorted(v.name for v in self.graph.sources)
        if found != names:
            self._fail("result", f"the program's inputs are {found}, the graph's {names}")
        for name, device in self.program.inputs:
            self.home[name] = self._new(_Place(name, 0, device), (), _START)
            self.home[name].kept = True

    def _run(self, run: Run) -> None:
        task = self._task(run)
        if task.index in self.ran:
            self._fail("single", f"task {task.name!r} runs twice")
        done = _Access(self.clocks.advance(run), self.at, f"task {task.name!r}")
        for dependency in task.dependencies:
            before = self.graph.tasks[dependency.task]
            if dependency.kind == "order":
                self._ordered(
                    run, self.ran.get(before.index), f"task {before.name!r}, after which {task.name!r} must run,"
                )
        device = run.stream.device
        read = {use: self._use(run, done, _Place(self.names[use.value], use.version, device)) for use in task.reads}
        written = {id(read[use]): read[use] for use in task.writes}
        for block in read.values():
            if id(block) not in written:
                block.reads.append(done)
        for block in written.values():
            self._write(run, done, block, f"task {task.name!r} writes")
        for use in task.writes:
            for member in self.graph.members(use.value):
                self._carry(_Place(self.names[member], use.version, device))
        for use in task.outputs:
            value, place = self.graph.values[use.value], _Place(self.names[use.value], use.version, device)
            bases = [read[use] for use in task.reads if self.graph.values[use.value].root == value.root]
            if not self.graph.is_used(value.index):
                continue
            if value.root == value.index:
                self._new(place, (run.stream,), done).uses[done.stamp.stream] = done
            else:
                self.memory[place], self.maker[place] = bases[0], done
        self.ran[task.index] = done

    def _copy(self, copy: Copy) -> None:
        source = _Place(copy.value, copy.version, copy.source)
        target = _Place(copy.value, copy.version, copy.destination)
        if copy.source == copy.destination or copy.stream.device not in (copy.source, copy.destination):
            self._fail("presence", f"a copy from {copy.source} to {copy.destination} is on a stream of one of the two")
        done = _Access(self.clocks.advance(copy), self.at, f"the copy of {copy.value!r} to {copy.destination}")
        self._use(copy, done, source).reads.append(done)
        if target in self.memory:
            self._fail("single", f"{target} is there already")
        if copy.overwrite:
            block = self.home.get(copy.value)
            if block is None or self.inputs[copy.value] != copy.destination:
                self._fail("presence", f"{copy.value!r} is no input that lives on {copy.destination}")
            self._write(copy, done, block, "the copy overwrites")
            self.memory[target], self.maker[target], block.version = block, done, copy.version
            block.uses[done.stamp.stream] = done
            return
        owner = next((s for s in (copy.stream, copy.also) if s is not None and s.device == copy.destination), None)
        self._new(target, (owner,) if owner else (), done).uses[done.stamp.stream] = done

    def _free(self, free: Free) -> None:
        place = _Place(free.value, free.version, free.stream.device)
        block = self.memory.get(place)
        if block is None or block.version != place.version:
            self._fail("free", f"{place} is not there to be freed")
        if block.freed is not None:
            self._fail("free", f"{place} is freed twice")
        if block.kept:
            self._fail("free", f"{place} belongs to the caller and is not to be freed")
        if block.owners and free.stream not in block.owners:
            self._fail("free", f"{place} was allocated on {block.owners[0]}, and only that stream may free it")
        for access in block.uses.values():
            if not self.clocks.passed(access.stamp, free.stream):
                self._fail("free", f"{place} is freed while {access.verb} may still use it", access)
        block.freed = self.at

    def _end(self) -> None:
        self.at = len(self.program)
        for task in self.graph.tasks:
            if task.index not in self.ran:
                self._fail("single", f"task {task.name!r} never runs")
        found, labels = sorted(label for label, _ in self.program.outputs), sorted(self.graph.outputs)
        if found != labels:
            self._fail("result", f"the program's outputs are {found}, the graph's {labels}")
        for label, index in self.graph.outputs.items():
            place = _Place(self.names[index], self.graph.last_version(index), self.outputs[label])
            self._final(place, f"output {label!r}").kept = True
        for value in self.graph.sources:
            place = _Place(value.name, self.graph.last_version(value.index), self.inputs[value.name])
            if self._final(place, f"input {value.name!r}") is not self.home[value.name]:
                self._fail("result", f"{place} is not in the caller's memory at the end")
        for place, block in self.blocks.items():
            if block.freed is None and not block.kept:
                self._fail("free", f"{place} is never freed")

    def _final(self, place: _Place, what: str) -> _Memory:
        block = self.memory.get(place)
        if block is None:
            self._fail("result", f"{what}, {place}, is not there at the end")
        if block.freed is not None:
            self._fail("result", f"{what}, {place}, is freed")
        return block

    # ---- memory

    def _new(self, place: _Place, owners: tuple[Stream, ...], made: _Access) -> _Memory:
        self.memory[place] = self.blocks[place] = block = _Memory(owners, place.version, made)
        self.maker[place] = made
        return block

    def _use(self, instruction: Run | Copy, access: _Access, place: _Place) -> _Memory:
        """Hold a read to the laws: there, not freed, and behind whoever wrote it and put it there."""
        block = self.memory.get(place)
        if block is None:
            elsewhere = [p.device for p in self.memory if (p.value, p.version) == (place.value, place.version)]
            hint = f"it is on {elsewhere[0]}: a copy is missing" if elsewhere else "nothing made it before"
            self._fail("presence", f"{place} is read but not there; {hint}")
        if block.freed is not None:
            self._fail("presence", f"{place} is read after it was freed")
        if block.version != place.version:
            self._fail("presence", f"{place} is read but was overwritten by version {block.version}")
        self._ordered(instruction, block.write, f"{place} is made by {block.write.verb}, which")
        self._ordered(instruction, self.maker[place], f"{place} is made by {self.maker[place].verb}, which")
        block.uses[access.stamp.stream] = access
        return block

    def _write(self, instruction: Run | Copy, access: _Access, block: _Memory, what: str) -> None:
        self._ordered(instruction, block.write, f"{what} memory that {block.write.verb} wrote, which")
        for read in block.reads:
            self._ordered(instruction, read, f"{what} memory that {read.verb} reads, which")
        block.write, block.reads, block.version = access, [], block.version + 1

    def _carry(self, place: _Place) -> None:
        """Let a value that shares written memory go on as its next version."""
        if place in self.memory:
            later = place._replace(version=place.version + 1)
            self.memory[later], self.maker[later] = self.memory.pop(place), self.maker.pop(place)

    def _ordered(self, instruction: Run | Copy, before: _Access | None, what: str) -> None:
        """Require that an earlier access has surely ended. The clocks already contain the instruction itself."""
        if before is None:
            self._fail("order", f"{what} has not run")
        if before.position >= 0 and not self.clocks.seen(before.stamp, instruction):
            self._fail("order", f"{what} is not waited for", before)

    # ---- telling

    def _task(self, run: Run) -> Task:
        try:
            return self.graph.task(run.task)
        except GraphError as error:
            self._fail("single", str(error))

    def _fail(self, law: str, what: str, other: _Access | None = None) -> NoReturn:
        raise ProgramError(_shown(self.program, self.at, law, what, other.position if other else None))


def _shown(program: Program, at: int, law: str, what: str, other: int | None, around: int = 3) -> str:
    """Return a message with the program around the fault, an arrow, and the other side of the conflict."""
    instructions: tuple[Instruction, ...] = program.instructions
    if not 0 <= at < len(instructions):
        return what
    width = max(len(str(i.stream)) for i in instructions)
    shown = [i for i in range(len(instructions)) if abs(i - at) <= around or i == other]
    lines: list[str] = []
    for before, i in zip([None, *shown], shown, strict=False):
        lines += ["    ..."] if before is not None and i != before + 1 else []
        mark = "    <-- here" if i == at else "    <-- not waited for" if i == other else ""
        lines.append(f"    {instructions[i].stream!s:<{width}}  {instructions[i]}{mark}")
    return f"{what} (law: {law})\n\n" + "\n".join(lines)
