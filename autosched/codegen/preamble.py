"""Write what precedes ``step``: devices, streams, events and helpers.

Contains templates and the names that they define. Knows no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosched._lib.allowed import is_storage
from autosched.codegen.names import Names, identifier
from autosched.codegen.pieces import WIDTH, Piece, bracketed, laid_out
from autosched.codegen.step import Globals
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Record, Wait

__all__ = ["HELPERS", "name_globals", "preamble"]

HELPERS = [
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


def name_globals(program: Program, machine: Machine, names: Names) -> Globals:
    """Take the names of streams, of devices with streams, and of devices that are copied to."""
    copies = [i for i in program if isinstance(i, Copy) and not is_storage(i.source)]
    used = {stream.device for stream in program.streams if not _is_cpu(machine, stream.device)}
    used |= {copy.destination for copy in copies if not copy.overwrite}
    devices = {name: names.shared(_plain(name)) for name in machine.names if name in used}
    streams = [stream for stream in program.streams if not _is_cpu(machine, stream.device)]
    ordered = sorted(streams, key=lambda stream: machine.names.index(stream.device))
    recorded = [i.event for i in program if isinstance(i, Record) and i.stream in streams]
    carried = {i.event for i in program if isinstance(i, Wait) and i.ago}
    return Globals(
        devices,
        {stream: names.shared(f"{devices[stream.device]}_{stream.name}") for stream in ordered},
        {event: names.shared(f"e{event}") for event in recorded},
        {event: names.shared(f"e{event}_before") for event in recorded if event in carried},
    )


def preamble(program: Program, machine: Machine, module: Globals, reads: bool) -> Iterator[str]:
    """Yield the parts of the preamble, each of whole lines; ``reads``: tasks read files."""
    if module.devices:
        yield "\n".join(_devices(machine, module)) + "\n"
    if module.streams:
        yield _IDLE
        yield _STREAMS.replace("{idle}", _idle(machine, module))
        yield "\n".join(_streams(program, machine, module)) + "\n"
    if module.streams and program.in_flight == 1:
        yield _ORDERED
    if any(isinstance(i, Copy) and not i.overwrite and not is_storage(i.source) for i in program):
        yield _TO
    if reads:
        pinned = "torch.accelerator.is_available()" if module.streams else "False"
        yield _READ.replace("{pinned}", pinned)


def _devices(machine: Machine, module: Globals) -> Iterator[str]:
    if module.streams:
        hint = 'To run this without accelerators, make each of them "cpu": streams do nothing then.'
        yield f"# The devices. {hint}"
    for device, name in module.devices.items():
        real = "cpu" if _is_cpu(machine, device) else machine.device(device).physical or device
        yield f'{name} = torch.device("{real}")'


def _idle(machine: Machine, module: Globals) -> str:
    """Return the condition that some stream is not real; then copies would race."""
    names = [name for device, name in module.devices.items() if not _is_cpu(machine, device)]
    if len(names) == 1:
        return f'{names[0]}.type == "cpu"'
    devices = bracketed('all(device.type == "cpu" for device in ', "()", list(map(Piece, names)))
    return laid_out(devices, 3, 2) + ")"


def _streams(program: Program, machine: Machine, module: Globals) -> Iterator[str]:
    for stream, name in module.streams.items():
        yield f"{name} = Stream({module.devices[stream.device]})"
    of_device: dict[str, list[str]] = {}
    for i in program:
        if isinstance(i, Record) and i.stream in module.streams:
            names = of_device.setdefault(module.devices[i.stream.device], [])
            names += [name[i.event] for name in (module.events, module.earlier) if i.event in name]
    for device, events in of_device.items():
        yield from _events(device, events)
    yield laid_out(bracketed("streams = ", "[]", list(map(Piece, module.streams.values()))), 0)
    if program.in_flight > 1:
        return
    host = _host_streams(program, machine, module)
    text = laid_out(bracketed("host_streams = ", "[]", list(map(Piece, host))), 0)
    yield f"{text}  # copy from or to host memory"


def _events(device: str, names: Sequence[str]) -> Iterator[str]:
    """Yield lines that create events, as many per line as fit."""
    room = WIDTH - len(f" = (Event({device}) for _ in range(99))")
    count = max(1, room // (max(map(len, names)) + 2))
    for start in range(0, len(names), count):
        some = names[start : start + count]
        made = f"Event({device})"
        if len(some) > 1:
            made = f"({made} for _ in range({len(some)}))"
        yield f"{', '.join(some)} = {made}"


def _host_streams(program: Program, machine: Machine, module: Globals) -> list[str]:
    found = {
        copy.stream
        for copy in program
        if isinstance(copy, Copy)
        and (_is_cpu(machine, copy.source) or _is_cpu(machine, copy.destination))
    }
    return [name for stream, name in module.streams.items() if stream in found]


def _is_cpu(machine: Machine, device: str) -> bool:
    return not machine.device(device).is_accelerator


def _plain(device: str) -> str:
    return identifier(device.replace(":", ""))
