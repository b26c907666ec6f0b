"""Write programs as Python: what is shown to people, and the functions that threads execute.

    calls       a task as a line; its parts, and regions, as lines
    slots       the values of a program, which get variables; each instruction as lines
    threads     functions of threads, with the instruction that each line belongs to
    composite   merged tasks, which are functions of their parts
    functions   how a line refers to a function: import, parameter; or bound to a name

``generate`` writes source that people read, keep and run without this package. One class writes the
instructions of a program for both: ``slots.Writer``. Where the runtime calls what a backend returns,
the source has torch's streams, events between them, non-blocking copies, and ``del`` where the
program frees memory.

One thread issues everything, so that the source can be read from top to bottom. A CPU task
therefore delays what is issued after it; results are the same. Knows no times. Generating source
inspects the loaded modules to find the definitions of functions, and runs no user code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from textwrap import fill
from typing import Any

from autosched._lib.allowed import is_storage
from autosched._lib.text import count, duration
from autosched.codegen.calls import Statements, call_of, is_region, region_text
from autosched.codegen.functions import Functions, Names, identifier, quoted
from autosched.codegen.slots import Slots, Writer
from autosched.errors import MachineError, ScheduleError
from autosched.graph.files import StoredTensor
from autosched.graph.graph import Graph, Value
from autosched.graph.task import Here, Task
from autosched.machine.machine import Machine
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
    occupied,
)

__all__ = ["Code", "generate"]

_FREED = (
    "A tensor is deleted where the stream that made it is behind all that used it: "
    "its memory is free again there."
)
_WIDTH = 120  # columns of the docstring; statements have a line each
_USED_IN_STEP = "complex float range slice to torch".split()


class Code(str):
    """Generated source.

    ``given`` has the objects that cannot be written as source, by the keyword parameter of ``step``
    that takes them.
    """

    given: Mapping[str, Any]


def generate(
    program: Program, graph: Graph, machine: Machine, seconds: float | None = None
) -> Code:
    r"""Write a program of one run as a module with a function ``step`` from inputs to outputs by name.

    ``seconds`` is the predicted duration of a run. Raises ScheduleError for tasks without
    functions, and MachineError for machines whose copies have no streams.

    >>> import autosched as asc
    >>> graph = asc.Graph("twice")
    >>> graph.output(y=graph.input("x") * 2)
    >>> program = asc.schedule(graph, asc.Machine.emulated(gpus=0)).program
    >>> print("\n".join(generate(program, graph, asc.Machine.emulated(gpus=0)).splitlines()[-3:]))
        # stream cpu/compute
        mul = x * 2
        return {"y": mul}
    """
    for task in graph.tasks:
        if task.fn is None:
            raise ScheduleError(
                f"task {task.name!r} has no function: it can be planned, not written as code"
            )
    if not machine.contention and any(
        machine.device(stream.device).is_accelerator for stream in program.streams
    ):
        raise MachineError(
            "a machine without contention is for planning: copies of real devices need copy streams"
        )
    return _Source(program, graph, machine).code(seconds)


class _Source(Writer):
    """Writes a program as a module; one thread issues everything, in the order of the program."""

    def __init__(self, program: Program, graph: Graph, machine: Machine):
        names = Names(module=_HELPERS, both=_USED_IN_STEP)
        self.functions = Functions(names)
        slots = Slots(program, graph)
        super().__init__(program, graph, slots, Statements(self.functions, names.variable))
        self.machine = machine
        inputs = [value for value in graph.sources if value.tensor is None]
        self.inputs = {value.name: names.parameter(value.name) for value in inputs}
        # The module's names of devices, accelerator streams and their events.
        copies = [i for i in program if isinstance(i, Copy) and not is_storage(i.source)]
        streams = [stream for stream in program.streams if not self._is_cpu(stream.device)]
        used = {stream.device for stream in streams}
        used |= {copy.destination for copy in copies if not copy.overwrite}
        self.devices = {
            name: names.shared(identifier(name.replace(":", "")))
            for name in machine.names
            if name in used
        }
        streams.sort(key=lambda stream: machine.names.index(stream.device))
        self.streams = {
            stream: names.shared(f"{self.devices[stream.device]}_{stream.name}")
            for stream in streams
        }
        recorded = [i for i in program if isinstance(i, Record) and i.stream in self.streams]
        self.events = {i.event: names.shared(f"e{i.event}") for i in recorded}
        self.preamble = list(self._preamble(recorded, copies))
        for task in filter(is_region, graph.tasks):
            write = partial(region_text, task, functions=self.functions, names=names)
            self.functions.define(task.fn, task.name, write)
        # Names in calls precede names of values.
        for task in (each for top in graph.tasks for each in _called(top)):
            if not isinstance(task.fn, StoredTensor):
                call_of(self.functions, task, lambda _: "_", lambda _: "_")
        given = {
            value.name: self.functions.give(value.tensor, value.name)
            for value in graph.sources
            if value.tensor is not None
        }
        # The variables of slots.
        self.at = {slot: (self.inputs | given)[name] for name, slot in self.slots.homes.items()}

    def code(self, seconds: float | None) -> Code:
        """Return the source; ``seconds`` are predicted."""
        lines = list(self._lines())
        preamble = "".join(self.preamble)
        used = [name for name in ("copy", "functools", "threading") if f"{name}." in preamble]
        imports = [*self.functions.imports, *(f"import {name}" for name in ("torch", *used))]
        given = ["*", *self.functions.given] if self.functions.given else []
        head = [
            "@torch.no_grad()",
            *(["@ordered_with_caller"] if self.streams else []),
            f"def step({', '.join([*self.inputs.values(), *given])}):",
            '    """Run once; return the outputs by name."""',
        ]
        parts = [
            "\n".join(self._docstring(seconds)) + "\n",
            _imports(imports),
            *self.preamble,
            *self.functions.texts,
            "\n".join([*head, *lines]) + "\n",
        ]
        code = Code(_spaced(parts))
        code.given = dict(self.functions.given)
        return code

    def _docstring(self, seconds: float | None) -> Iterator[str]:
        used = {stream.device for stream in self.program.streams}
        devices = [name for name in self.machine.names if name in used]
        about = "" if seconds is None else f", {duration(seconds)} predicted"
        where = ", ".join(devices) or "no device"
        tasks = count(len(self.graph), "task").replace(",", "")
        first = f"{self.graph.name}: {tasks} on {where}{about}. Written by autosched."
        notes = [_FREED] if self.streams else []
        notes += [
            f"Parameter {name} is input {quoted(own)} of the graph."
            for own, name in self.inputs.items()
            if name != own
        ]
        notes += [
            f"Parameter {name} takes what no text can hold: {_described(item)}."
            for name, item in self.functions.given.items()
        ]
        yield fill('"""' + _escaped(first) + ('"""' if not notes else ""), _WIDTH)
        if notes:
            yield ""
            yield from (fill(_escaped(note), _WIDTH, subsequent_indent="    ") for note in notes)
            yield '"""'

    # ---- what precedes `step`

    def _preamble(self, recorded: Sequence[Record], copies: Sequence[Copy]) -> Iterator[str]:
        """Yield parts, each of whole lines."""
        if self.devices:
            yield "\n".join(self._device_lines()) + "\n"
        if self.streams:
            real = [name for device, name in self.devices.items() if not self._is_cpu(device)]
            yield _IDLE
            yield _STREAMS.replace("{real}", ", ".join(real) + ("," if len(real) == 1 else ""))
            yield "\n".join(self._stream_lines(recorded, copies)) + "\n"
            yield _ORDERED
        if any(not copy.overwrite for copy in copies):
            yield _TO
        if any(isinstance(task.fn, StoredTensor) for task in self.graph.tasks):
            pinned = "torch.accelerator.is_available()" if self.streams else "False"
            yield _READ.replace("{pinned}", pinned)

    def _device_lines(self) -> Iterator[str]:
        if self.streams:
            hint = 'To run this without accelerators, make each of them "cpu": streams do nothing then.'
            yield f"# The devices. {hint}"
        for device, name in self.devices.items():
            yield f'{name} = torch.device("{"cpu" if self._is_cpu(device) else self._real(device)}")'

    def _stream_lines(self, recorded: Sequence[Record], copies: Sequence[Copy]) -> Iterator[str]:
        for stream, name in self.streams.items():
            yield f"{name} = Stream({self.devices[stream.device]})"
        for i in recorded:
            yield f"{self.events[i.event]} = Event({self.devices[i.stream.device]})"
        yield f"streams = [{', '.join(self.streams.values())}]"
        hosts = {c.stream for c in copies if self._is_cpu(c.source) or self._is_cpu(c.destination)}
        host = [name for stream, name in self.streams.items() if stream in hosts]
        yield f"host_streams = [{', '.join(host)}]  # copy from or to host memory"

    def _is_cpu(self, device: str) -> bool:
        return not self.machine.device(device).is_accelerator

    # ---- the body of `step`

    def _lines(self) -> Iterator[str]:
        """Yield the lines, indented, with a section for each run of instructions on one stream."""
        for section in self._sections():
            yield f"    # stream {' and '.join(map(str, section.streams))}"
            known = self.streams
            streams = [known[stream] for stream in section.streams if stream in known]
            indent = 8 if streams and section.launches else 4
            if indent == 8:
                yield f"    with {', '.join(streams)}:"
            yield from (" " * indent + line for line in section.lines)
        found = [f"{quoted(label)}: {self.at[slot]}" for label, slot in self.slots.outputs_at]
        yield f"    return {{{', '.join(found)}}}"

    def _sections(self) -> list[_Section]:
        sections: list[_Section] = []
        for i, instruction in enumerate(self.program):
            lines = list(self.texts(i, self.at))
            if not lines:
                continue
            streams = occupied(instruction)
            launches = isinstance(instruction, (Run, Copy))
            if not sections or not sections[-1].takes(streams, launches):
                sections.append(_Section(streams))
            section = sections[-1]
            if launches:
                section.streams = streams
                section.launches = True
            last = section.lines[-1] if section.lines else ""
            if isinstance(instruction, Free) and last.startswith("del "):
                lines = [f"{section.lines.pop()}, {lines[0].removeprefix('del ')}"]
            section.lines += lines
        return sections

    # ---- instructions

    def run(self, i: int, task: Task, device: str, names: dict[int, str]) -> Iterator[str]:
        """Yield the statements of a task; what reads a file is written as such."""
        if not isinstance(task.fn, StoredTensor):
            yield from super().run(i, task, device, names)
        elif (slot := self.slots.made[i][0]) is not None:
            yield self._read(task.result, slot, names)

    def place(self, leaf: Here, device: str) -> str:
        """Return the name of a device of the module."""
        return self.devices.get(device) or 'torch.device("cpu")'

    def event(self, event: Record | Wait) -> Iterator[str]:
        """Yield a record or a wait; work of CPU streams has ended when the next line begins."""
        stream = self.streams.get(event.stream)
        name = self.events.get(event.event)
        if isinstance(event, Record) and stream is not None:
            yield f"{name}.record({stream})"
        elif isinstance(event, Wait) and name is not None:
            yield f"{name}.synchronize()" if stream is None else f"{stream}.wait_event({name})"

    def free(self, stream: Stream, names: Sequence[str]) -> Iterator[str]:
        """Yield the deletion of variables."""
        if names:  # what is on storage has none
            yield f"del {', '.join(dict.fromkeys(names))}"

    def copy(self, i: int, copy: Copy | Send | Receive, names: dict[int, str]) -> Iterator[str]:
        """Yield a copy on the current streams, or a read of a file."""
        assert isinstance(copy, Copy), "a program of all ranks has no halves of copies"
        value = self.graph.value(copy.value)
        (made,) = self.slots.made[i]
        assert made is not None
        if is_storage(copy.source):
            yield self._read(value, made, names)
            return
        source = names[self.slots.reads[i][0]]
        one, other = (self._real(end) for end in (copy.source, copy.destination))
        ends = [self.streams.get(stream, "") for stream in occupied(copy)]
        # Between two devices, torch makes the streams wait for each other.
        same_device = one == other and len(ends) == 2 and all(ends)
        if same_device:
            yield f"{ends[1]}.wait_stream({ends[0]})"
        if copy.overwrite:
            yield f"{names[made]}.copy_({source}, non_blocking=True)"
        else:
            device = self.devices[copy.destination]
            version = f"_v{copy.version}" if copy.version else ""
            names[made] = self.statements.variable(f"{value.name}{version}_{device}")
            yield f"{names[made]} = to({source}, {device})"
        if same_device:
            yield f"{ends[0]}.wait_stream({ends[1]})"

    def _real(self, device: str) -> str:
        return self.machine.device(device).physical or device

    def _read(self, value: Value, slot: int, names: dict[int, str]) -> str:
        """Return the statement that reads a value from a file into a slot."""
        assert value.producer is not None
        stored = self.graph.tasks[value.producer].fn
        assert isinstance(stored, StoredTensor)
        names[slot] = self.statements.variable(value.name)
        where = quoted(stored.path), f"torch.{stored.dtype}", repr(stored.shape)
        call = [*where, str(stored.offset), str(stored.nbytes)]
        return f"{names[slot]} = read({', '.join(call)})"


