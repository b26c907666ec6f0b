"""Convert times of a device's clock to times of the host's clock.

A reference event is recorded on each device before a run and after it, while the device is idle and
the host observes the event. The first gives the offset; by how much the second is off then, bounds
the error of all times between.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

__all__ = ["DeviceClock"]

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
        """Bound the error by a second tick, after the run."""
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
