"""Write the instructions of a program as the body of ``step``.

Instructions are written in issue order, with a section for each run of instructions on one stream.
The writer tracks the variable that holds each version of each value on each device. One thread
issues everything, so work on a CPU stream is complete when the next line begins: events of CPU
streams need no line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autosched._lib.allowed import is_storage
from autosched.codegen.calls import Caller
from autosched.codegen.names import Names
from autosched.codegen.pieces import Piece, bracketed, laid_out, quoted
from autosched.codegen.statements import Statements, deletion
from autosched.graph.files import StoredTensor
from autosched.graph.graph import Graph, Task, Value
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied
from autosched.program.residency import Residency

__all__ = ["Body", "Globals"]


@dataclass(frozen=True)
class Globals:
    """The module's names of devices, accelerator streams and their events.

    ``earlier`` are the events of the run before, as far as a loop waits for them.
    """

    devices: Mapping[str, str]
    streams: Mapping[Stream, str]
    events: Mapping[int, str]
    earlier: Mapping[int, str]


@dataclass
class _Section:
    """Consecutive instructions of one stream, or of two for a copy between accelerators."""

    streams: tuple[Stream, ...]
    launches: bool = False
    # With the position of its call in the program, or -1.
    pieces: list[tuple[Piece, int]] = field(default_factory=list)

    def takes(self, streams: tuple[Stream, ...], launches: bool) -> bool:
        """Whether an instruction can be added to this section."""
        if self.launches and launches:
            return self.streams == streams
        return self.streams[0] == streams[0]


class Body:
    """Writes the lines of ``step``; ``sources`` are the names of inputs and constants (indices)."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        module: Globals,
        caller: Caller,
        names: Names,
        sources: Mapping[int, str],
    ):
        self.program = program
        self.graph = graph
        self.machine = machine
        self.module = module
        self.statements = Statements(caller, names)
        self.names = names
        self.sources = sources
        self.reads: dict[int, tuple[str, ...]] = {}  # names of what a call reads, by its position
        self.there: Residency[int, str] = Residency()
        self.sharing: dict[str, list[str]] = {}  # the names that share memory, by each of them
        homes = dict(program.inputs)
        for index, name in sources.items():
            self._put(index, 0, homes[graph.values[index].name], name)

    def lines(self) -> Iterator[tuple[str, int]]:
        """Yield the lines, indented, each with the position of its call in the program, or -1."""
        for section in self._sections():
            yield f"    # stream {' and '.join(map(str, section.streams))}", -1
            known = self.module.streams
            streams = [known[stream] for stream in section.streams if stream in known]
            indent = 8 if streams and section.launches else 4
            if indent == 8:
                yield f"    with {', '.join(streams)}:", -1
            for piece, position in section.pieces:
                yield " " * indent + laid_out(piece, indent), position
        yield "    " + laid_out(self._returned().prefixed("return "), 4), -1

    def _sections(self) -> list[_Section]:
        sections: list[_Section] = []
        for i, instruction in enumerate(self.program):
            pieces = list(self._pieces(i, instruction))
            if not pieces:
                continue
            streams = occupied(instruction)
            launches = isinstance(instruction, (Run, Copy))
            if not sections or not sections[-1].takes(streams, launches):
                sections.append(_Section(streams))
            section = sections[-1]
            if launches:
                section.streams = streams
                section.launches = True
            last = section.pieces[-1][0].before if section.pieces else ""
            if isinstance(instruction, Free) and last == "del ":
                pieces = [Piece("del ", section.pieces.pop()[0].items + pieces[0].items)]
            for piece in pieces:
                is_call = i in self.reads and piece.before != "del "
                section.pieces.append((piece, i if is_call else -1))
        return sections

    def _returned(self) -> Piece:
        found = []
        for label, device in self.program.outputs:
            index = self.graph.outputs[label]
            name = self._name(index, self.graph.last_version(index), device)
            found.append(Piece(f"{quoted(label)}: {name}"))
        outputs = bracketed("", "{}", found)
        if self.program.in_flight == 1 or not self.module.streams:
            return outputs
        return outputs._replace(after=f"{outputs.after}, locals()")  # the run has not ended yet

    # ---- instructions

    def _pieces(self, i: int, instruction: Any) -> Iterator[Piece]:
        streams = self.module.streams
        events = self.module.events
        match instruction:
            case Run(stream, name):
                yield from self._run(i, self.graph.task(name), stream.device)
            case Copy():
                yield from self._copy(instruction)
            case Record(stream, event) if stream in streams:
                yield Piece(f"{events[event]}.record({streams[stream]})")
            case Wait(stream, event, ago) if event in events:
                # What waits for an earlier run may wait for the run before, which follows that.
                name = self.module.earlier[event] if ago else events[event]
                waits = stream in streams
                yield Piece(
                    f"{streams[stream]}.wait_event({name})" if waits else f"{name}.synchronize()"
                )
            case Free(stream, name, version) if not is_storage(stream.device):
                index = self.graph.value(name).index
                yield deletion(self.sharing[self._name(index, version, stream.device)])

    def _copy(self, copy: Copy) -> Iterator[Piece]:
        value = self.graph.value(copy.value)
        if is_storage(copy.source):
            yield self._read(value, copy.destination)
            return
        source = self._name(value.index, copy.version, copy.source)
        one, other = (self._real(end) for end in (copy.source, copy.destination))
        ends = [self.module.streams.get(stream, "") for stream in occupied(copy)]
        # Between two devices, torch makes the streams wait for each other.
        same_device = one == other and len(ends) == 2 and all(ends)
        if same_device:
            yield Piece(f"{ends[1]}.wait_stream({ends[0]})")
        if copy.overwrite:
            home = self.sources[value.index]
            self._put(value.index, copy.version, copy.destination, home)
            yield Piece(f"{home}.copy_({source}, non_blocking=True)")
        else:
            device = self.module.devices[copy.destination]
            version = f"_v{copy.version}" if copy.version else ""
            twin = self.names.variable(f"{value.name}{version}_{device}")
            self._put(value.index, copy.version, copy.destination, twin)
            yield Piece(f"{twin} = to({source}, {device})")
        if same_device:
            yield Piece(f"{ends[0]}.wait_stream({ends[1]})")

    def _real(self, device: str) -> str:
        return self.machine.device(device).physical or device

    def _read(self, value: Value, device: str) -> Piece:
        """Return the statement that reads a value from a file to a device."""
        assert value.producer is not None
        stored = self.graph.tasks[value.producer].fn
        assert isinstance(stored, StoredTensor)
        name = self.names.variable(value.name)
        self._put(value.index, 0, device, name)
        where = quoted(stored.path), f"torch.{stored.dtype}", repr(stored.shape)
        call = [*where, str(stored.offset), str(stored.nbytes)]
        return bracketed("read", "()", list(map(Piece, call))).prefixed(f"{name} = ")

    def _run(self, i: int, task: Task, device: str) -> Iterator[Piece]:
        if isinstance(task.fn, StoredTensor):
            if not is_storage(device) and self.graph.is_used(task.result.index):
                yield self._read(task.result, device)
            self.reads[i] = ()
            return
        found: dict[int, str] = {}
        for use in task.reads:
            partly = self.graph.touched(task, use.value) is not None
            name = self.there.held(use.value, device) if partly else self._name(*use, device)
            assert name is not None
            found[use.value] = name
        self.reads[i] = tuple(found.values())
        for use in task.changes:
            self.there.change(*use, device)
        used = [use for use in task.outputs if self.graph.is_used(use.value)]
        made: dict[int, str] = {}
        spelled = self.module.devices.get(device) or 'torch.device("cpu")'
        yield from self.statements.of(task, found, made, {use.value for use in used}, spelled)
        for use in used:
            self._put(*use, device, made[use.value], self._base(use.value, found))

    def _base(self, value: int, found: Mapping[int, str]) -> str | None:
        """Return the argument that a result shares memory with."""
        root = self.graph.values[value].root
        if root == value:
            return None
        return next(name for read, name in found.items() if self.graph.values[read].root == root)

    # ---- names

    def _put(
        self, value: int, version: int, device: str, name: str, base: str | None = None
    ) -> None:
        self.there.put(value, version, device, name)
        group = self.sharing.setdefault(name, []) if base is None else self.sharing[base]
        if name not in group:
            group.append(name)
        self.sharing[name] = group

    def _name(self, value: int, version: int, device: str) -> str:
        name = self.there.get(value, version, device)
        assert name is not None, f"{self.graph.values[value].name}@{version} is not on {device}"
        return name