@dataclass
class _Section:
    """Consecutive instructions of one stream, or of two for a copy between accelerators."""

    streams: tuple[Stream, ...]
    launches: bool = False
    lines: list[str] = field(default_factory=list)

    def takes(self, streams: tuple[Stream, ...], launches: bool) -> bool:
        """Whether an instruction can be added to this section."""
        if self.launches and launches:
            return self.streams == streams
        return self.streams[0] == streams[0]


def _called(task: Task) -> Iterator[Task]:
    """Yield a task, or the parts of a merged one that is no region."""
    if not task.parts or is_region(task):
        yield task
        return
    for part in task.parts:
        yield from _called(part)


def _imports(lines: list[str]) -> str:
    """Return import lines in the usual order: the standard library first."""
    ordered = sorted(set(lines), key=lambda line: (line.startswith("from"), line))
    own = [line for line in ordered if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in ordered if line not in own]
    return "\n\n".join("\n".join(group) for group in (own, others) if group) + "\n"


def _spaced(parts: list[str]) -> str:
    """Join parts: two empty lines around definitions, one between other parts."""
    text = parts[0]
    for before, part in pairwise(parts):
        heads = (other.lstrip("\n") for other in (before, part))
        defines = any(head.startswith(("class ", "def ", "@")) for head in heads)
        text += ("\n\n" if defines else "\n") + part.lstrip("\n")
    return text


