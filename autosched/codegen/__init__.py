"""Write programs as Python: what is shown to people, and the functions that threads execute.

    slots       the values of a program, which get variables
    calls       a task as a line; its parts, and regions, as lines
    threads     functions of threads, with the instruction that each line belongs to
    composite   merged tasks, which are functions of their parts
    names       identifiers for the names that users chose
    origins     where a function is defined
    functions   how a line refers to a function: import, copied source, parameter; or bound to a name

``generate`` writes source that people read, keep and run without this package. It does what the
backend ``accelerator`` does: it uses the same streams, events between them, non-blocking copies,
and ``del`` where the program frees memory. Its statements are those that the runtime executes.

One thread issues everything, so that the source can be read from top to bottom. A CPU task
therefore delays what is issued after it; results are the same. Knows no times. Generating source
inspects the loaded modules to find the definitions of functions, and runs no user code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from textwrap import fill
from typing import Any

from autosched._lib.allowed import is_storage
from autosched._lib.text import count, duration, file_name
from autosched.codegen.calls import Statements, call_of, is_region, region_text
from autosched.codegen.functions import Functions, quoted
from autosched.codegen.names import Names, identifier
from autosched.codegen.slots import Slots
from autosched.errors import MachineError, ScheduleError
from autosched.graph.files import StoredTensor
from autosched.graph.graph import Graph, Value
from autosched.graph.task import Task
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait, occupied

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
    return _Writer(program, graph, machine).code(seconds)


class _Writer:
    def __init__(self, program: Program, graph: Graph, machine: Machine):
        self.program = program
        self.graph = graph
        self.machine = machine
        names = Names(module=_HELPERS, both=_USED_IN_STEP)
        self.functions = Functions(names)
        inputs = [value for value in graph.sources if value.tensor is None]
        self.inputs = {value.index: names.parameter(value.name) for value in inputs}
        self.module = _name_globals(program, machine, names)
        reads = any(isinstance(task.fn, StoredTensor) for task in graph.tasks)
        self.preamble = list(_preamble(program, machine, self.module, reads))
        for task in filter(is_region, graph.tasks):
            write = partial(region_text, task, functions=self.functions, names=names)
            self.functions.define(task.fn, task.name, write)
        self.tasks = {task.name: task for top in graph.tasks for task in _called(top)}
        for task in self.tasks.values():  # names in calls precede names of values
            if not isinstance(task.fn, StoredTensor):
                call_of(self.functions, task, lambda _: "_", lambda _: "_")
        constants = {
            value.index: self.functions.give(value.tensor, value.name, "")
            for value in graph.sources
            if value.tensor is not None
        }
        self.body = _Body(
            program, graph, machine, self.module, self.functions, names, self.inputs | constants
        )

    def code(self, seconds: float | None) -> Code:
        lines = list(self.body.lines())
        parts = [
            "\n".join(self._docstring(seconds)) + "\n",
            _imports([*self.functions.imports, "import torch", *self._helpers()]),
            *self.preamble,
            *self.functions.texts,
            "\n".join([*self._head(), *lines]) + "\n",
        ]
        code = Code(_spaced(parts))
        code.given = dict(self.functions.given)
        return code

    def _helpers(self) -> Iterator[str]:
        texts = "".join(self.preamble)
        modules = "copy", "functools", "threading"
        yield from (f"import {name}" for name in modules if f"{name}." in texts)

    def _docstring(self, seconds: float | None) -> Iterator[str]:
        used = {stream.device for stream in self.program.streams}
        devices = [name for name in self.machine.names if name in used]
        about = "" if seconds is None else f", {duration(seconds)} predicted"
        where = ", ".join(devices) or "no device"
        tasks = count(len(self.graph), "task").replace(",", "")
        first = f"{self.graph.name}: {tasks} on {where}{about}. Written by autosched."
        notes = [_FREED] if self.module.streams else []
        notes += [*self._renamed(), *self._needed()]
        yield fill('"""' + _escaped(first) + ('"""' if not notes else ""), _WIDTH)
        if notes:
            yield ""
            yield from (fill(_escaped(note), _WIDTH, subsequent_indent="    ") for note in notes)
            yield '"""'

    def _renamed(self) -> Iterator[str]:
        for index, name in self.inputs.items():
            own = self.graph.values[index].name
            if name != own:
                yield f"Parameter {name} is input {quoted(own)} of the graph."

    def _needed(self) -> Iterator[str]:
        for name, item in self.functions.given.items():
            user = self.functions.uses[name]
            where = file_name(self.tasks[user].source) if user else ""
            used = f", for task {user}, added at {where}" if user else ""
            yield f"Parameter {name} takes what no text can hold: {_described(item)}{used}."

    def _head(self) -> Iterator[str]:
        yield "@torch.no_grad()"
        if self.module.streams:
            yield "@ordered_with_caller"
        given = ["*", *self.functions.given] if self.functions.given else []
        yield f"def step({', '.join([*self.inputs.values(), *given])}):"
        yield '    """Run once; return the outputs by name."""'


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


