"""Emulate any machine on this CPU in real time.

Each stream is a thread, and each task and copy takes as many seconds as the costs predict. The
emulator behaves like CUDA where CUDA is easily misused: streams are asynchronous, only events order
them, and freed memory is overwritten with NaN immediately, in the order of the stream that
allocated it.

Each stream has a modelled clock. A task starts at the latest modelled time of its stream and of the
events that it waited for. It does its real work, and ends after its modelled seconds, or when the
real work ended if that was later. So delays of the operating system in waking a thread do not
accumulate from task to task, as they would not on a device with a hardware queue.
"""

from __future__ import annotations

import copy as copying
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from autosched._lib.aliasing import extents
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends import Backend, Step
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.mixing import Mixing
from autosched.runtime.backends.pace import Pace

__all__ = ["Emulated"]

_NAP = 0.05  # seconds after which a sleeping stream notices that the run was aborted


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
        # By stream, the seconds that it worked in a run: modelled, and measured.
        self.worked: dict[Stream, tuple[float, float]] = {}
        self.mixing = Mixing()
        self.mixes = False
        self.is_slot = False

    def open(self, program: Program, machine: Machine) -> None:
        """Create a clock for each stream."""
        self.clock = dict.fromkeys(program.streams, 0.0)
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
        """Return a backend with the same clocks, which go on from run to run, and its own events."""
        made = copying.copy(self)
        made.events = {}
        made.is_slot = True
        return made

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Set all clocks to now, unless other runs are in flight."""
        super().begin(stopped)
        self.stopped = stopped
        self.events.clear()
        self.worked = dict.fromkeys(self.clock, (0.0, 0.0))
        if not self.is_slot:
            self.mixing.forget()
            self.clock.update(dict.fromkeys(self.clock, self.begun))

    def join(self) -> None:
        """Warn if the busiest stream worked much longer than modelled, and before, too."""
        if self.worked and not self.stopped():
            self.pace.judge(*max(self.worked.values(), key=itemgetter(1)))
        self.worked = {}

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function, then sleep until the modelled end."""
        clock = self.clock
        streams = tuple(self.clock) if self.serial else streams

        def step() -> None:
            start = max(self.begun, *(clock[stream] for stream in streams))
            call()
            end = max(start + seconds, time.perf_counter())
            self._sleep_until(end)
            for stream in streams:
                clock[stream] = end
                modelled, measured = self.worked[stream]
                self.worked[stream] = modelled + seconds, measured + end - start

        return step

    def record(self, stream: Stream, event: int) -> Step | None:
        """Store the stream's clock."""

        def step() -> None:
            self.events[event] = self.clock[stream]

        return step

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Advance the stream's clock to the event's."""

        def step() -> None:
            # An event that was not recorded is ignored, as by CUDA.
            self.clock[stream] = max(self.clock[stream], self.events.get(event, 0.0))

        return step

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Overwrite the memory, as its next owner would."""
        return _poison

    def _sleep_until(self, end: float) -> None:
        while (left := end - time.perf_counter()) > 0 and not self.stopped():
            time.sleep(min(left, _NAP))


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
