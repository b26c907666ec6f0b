"""Emulate any machine on this CPU in real time.

Each stream is a thread, and each task and copy takes as many seconds as the costs predict. The
emulator behaves like CUDA where CUDA is easily misused: streams are asynchronous, only events order
them, and freed memory is overwritten with NaN immediately, in the order of the stream that
allocated it.

Schedules that run concurrently on one machine share its streams, as they would on a GPU: each waits
for the work that another has issued on a stream. Machines that are equal are one machine: copies,
and machines read from files, are the same hardware.

Each stream has a modelled clock. A task starts at the latest modelled time of its stream and of the
events that it waited for. It does its real work, and ends after its modelled seconds, or when the
real work ended if that was later. So delays of the operating system in waking a thread do not
accumulate from task to task, as they would not on a device with a hardware queue.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosched._lib.aliasing import extents
from autosched._lib.forks import in_child, rlock
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends import Backend, Step
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.mixing import Mixing
from autosched.runtime.backends.pace import Pace

__all__ = ["Emulated", "Queues"]

_NAP = 0.05  # seconds after which a sleeping stream notices that the run was aborted


class Queues:
    """The time until which each stream of a machine is occupied, by any schedule.

    >>> queues, stream = Queues(), Stream("cuda:0", "compute")
    >>> queues.take([stream], 1.0, 2.0), queues.take([stream], 2.0, 1.0)
    (1.0, 3.0)
    """

    def __init__(self) -> None:
        self._guard = rlock()
        self._until: dict[Stream, float] = {}

    def take(self, streams: Sequence[Stream], start: float, seconds: float) -> float:
        """Occupy streams from ``start``, or from when they are free, and return the start."""
        with self._guard:
            start = max([start, *(self._until.get(stream, start) for stream in streams)])
            self._until.update(dict.fromkeys(streams, start + seconds))
        return start

    def leave(self, streams: Sequence[Stream], end: float) -> None:
        """Free streams, except those that another schedule has occupied since."""
        now = time.perf_counter()
        if now >= end:  # always, unless a run was aborted
            return
        with self._guard:
            for stream in streams:
                if end == self._until.get(stream):
                    self._until[stream] = now

    def clear(self) -> None:
        """Free all streams."""
        self._until.clear()


_queues: weakref.WeakValueDictionary[Machine, Queues] = weakref.WeakValueDictionary()
_opening = rlock()


def _queues_of(machine: Machine) -> Queues:
    """Return the queues of a machine, which live as long as a backend has them."""
    with _opening:
        found = _queues.get(machine)
        if found is None:
            found = _queues[machine] = Queues()
        return found


@in_child
def _free() -> None:
    """Free all streams in a child process, which does not wait for the parent's runs."""
    for queues in list(_queues.values()):
        queues.clear()


