"""Run programs on accelerators with torch streams and events.

Uses torch's generic accelerator API: CUDA first; XPU and others run the same code.

The rules of CUDA that this module follows:

1. torch hands out a pool of 32 streams per device and then starts again with the first. So streams
   are created once, by name, counted, and kept for the life of the process. A stream that torch has
   handed out to this module before is skipped.
2. The current stream is a property of a thread and a device. It is set in the thread that issues
   work, before the work is issued.
3. A copy between two GPUs runs on the source's current stream, and makes the current streams of
   both devices wait for each other. So both copy streams are made current. Two logical devices on
   one GPU achieve the same with events.
4. A wait for an event that was never recorded has no effect. The executor issues records before
   their waits. A wait refers to the last record issued before it, so a run may record events again
   while waits of the previous run are pending.
5. A block returns to the stream that allocated it. So results are created and freed while that
   stream is current.
6. A copy is asynchronous only from and to pinned host memory, so other host memory is staged
   through pinned memory. The host may read what was copied to it after it has
   waited for the copy's event and the data has been moved on from the staging memory.
7. Inputs come from the caller's current stream, and outputs go to it: the streams of a run wait for
   it at the beginning, and it waits for them at the end. When the call returns, host memory belongs
   to the caller again: the call waits for copies to it, and for those from it that are not staged,
   since staged memory is read when the copy is issued. So the caller may drop an
   input immediately: its block returns to a stream that waits for all streams of the run.
8. The block of an output belongs to a stream of this module, which does not wait for what the
   caller does with the output afterwards. The next run, other schedules and other streams of the
   caller may allocate from that stream. So each output is registered with the caller's stream
   (``record_stream``), and its block returns only after the work on that stream. Inputs and
   intermediate values do not need this: within a schedule, frees wait.

A copy between two accelerators occupies the source's copy-out stream and the destination's copy-in
stream, because torch makes the two current streams wait for each other. A copy between host and
accelerator occupies the accelerator's copy stream only.

Streams that wait for the CPU, directly or through others, are issued by separate threads, so that
they do not delay other streams. All others are issued by the calling thread.
"""

from __future__ import annotations

import copy as copying
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from autosched._lib.allowed import is_cpu, is_storage
from autosched._lib.copying import span
from autosched._lib.tree import flatten, transform
from autosched.errors import MachineError
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Record, Stream, occupied
from autosched.program.units import waiting_for_host
from autosched.runtime.backends import Backend, Step, Transfer
from autosched.runtime.backends.host import (
    Host,
    as_it_is,
    as_parameter,
    copy_in_host_memory,
    overwritten,
    read_file,
)

PIECE = (
    4 << 20
)  # bytes that the host moves in some 0.4 ms, so a link does not wait for the next ones
_LIMIT = 256 << 20  # bytes that are staged in one run before the host waits for the stream
_POOL = 32  # streams that torch has per device and priority before it hands out the same again
_streams: dict[tuple[torch.device, int], dict[Stream, torch.Stream]] = {}


