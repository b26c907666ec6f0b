"""Convert times of a device's clock to times of the host's clock.

A reference event is recorded on each device before a run and after it, while the device is idle and
the host observes the event. The line through the two gives offset and drift. Of the drifts that the
uncertainty of both observations allows, the smallest is used: in a short run the uncertainty is
large, and would distort the durations of tasks.

Knows streams and events of torch, and no program. A clock that cannot be correct is reported, and
not used.
"""

from __future__ import annotations

import time
import warnings
from typing import NamedTuple

import torch

__all__ = ["DeviceClock", "drift"]

_TRIES = 3
# The largest drift: crystals are off by at most 1e-4, and a host's clock is slewed by at most 5e-4.
_FASTEST = 1e-3


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
        self.rate = 1.0
        self.zero = _best(stream)
        self.doubt = self.zero.doubt

    def end(self) -> None:
        """Take a second tick, after the run.

        The drift is what the doubts of both ticks cannot explain.
        """
        last = _best(self.stream)
        own = float(self.zero.event.elapsed_time(last.event)) / 1e3
        gap = last.seconds - self.zero.seconds - own
        slack = self.zero.doubt + last.doubt
        found = drift(own, gap, slack)
        self.doubt = max(self.zero.doubt, last.doubt + min(abs(gap), slack))
        if abs(found) <= _FASTEST:
            self.rate = 1 + found
            return
        self.doubt += abs(gap)
        warnings.warn(
            f"in {own:.3g} s of its own the clock of {self.stream.device} came {gap:+.3g} s away "
            "from the host's, as no clock does; its times are not corrected, and may be off by "
            f"{self.doubt:.3g} s",
            stacklevel=2,
        )

    def seconds(self, event: torch.Event) -> float:
        """Return the time of an event on the host's clock."""
        event.synchronize()
        return self.zero.seconds + float(self.zero.event.elapsed_time(event)) / 1e3 * self.rate


def drift(own: float, gap: float, slack: float) -> float:
    """Return the least drift of a clock.

    It advanced ``own`` seconds while the host's advanced ``gap`` seconds more, of which ``slack``
    seconds may be the uncertainty of the ticks. The drift of a clock that did not advance is
    infinite.

    >>> drift(2.0, 0.5, 1.0), drift(2.0, -0.5, 0.25), drift(0.0, 1.0, 0.5)
    (0.0, -0.125, inf)
    """
    left = max(abs(gap) - slack, 0.0)
    if not left:
        return 0.0
    return float("inf") if own <= 0 else left / own * (1 if gap > 0 else -1)


def _best(stream: torch.Stream) -> Tick:
    return min((_tick(stream) for _ in range(_TRIES)), key=lambda tick: tick.doubt)


def _tick(stream: torch.Stream) -> Tick:
    event = torch.Event(stream.device, enable_timing=True)
    before = time.perf_counter()
    event.record(stream)
    event.synchronize()
    after = time.perf_counter()
    return Tick(event, (before + after) / 2, (after - before) / 2)
