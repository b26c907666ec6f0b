"""Emulate any machine on this CPU in real time.

Each stream is a thread, and each task and copy takes as many seconds as the costs predict. The
emulator behaves like CUDA where CUDA is easily misused: streams are asynchronous, only events order
them, and freed memory is overwritten with NaN immediately, in the order of the stream that
allocated it.

Each schedule has a machine of its own: schedules that run at the same time do not delay each other,
as they would on one GPU.

Each stream has a modelled clock. A task starts at the latest modelled time of its stream and of the
events that it waited for. It does its real work, and ends after its modelled seconds, or when the
real work ended if that was later. So delays of the operating system in waking a thread do not
accumulate from task to task, as they would not on a device with a hardware queue.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.overrides

from autosched._lib.aliasing import extents
from autosched._lib.logs import users_frame
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends import Step
from autosched.runtime.backends.host import Host

_NAP = 0.05  # seconds after which a sleeping stream notices that the run was aborted


class Emulated(Host):
    """See ``autosched.runtime.backends``.

    If real work takes much longer than modelled in several runs, one warning says so. Clocks of
    streams go on from run to run, and a slot has the same ones: a run starts on a stream when it has
    begun and the stream has finished what was issued before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock: dict[Stream, float] = {}
        self.events: dict[int, float] = {}
        self.stopped: Callable[[], bool] = bool
        self.pace = Pace()
        # By stream, the seconds that it worked in this run: modelled, and measured.
        self.worked: dict[Stream, tuple[float, float]] = {}

    def open(self, program: Program, machine: Machine) -> None:
        """Create a clock for each stream."""
        self.clock = dict.fromkeys(program.streams, 0.0)

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for each stream."""
        return str(stream)

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Note the time."""
        super().begin(stopped)
        self.stopped = stopped
        self.events = {}
        self.worked = dict.fromkeys(self.clock, (0.0, 0.0))

    def join(self) -> None:
        """Warn if the busiest stream worked much longer than modelled, and in runs before, too."""
        if self.worked and not self.stopped():
            self.pace.judge(*max(self.worked.values()))

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function, then sleep until the modelled end."""
        clock = self.clock

        def step() -> None:
            start = max(self.begun, *(clock[stream] for stream in streams))
            call()
            end = max(start + seconds, time.perf_counter())
            while (left := end - time.perf_counter()) > 0 and not self.stopped():
                time.sleep(min(left, _NAP))
            for stream in streams:
                clock[stream] = min(end, time.perf_counter())  # earlier, if the run was aborted
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


# ---- emulation that falls behind

_LATE = 2.0  # times as long as modelled; less may be due to delays of the operating system
_RUNS = 3  # in a row: the first run is checked, and one may be late by chance


class Pace:
    """Warns once if streams work much longer than modelled in several runs in a row."""

    def __init__(self) -> None:
        self._warned = False
        self._late: list[float] = []

    def judge(self, modelled: float, measured: float) -> None:
        """Note for how long the busiest stream of a run worked."""
        if self._warned or modelled <= 0.0 or measured <= _LATE * modelled:
            self._late.clear()
            return
        self._late.append(measured / modelled)
        if len(self._late) == _RUNS:
            self._warned = True
            message = (
                "this CPU cannot keep up with the emulated machine: the busiest stream in a run is "
                f"predicted to take {modelled * 1e3:.3g} ms and took {measured * 1e3:.3g} ms, so "
                "what is measured says little of the machine; with "
                f"machine.slower({_rounded_up(min(self._late))}), all "
                "ratios stay and it can (costs that are given as seconds, or by default, stay as "
                "they are: examples= estimates them)"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=users_frame()[1])


def _rounded_up(factor: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, ...

    >>> _rounded_up(1.5), _rounded_up(61.7), _rounded_up(0.1)
    (2, 100, 1)
    """
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, factor))))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= factor)