class Accelerator(Host):
    """See ``autosched.runtime.backends``.

    With ``serial``, instructions run one at a time, in issue order: the reference.
    """

    def __init__(self, serial: bool = False) -> None:
        super().__init__()
        self.serial = serial
        self.devices: dict[str, torch.device] = {}
        self.streams: dict[Stream, torch.Stream] = {}
        self.events: dict[int, torch.Event | None] = {}  # None: recorded by a CPU stream
        self.is_loop = False
        self.own_thread: set[Stream] = set()
        self.to_host: set[torch.Stream] = set()  # that copy to host memory
        self.in_use: set[torch.Stream] = set()  # that read the caller's host memory in this run
        # Versions that copies leave in the caller's host memory.
        self.returned: set[tuple[str, int]] = set()
        self.staging = Staging()
        self.starts: dict[torch.device, torch.Event] = {}
        self.ends: list[tuple[torch.Stream, torch.Event]] = []
        self.callers: dict[torch.device, torch.Stream] = {}
        self.caller_device = 0
        self.timing = False
        self.stopped: Callable[[], bool] = bool
        self.clocks: dict[torch.device, DeviceClock] = {}

    def open(self, program: Program, machine: Machine) -> None:
        """Take streams from the pool and create events. Raises MachineError for missing devices."""
        if machine.accelerators and not machine.contention:
            raise MachineError(
                "a machine without contention is for planning: "
                "copies of real devices need copy streams"
            )
        self.streams = {}
        self.events = {}
        self.is_loop = program.in_flight > 1
        self.devices = {d.name: _real(d.name, d.physical) for d in machine.devices}
        for kind in {device.type: None for device in self.devices.values() if device.type != "cpu"}:
            check_features(kind)
        for stream in program.streams:
            if self.devices[stream.device].type != "cpu":
                self.streams[stream] = pooled(self.devices[stream.device], stream)
        for record in [i for i in program if isinstance(i, Record)]:
            is_gpu = record.stream in self.streams
            device = self.devices[record.stream.device]
            self.events[record.event] = torch.Event(device) if is_gpu else None
        self.own_thread = set() if self.serial else waiting_for_host(program, set(self.streams))
        copies = [i for i in program if isinstance(i, Copy)]
        on_cpu = {name for name, device in self.devices.items() if device.type == "cpu"}
        out = [i for i in copies if i.destination in on_cpu and i.stream in self.streams]
        self.to_host = {self.streams[i.stream] for i in out}
        self.returned = {(i.value, i.version) for i in out if i.overwrite}
        streams = self.streams.values()
        self.starts = {stream.device: torch.Event(stream.device) for stream in streams}
        self.ends = [(stream, torch.Event(stream.device)) for stream in streams]

    def place(self, device: str) -> Any:
        """Return the torch device."""
        return self.devices[device]

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for CPU streams, and for streams that wait for them."""
        return str(stream) if stream in self.own_thread else None

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Make the streams current on their devices.

        If several are on one device, the last is current, and allocates the memory of copies.
        """
        current = [self.streams[stream] for stream in streams if stream in self.streams]
        if len(current) == 1:
            return partial(torch.accelerator.set_stream, current[0])

        def step() -> None:
            for stream in current:
                torch.accelerator.set_stream(stream)

        return step if current else None

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function.

        Between two streams of one GPU, synchronize with events, as torch does between two GPUs.
        """
        real = [self.streams[stream] for stream in streams if stream in self.streams]

        def serial() -> None:
            call()
            for stream in real:
                stream.synchronize()

        if self.serial:
            return serial
        if len(real) < 2 or real[0].device != real[1].device:
            return call
        other, own = real
        before = torch.Event(own.device)
        after = torch.Event(own.device)

        def synchronized() -> None:
            before.record(other)
            own.wait_event(before)
            call()
            after.record(own)
            other.wait_event(after)

        return synchronized

    def transfer(self, copy: Copy) -> Transfer:
        """Copy without blocking; between CPU devices, in host memory.

        Files are read into page-locked memory.
        """
        if is_storage(copy.source):
            return partial(read_file, pinned=bool(self.streams))
        source = self.devices[copy.source]
        target = self.devices[copy.destination]
        if source.type == target.type == "cpu":
            return copy_in_host_memory
        streams = [self.streams[stream] for stream in occupied(copy) if stream in self.streams]
        relayed = (copy.value, copy.version) in self.returned
        return DeviceCopy(source, target, streams, self.staging, relayed, self.in_use)

    def record(self, stream: Stream, event: int) -> Step | None:
        """Record the event on the stream. A CPU stream needs none: its work is complete."""
        made = self.events[event]
        return None if made is None else partial(made.record, self.streams[stream])

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Make a GPU stream wait.

        For a CPU stream, block its thread until data copied to the host has arrived there.
        """
        made = self.events[event]
        if made is None:
            return None
        if stream in self.streams:
            return partial(self.streams[stream].wait_event, made)
        if not self.returned:
            return made.synchronize

        def step() -> None:
            made.synchronize()
            self.staging.unstage()

        return step

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Record a timing event, or read the host's clock."""
        self.timing = True
        if not streams or streams[0] not in self.streams:
            return time.perf_counter
        on = self.streams[streams[0]]

        def mark() -> torch.Event:
            event = torch.Event(on.device, enable_timing=True)
            event.record(on)
            return event

        return mark

    def slot(self) -> Backend:
        """Return a backend on the same streams, with events of its own."""
        return _Slot(self)

    def adopting(self) -> Step:
        """Return a step that makes, in its thread, those streams current that are current here."""
        if not self.streams:
            return super().adopting()
        index = torch.accelerator.current_device_index()
        current = [torch.accelerator.current_stream(device) for device in self.starts]

        def step() -> None:
            for stream in current:
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(index)

        return step

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Make all streams wait for the caller's."""
        self.stopped = stopped
        self.in_use.clear()
        self.staging.begin()
        if self.streams:
            self.caller_device = torch.accelerator.current_device_index()
        self.callers = {device: torch.accelerator.current_stream(device) for device in self.starts}
        for device, caller in self.callers.items():
            self.starts[device].record(caller)
        for stream in self.streams.values():
            stream.wait_event(self.starts[stream.device])
        if self.timing:
            self._zero()
        self.begun = time.perf_counter()

    def _zero(self) -> None:
        """Synchronize each device's clock with the host's, while all devices are idle."""
        for device in self.callers:
            torch.accelerator.synchronize(device)
        self.clocks = {device: DeviceClock(caller) for device, caller in self.callers.items()}

    def join(self) -> None:
        """Make the caller's streams wait for those of the run.

        The host waits for copies to its memory, and for those that read it after they were issued,
        or for everything if the run was aborted, or if the program leaves memory to be released.
        """
        timing = self.timing  # only runs with stamps have to begin with all devices at rest
        self.timing = False
        for stream, end in self.ends:
            end.record(stream)
            self.callers[stream.device].wait_event(end)
        for caller in self.callers.values():
            torch.accelerator.set_stream(caller)
        if self.streams:
            torch.accelerator.set_device_index(self.caller_device)
        try:
            used = self.to_host | self.in_use
            for stream in self.streams.values():
                if stream in used or self.is_loop or self.stopped():
                    stream.synchronize()
            self.staging.unstage()
        except BaseException:  # Control-C: pending copies must not land in a later run
            self.staging.forget()
            raise
        for device, clock in self.clocks.items() if timing else ():
            torch.accelerator.synchronize(device)
            clock.end()

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Prevent the reuse of an output's block while the caller's stream uses it."""
        for leaf in flatten(outputs):
            is_strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
            if is_strided and leaf.device in self.callers:
                leaf.record_stream(self.callers[leaf.device])

    @property
    def doubt(self) -> float:
        """The bound, in seconds, on the error of ``seconds`` for a device."""
        return max((clock.doubt for clock in self.clocks.values()), default=0.0)

    def seconds(self, stamp: Any) -> float:
        """Return seconds since ``begin``, by the host's clock."""
        if isinstance(stamp, float):
            return stamp - self.begun
        return self.clocks[stamp.device].seconds(stamp) - self.begun