class Emulated(Host):
    """See ``autosched.runtime.backends``.

    If real work takes much longer than modelled in several runs, one warning says so: see ``pace``.
    With ``serial``, instructions run one at a time, in issue order: the time of the same work
    without any overlap.
    """

    def __init__(self, serial: bool = False) -> None:
        super().__init__()
        self.serial = serial
        self.clock: dict[Stream, float] = {}
        self.events: dict[int, float] = {}
        self.stopped: Callable[[], bool] = bool
        self.pace = Pace()
        self.queues = Queues()
        self.contention = True
        self.mixing = Mixing()
        self.mixes = False

    def open(self, program: Program, machine: Machine) -> None:
        """Create a clock for each stream."""
        self.clock = dict.fromkeys(program.streams, 0.0)
        self.queues = _queues_of(machine)
        self.contention = machine.contention
        self.mixes = bool(machine.accelerators)

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for each stream."""
        return None if self.serial else str(stream)

    def here(self, device: str, usual: Any) -> Any:
        """Return the device that replaces ``Here`` on a device: for torch, the CPU."""
        if not isinstance(usual, (str, torch.device)) or torch.device(usual).type != "cpu":
            return usual
        return self.mixing.named(device, torch.device(usual))

    def watched(
        self, device: str, fn: Any, call: Step, arguments: Callable[[], Sequence[Any]]
    ) -> Step:
        """Return the call of a task that raises, as on GPUs, if it mixes devices."""
        return self.mixing.watched(device, fn, call, arguments) if self.mixes else call

    def slot(self) -> Backend:
        """Return a backend with the same clocks, and with events of its own."""
        return _Slot(self)

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Set all clocks to now."""
        super().begin(stopped)
        self.mixing.forget()
        self.stopped = stopped
        self.events.clear()
        for stream in self.clock:
            self.clock[stream] = self.begun
        self.pace.begin()

    def join(self) -> None:
        """Warn if the run, and those before it, took much longer than modelled."""
        if not self.stopped():
            self.pace.end(max(self.clock.values(), default=self.begun) - self.begun)

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function, then sleep until the modelled end."""
        clock = self.clock
        streams = tuple(self.clock) if self.serial else streams
        queues = self.queues
        queueing = [stream for stream in streams if self.contention or _computes(stream)]

        def step() -> None:
            ready = max(self.begun, *(clock[stream] for stream in streams))
            start = queues.take(queueing, ready, seconds)
            try:
                call()
                end = max(start + seconds, time.perf_counter())
                self._sleep_until(end)
            finally:
                queues.leave(queueing, start + seconds)
            for stream in streams:
                clock[stream] = end
            self._note(streams, seconds, end - start)

        return step

    def _note(self, streams: Sequence[Stream], modelled: float, measured: float) -> None:
        """Note the seconds that streams worked."""
        self.pace.run(streams, modelled)

    def record(self, stream: Stream, event: int) -> Step | None:
        """Store the stream's clock."""

        def step() -> None:
            self.events[event] = self.clock[stream]
            self.pace.record(stream, event)

        return step

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Advance the stream's clock to the event's."""

        def step() -> None:
            # An event that was not recorded is ignored, as by CUDA.
            self.clock[stream] = max(self.clock[stream], self.events.get(event, 0.0))
            self.pace.wait(stream, event)

        return step

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Overwrite the memory, as its next owner would."""
        return _poison

    def _sleep_until(self, end: float) -> None:
        while (left := end - time.perf_counter()) > 0 and not self.stopped():
            time.sleep(min(left, _NAP))


class _Slot(Emulated):
    """An emulated machine for one of several runs in flight.

    The clocks of streams go on from run to run: a run starts on a stream when it has begun and the
    stream has finished what was issued before.
    """

    def __init__(self, whole: Emulated) -> None:
        super().__init__(whole.serial)
        self.clock = whole.clock
        self.queues = whole.queues
        self.contention = whole.contention
        self.mixing = whole.mixing
        self.mixes = whole.mixes
        self.whole = whole
        # By stream, the seconds that it worked in a run: modelled, and measured.
        self.worked: dict[Stream, tuple[float, float]] = {}

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Note the time."""
        self.begun = time.perf_counter()
        self.stopped = stopped
        self.events.clear()
        self.worked = dict.fromkeys(self.clock, (0.0, 0.0))

    def join(self) -> None:
        """Warn if the busiest stream worked much longer than modelled, and before, too."""
        if self.worked and not self.stopped():
            self.whole.pace.judge("the busiest stream in a run", *max(self.worked.values()))

    def _note(self, streams: Sequence[Stream], modelled: float, measured: float) -> None:
        for stream in streams:
            before = self.worked[stream]
            self.worked[stream] = before[0] + modelled, before[1] + measured


def _computes(stream: Stream) -> bool:
    return stream.name.startswith("compute")


def _poison(value: Any) -> None:
    """Set all bits of tensors, and of nothing else in their storage: NaN in all formats."""
    for leaf in [extent.tensor for extent in extents(value)]:
        if not isinstance(leaf, torch.Tensor):
            continue
        size = leaf.element_size()
        shape = (*leaf.shape, size)
        strides = (*(n * size for n in leaf.stride()), 1)
        raw = torch.empty(0, dtype=torch.uint8, device=leaf.device)
        raw.set_(leaf.untyped_storage(), leaf.storage_offset() * size, shape, strides).fill_(255)