def _described(item: Any) -> str:
    if hasattr(item, "dtype") and hasattr(item, "shape"):
        return f"a tensor, {str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
    kind = type(item).__name__
    name = getattr(item, "__name__", None)
    return f"{kind} {name}" if isinstance(name, str) else f"an object, {kind}"


def _escaped(text: str) -> str:
    """Return text escaped for a docstring."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


# ---- helpers

_HELPERS = [
    *"Event Idle Stream ordered_with_caller copy current_stream".split(),
    *"functools host_streams read step streams threading".split(),
]

_IDLE = '''
class Idle:
    """A stream or an event of the CPU, where all happens at once and nothing has to wait."""

    def __init__(self, device):
        self.device = device

    def nothing(self, *_):
        """Do nothing."""

    __enter__ = __exit__ = record = synchronize = wait_event = wait_stream = nothing
'''

_STREAMS = """
Stream, Event, current_stream = torch.Stream, torch.Event, torch.accelerator.current_stream
if all(device.type == "cpu" for device in ({real})):
    Stream = Event = current_stream = Idle
"""

_ORDERED = '''
def ordered_with_caller(step):
    """Run step after the earlier work of the caller's streams; make their later work wait for it.

    The memory of outputs is not reused before the caller's streams have finished with it. One
    thread runs at a time, because a stream knows only one stream to go back to after ``with``.
    """
    lock = threading.Lock()

    @functools.wraps(step)
    def call(*inputs, **given):
        with lock:
            return ordered(*inputs, **given)

    def ordered(*inputs, **given):
        callers = [current_stream(stream.device) for stream in streams]
        for stream, caller in zip(streams, callers, strict=True):
            stream.wait_stream(caller)
        try:
            outputs = step(*inputs, **given)
        finally:
            for stream, caller in zip(streams, callers, strict=True):
                caller.wait_stream(stream)
            for stream in host_streams:
                stream.synchronize()
        for output in outputs.values():
            if isinstance(output, torch.Tensor) and output.device.type != "cpu":
                output.record_stream(current_stream(output.device))
        return outputs

    return call
'''

_TO = '''
def to(value, device):
    """Copy the tensors of a tree on the current stream; to the CPU, into page-locked memory."""
    if isinstance(value, torch.Tensor):
        twin = value.detach().to(device, non_blocking=True, copy=True)
        return twin.requires_grad_() if value.requires_grad and value.is_leaf else twin
    if isinstance(value, dict):
        return {key: to(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value)
'''

_READ = '''
def read(path, dtype, shape, offset, nbytes):
    """Read a tensor from a file, into page-locked memory where there are accelerators."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory={pinned})
    left = memory.numpy().data
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left:
            count = file.readinto(left)
            if not count:
                raise EOFError(f"{path} ended while it was read")
            left = left[count:]
    return memory.view(dtype).view(shape)
'''