class _Slot(Accelerator):
    """The streams of a machine for one of several runs in flight.

    ``begin`` notes what the caller has issued, in the caller's thread. ``join`` returns when the
    devices have finished the run: only then is memory released that no free releases, and are
    events and page-locked memory used again. So outputs are complete when the caller gets them.
    """

    def __init__(self, whole: Accelerator) -> None:
        vars(self).update(vars(whole))  # ``staging``, too: the next run may read what one leaves
        self.in_use = set()
        self.events = {
            event: None if made is None else torch.Event(made.device)
            for event, made in whole.events.items()
        }
        self.starts = {device: torch.Event(device) for device in whole.starts}
        self.last = {stream: torch.Event(real.device) for stream, real in self.streams.items()}

    def transfer(self, copy: Copy) -> Transfer:
        """Copy without blocking, unless an earlier run has yet to leave the value in host memory."""
        way = super().transfer(copy)
        if isinstance(way, DeviceCopy) and any(name == copy.value for name, _ in self.returned):
            way.relayed = True
        return way

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Note the caller's work so far."""
        self.begun = time.perf_counter()
        self.stopped = stopped
        self.in_use.clear()
        self.staging.begin()
        for device, start in self.starts.items():
            start.record(torch.accelerator.current_stream(device))

    def follow(self, stream: Stream) -> Step:
        """Wait for the caller's work."""
        if stream not in self.streams:
            return super().adopting()
        return partial(self.streams[stream].wait_event, self.starts[self.streams[stream].device])

    def leave(self, stream: Stream) -> Step:
        """Record the end of the run."""
        if stream not in self.streams:
            return super().adopting()
        return partial(self.last[stream].record, self.streams[stream])

    def join(self) -> None:
        """Wait until the devices have finished the run; all that they know, if it was aborted."""
        for stream, last in self.last.items():
            if self.stopped():
                self.streams[stream].synchronize()
            else:
                last.synchronize()
        self.staging.unstage()

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Prevent the reuse of an output's block while the caller's current stream uses it."""
        self.callers = {device: torch.accelerator.current_stream(device) for device in self.starts}
        super().hand_out(outputs)


def _real(name: str, physical: str | None) -> torch.device:
    """Return the torch device of a name. Raises MachineError if it is missing."""
    if is_cpu(name) or is_storage(name):
        return torch.device("cpu")
    try:
        device = torch.device(physical or name)
    except RuntimeError:  # no name that torch knows
        device = torch.device("meta")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count()
    if kind is None or device.type != kind.type or (device.index or 0) >= count:
        here = f"{count} of {kind.type!r}" if kind is not None else "none"
        raise MachineError(
            f"device {name!r} is not there (accelerators here: {here}); backend='emulated' can "
            "emulate it, and Machine.local(gpus=n) makes logical devices of those there are"
        )
    return torch.device(device.type, device.index or 0)


@cache
def check_features(kind: str) -> None:
    """Raise MachineError if torch lacks what schedules need, for this type of devices.

    Not checked is rule 4: that a wait refers to the last record issued before it.
    """
    device = torch.device(kind, torch.accelerator.current_device_index())

    def stream() -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def wait() -> None:
        event = torch.Event(device)
        event.record(stream())
        event.record(stream())
        stream().wait_event(event)
        event.synchronize()

    needed: dict[str, Step] = {
        "streams": stream,
        "events that streams wait for, recorded repeatedly": wait,
        "Tensor.record_stream": lambda: torch.empty(1, device=device).record_stream(stream()),
        "page-locked host memory": lambda: torch.empty(1, pin_memory=True),
    }
    for feature, use in needed.items():
        try:
            use()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise MachineError(
                f"schedules need {feature}, which torch does not have for {kind!r} ({reason}); "
                "use the CPU alone, or backend='emulated'"
            ) from error


def pooled(device: torch.device, name: Stream, priority: int = 0) -> torch.Stream:
    """Return the stream of that name and priority, created at its first use.

    Raises MachineError when the pool would repeat.
    """
    made = _streams.setdefault((device, priority), {})
    if name not in made:
        made[name] = _new_stream(device, name, made.values(), priority)
    return made[name]


def _new_stream(
    device: torch.device, name: Stream, taken: Collection[torch.Stream], priority: int
) -> torch.Stream:
    for _ in range(_POOL):  # others take streams from the pool too, so the next may be one of ours
        if len(taken) < _POOL and (stream := torch.Stream(device, priority=priority)) not in taken:
            return stream
    raise MachineError(
        f"{device} has no stream left for {name}: torch repeats itself after {len(taken)}"
    )


# ---- times of a device on the host's clock
#
# A reference event is recorded on each device before a run and after it, while the device is idle and
# the host observes the event. Times count from the first; what the clocks are apart at the second is
# a doubt, as is the uncertainty of both observations. Crystals drift by at most 1e-4.
#
# Knows streams and events of torch, and no program.

_TRIES = 3


class Tick(NamedTuple):
    """A moment on a device, and its time on the host's clock, up to ``doubt`` seconds."""

    event: torch.Event
    seconds: float
    doubt: float