# ---- what precedes `step`: devices, streams, events and helpers

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
if {idle}:
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


def _name_globals(program: Program, machine: Machine, names: Names) -> _Globals:
    """Take the names of streams, of devices with streams, and of devices that are copied to."""
    copies = [i for i in program if isinstance(i, Copy) and not is_storage(i.source)]
    used = {stream.device for stream in program.streams if not _is_cpu(machine, stream.device)}
    used |= {copy.destination for copy in copies if not copy.overwrite}
    devices = {
        name: names.shared(identifier(name.replace(":", "")))
        for name in machine.names
        if name in used
    }
    streams = [stream for stream in program.streams if not _is_cpu(machine, stream.device)]
    ordered = sorted(streams, key=lambda stream: machine.names.index(stream.device))
    recorded = [i.event for i in program if isinstance(i, Record) and i.stream in streams]
    return _Globals(
        devices,
        {stream: names.shared(f"{devices[stream.device]}_{stream.name}") for stream in ordered},
        {event: names.shared(f"e{event}") for event in recorded},
    )


def _preamble(program: Program, machine: Machine, module: _Globals, reads: bool) -> Iterator[str]:
    """Yield the parts of the preamble, each of whole lines; ``reads``: tasks read files."""
    if module.devices:
        yield "\n".join(_devices(machine, module)) + "\n"
    if module.streams:
        yield _IDLE
        yield _STREAMS.replace("{idle}", _idle(machine, module))
        yield "\n".join(_streams(program, machine, module)) + "\n"
        yield _ORDERED
    if any(isinstance(i, Copy) and not i.overwrite and not is_storage(i.source) for i in program):
        yield _TO
    if reads:
        pinned = "torch.accelerator.is_available()" if module.streams else "False"
        yield _READ.replace("{pinned}", pinned)


def _devices(machine: Machine, module: _Globals) -> Iterator[str]:
    if module.streams:
        hint = 'To run this without accelerators, make each of them "cpu": streams do nothing then.'
        yield f"# The devices. {hint}"
    for device, name in module.devices.items():
        real = "cpu" if _is_cpu(machine, device) else machine.device(device).physical or device
        yield f'{name} = torch.device("{real}")'


def _idle(machine: Machine, module: _Globals) -> str:
    """Return the condition that some stream is not real; then copies would race."""
    names = [name for device, name in module.devices.items() if not _is_cpu(machine, device)]
    if len(names) == 1:
        return f'{names[0]}.type == "cpu"'
    return f'all(device.type == "cpu" for device in ({", ".join(names)}))'


def _streams(program: Program, machine: Machine, module: _Globals) -> Iterator[str]:
    for stream, name in module.streams.items():
        yield f"{name} = Stream({module.devices[stream.device]})"
    of_device: dict[str, list[str]] = {}
    for i in program:
        if isinstance(i, Record) and i.stream in module.streams:
            names = of_device.setdefault(module.devices[i.stream.device], [])
            names.append(module.events[i.event])
    for device, events in of_device.items():
        made = f"Event({device})"
        if len(events) > 1:
            made = f"({made} for _ in range({len(events)}))"
        yield f"{', '.join(events)} = {made}"
    yield f"streams = [{', '.join(module.streams.values())}]"
    host = _host_streams(program, machine, module)
    yield f"host_streams = [{', '.join(host)}]  # copy from or to host memory"


def _host_streams(program: Program, machine: Machine, module: _Globals) -> list[str]:
    found = {
        copy.stream
        for copy in program
        if isinstance(copy, Copy)
        and (_is_cpu(machine, copy.source) or _is_cpu(machine, copy.destination))
    }
    return [name for stream, name in module.streams.items() if stream in found]