class DeviceClock:
    """Converts a device's events to seconds of the host's clock, up to ``doubt`` seconds.

    Created and ended while the device is idle.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream
        self.zero = _best(stream)
        self.doubt = self.zero.doubt

    def end(self) -> None:
        """Compare the clocks again, after the run."""
        last = _best(self.stream)
        self.doubt = max(self.doubt, last.doubt + abs(last.seconds - self.seconds(last.event)))

    def seconds(self, event: torch.Event) -> float:
        """Return the time of an event on the host's clock."""
        event.synchronize()
        return self.zero.seconds + float(self.zero.event.elapsed_time(event)) / 1e3


def _best(stream: torch.Stream) -> Tick:
    return min((_tick(stream) for _ in range(_TRIES)), key=lambda tick: tick.doubt)


def _tick(stream: torch.Stream) -> Tick:
    event = torch.Event(stream.device, enable_timing=True)
    before = time.perf_counter()
    event.record(stream)
    event.synchronize()
    after = time.perf_counter()
    return Tick(event, (before + after) / 2, (after - before) / 2)


# ---- copies
#
#     host, page-locked -> GPU              one copy
#     host, pageable    -> GPU              moved to pinned pieces by the host, and copied from there
#     GPU               -> host             one copy, into memory that is page-locked
#     GPU               -> pageable memory  of the caller: into pinned pieces, then moved by the host
#     GPU               -> GPU              one copy; the current streams of both wait for each other
#     GPU               -> itself           one copy, from one logical device to another
#
# A copy has the strides of the original, because sums over other strides differ in the last bits. A
# tensor with gaps is packed before the copy and spread after it, so that the bytes transferred are
# those that were predicted; this takes memory for the gaps, which no prediction includes.
#
# Copies are whole; only staging is divided into pieces. A task needs all of what it reads, so parts
# that arrive earlier would not let anything begin. Between GPUs that are no peers, the driver stages.
#
# Pageable memory is moved by the thread that issues the copy. The handshakes with a separate thread
# would cost a run more than small inputs take, and large inputs are better pinned by their owner, as
# ``explain`` advises. What is written back to a caller's pageable memory is moved there when the host
# waits for it anyway: before a CPU task, or at the end of the run.
#
# All work is put on the given streams, which are current. The host waits here only to overwrite host
# memory that has gaps, and to send on data that has not yet been moved to its destination.


class DeviceCopy:
    """Moves tensors from a source to a target, at least one of which is an accelerator.

    ``streams`` are those that the copy occupies, the target's last. ``relayed``: the source may
    still be arriving in host memory, from another copy. ``in_use`` gets the streams that read host
    memory of others after the copy was issued.
    """

    def __init__(
        self,
        source: torch.device,
        target: torch.device,
        streams: Sequence[torch.Stream],
        staging: Staging,
        relayed: bool = False,
        in_use: set[torch.Stream] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.staging = staging
        self.relayed = relayed
        self.in_use: set[torch.Stream] = set() if in_use is None else in_use
        self.out = streams[0]
        self.into = streams[-1]
        self.to_host = target.type == "cpu"
        self.from_host = source.type == "cpu"
        self._carry = self._send if self.from_host else self._fetch
        apart = not self.from_host and not self.to_host
        self.met = torch.Event(self.into.device) if apart else None

    def __call__(self, value: Any, into: Any) -> Any:
        """Copy a tensor, or a tree with tensors; over ``into`` if that is given."""
        if into is None:
            return transform(self._copied, value)
        return overwritten(into, value, self._put)

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copying.deepcopy(leaf)
        return as_parameter(as_it_is(self._alike, leaf.detach()), leaf)

    def _alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy with the same strides."""
        if tensor.device == self.source and _is_strided(tensor):
            return self._fresh(tensor)
        self._reads_later()
        copy = tensor.to(self.target, non_blocking=True, copy=True)
        self._meet()
        return copy

    def _reads_later(self) -> None:
        """Note that torch's own copy may read host memory later."""
        if self.from_host:
            self.in_use.add(self.into)

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in newly allocated memory."""
        shape = tensor.shape
        strides = tensor.stride()
        if any(stride == 0 and n > 1 for n, stride in zip(shape, strides, strict=True)):
            return self._fresh(tensor.as_strided((span(tensor),), (1,))).as_strided(shape, strides)
        made = torch.empty_strided(
            shape,
            strides,
            dtype=tensor.dtype,
            device=self.target,
            pin_memory=self.to_host and _is_dense(tensor),
        )
        return self._put(made, tensor)

    def _put(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Copy over the memory of another tensor of the same shape."""
        tensor = new.detach()
        over = old.detach()
        is_here = tensor.device == self.source and over.device == self.target
        if not is_here or not _is_strided(tensor) or not _is_strided(over):
            self._reads_later()
            old.copy_(new, non_blocking=not self.to_host)
            self._meet()
        elif (
            tensor.dtype != over.dtype or tensor.stride() != over.stride() or not _is_dense(tensor)
        ):
            self._spread(over, tensor)
        elif self.met is not None or (tensor if self.from_host else over).is_pinned():
            self._reads_later()
            over.copy_(tensor, non_blocking=True)
        else:
            self._carry(_row(tensor), _row(over))
        return old

    def _spread(self, over: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a tensor that has gaps, or other strides than its destination.

        It is packed, and spread after its arrival.
        """
        packed = self._fresh(tensor.contiguous())
        if self.to_host:
            self.out.synchronize()
        over.copy_(packed)
        self._meet()

    def _meet(self) -> None:
        """Make the source's stream wait for the target's: others may wait for either."""
        if self.met is not None:
            self.met.record(self.into)
            self.out.wait_event(self.met)

    # ---- through pieces, row by row of bytes

    def _send(self, row: torch.Tensor, over: torch.Tensor) -> None:
        """Copy from pageable memory. It is read immediately, so copies into it are unstaged."""
        if self.relayed:
            self.into.synchronize()
            self.staging.unstage()
        for piece, to in zip(torch.split(row, PIECE), torch.split(over, PIECE), strict=True):
            memory = self.staging.take(piece.numel(), self.into)
            memory.copy_(piece)
            to.copy_(memory, non_blocking=True)

    def _fetch(self, row: torch.Tensor, over: torch.Tensor) -> None:
        for piece, to in zip(torch.split(row, PIECE), torch.split(over, PIECE), strict=True):
            memory = self.staging.take(piece.numel(), self.out)
            memory.copy_(piece, non_blocking=True)
            self.staging.arrive(memory, to, self.out)


class Staging:
    """Page-locked memory through which copies from and to pageable memory go.

    torch uses it again when the copies that it was used for have finished.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        # What is on its way to the host: the event after the copy, and where it is and is to be.
        self._arriving: list[tuple[torch.Event, torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Begin a run."""
        self._taken = 0

    def take(self, nbytes: int, stream: torch.Stream) -> torch.Tensor:
        """Return bytes for a copy on a stream, for which the host waits if there are too many."""
        self._taken += nbytes
        if self._taken > _LIMIT:
            stream.synchronize()
            self.unstage()
            self._taken = nbytes
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError):  # pageable, which is slower
            return torch.empty(nbytes, dtype=torch.uint8)

    def arrive(self, memory: torch.Tensor, over: torch.Tensor, stream: torch.Stream) -> None:
        """Move what a copy on a stream leaves in memory, when it has finished."""
        event = torch.Event(stream.device)
        event.record(stream)
        with self._lock:
            self._arriving.append((event, memory, over))

    def unstage(self) -> None:
        """Move what has arrived; what another thread has begun to move is there on return."""
        with self._lock:
            left = []
            for event, memory, over in self._arriving:
                if event.query():
                    over.copy_(memory)
                else:
                    left.append((event, memory, over))
            self._arriving = left

    def forget(self) -> None:
        """Move nothing of what is on its way."""
        with self._lock:
            self._arriving.clear()


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its bytes and strides, as parameters are."""
    kind = type(tensor)
    default = torch._C._disabled_torch_function_impl
    if kind is not torch.Tensor and kind.__torch_function__ is not default:
        return False
    if tensor.layout != torch.strided or tensor.numel() == 0 or hasattr(kind, "__tensor_flatten__"):
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps in memory, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