def _is_cpu(machine: Machine, device: str) -> bool:
    return not machine.device(device).is_accelerator


# ---- the body of `step`


@dataclass(frozen=True)
class _Globals:
    """The module's names of devices, accelerator streams and their events."""

    devices: Mapping[str, str]
    streams: Mapping[Stream, str]
    events: Mapping[int, str]


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


class _Body:
    """Writes the lines of ``step``; ``sources`` are the names of inputs and constants (indices).

    Instructions are written in issue order, with a section for each run of instructions on one
    stream. ``at`` is the variable of each slot. One thread issues everything, so work on a CPU
    stream is complete when the next line begins: events of CPU streams need no line.
    """

    def __init__(
        self,
        program: Program,
        graph: Graph,
        machine: Machine,
        module: _Globals,
        functions: Functions,
        names: Names,
        sources: Mapping[int, str],
    ):
        self.program = program
        self.graph = graph
        self.machine = machine
        self.module = module
        self.statements = Statements(functions, names.variable)
        self.names = names
        self.slots = Slots(program, graph)
        own = {graph.values[index].name: text for index, text in sources.items()}
        self.at = {slot: own[name] for name, slot in self.slots.homes.items()}

    def lines(self) -> Iterator[str]:
        """Yield the lines, indented."""
        for section in self._sections():
            yield f"    # stream {' and '.join(map(str, section.streams))}"
            known = self.module.streams
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
            lines = list(self._lines(i, instruction))
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

    def _lines(self, i: int, instruction: Any) -> Iterator[str]:
        streams = self.module.streams
        events = self.module.events
        match instruction:
            case Run(stream, name):
                yield from self._run(i, self.graph.task(name), stream.device)
            case Copy():
                yield from self._copy(i, instruction)
            case Record(stream, event) if stream in streams:
                yield f"{events[event]}.record({streams[stream]})"
            case Wait(stream, event) if event in events:
                name = events[event]
                waits = stream in streams
                yield f"{streams[stream]}.wait_event({name})" if waits else f"{name}.synchronize()"
            case Free(stream) if not is_storage(stream.device):
                freed = dict.fromkeys(self.at[slot] for slot in self.slots.freed[i])
                yield f"del {', '.join(freed)}"

    def _copy(self, i: int, copy: Copy) -> Iterator[str]:
        value = self.graph.value(copy.value)
        (made,) = self.slots.made[i]
        assert made is not None
        if is_storage(copy.source):
            yield self._read(value, made)
            return
        source = self.at[self.slots.reads[i][0]]
        one, other = (self._real(end) for end in (copy.source, copy.destination))
        ends = [self.module.streams.get(stream, "") for stream in occupied(copy)]
        # Between two devices, torch makes the streams wait for each other.
        same_device = one == other and len(ends) == 2 and all(ends)
        if same_device:
            yield f"{ends[1]}.wait_stream({ends[0]})"
        if copy.overwrite:
            yield f"{self.at[made]}.copy_({source}, non_blocking=True)"
        else:
            device = self.module.devices[copy.destination]
            version = f"_v{copy.version}" if copy.version else ""
            self.at[made] = self.names.variable(f"{value.name}{version}_{device}")
            yield f"{self.at[made]} = to({source}, {device})"
        if same_device:
            yield f"{ends[0]}.wait_stream({ends[1]})"

    def _real(self, device: str) -> str:
        return self.machine.device(device).physical or device

    def _read(self, value: Value, slot: int) -> str:
        """Return the statement that reads a value from a file into a slot."""
        assert value.producer is not None
        stored = self.graph.tasks[value.producer].fn
        assert isinstance(stored, StoredTensor)
        self.at[slot] = self.names.variable(value.name)
        where = quoted(stored.path), f"torch.{stored.dtype}", repr(stored.shape)
        call = [*where, str(stored.offset), str(stored.nbytes)]
        return f"{self.at[slot]} = read({', '.join(call)})"

    def _run(self, i: int, task: Task, device: str) -> Iterator[str]:
        if isinstance(task.fn, StoredTensor):
            (slot,) = self.slots.made[i]
            if slot is not None and not is_storage(device):
                yield self._read(task.result, slot)
            return
        spelled = self.module.devices.get(device) or 'torch.device("cpu")'
        yield from self.slots.run(i, task, self.at, self.statements, lambda _: spelled)
