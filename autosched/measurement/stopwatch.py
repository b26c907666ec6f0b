"""Measure the device time and the launch time of a call.

A CPU has finished the work when the call returns. An accelerator is timed by two events on its
current stream. Where torch has a kernel that sleeps, the device is kept busy until everything
between the events is launched: then they measure the device, and not the launching thread. The time
between two events with nothing between them is subtracted. The sleep counts cycles of the device's
clock, which is slow on a device that was idle. So its length is measured until two measurements
agree, and again when a sleep was too short. Knows no task and no graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

_TRIES = 5
_CYCLES = 1_000_000  # of the sleep that shows how long a cycle is
_SLEEPS = 50  # in a row, for one measurement: 25 to 150 ms, in which the clock rises
_MOST = 10  # measurements, if clocks do not settle
_AGREED = 0.02
_LONGEST = 0.01  # seconds of sleep: a call that takes longer to launch keeps no device busy anyway
_SPARE = 5e-5
_NOISE = 5e-6  # seconds that two events may be off
_cycles: dict[torch.device, float] = {}  # the seconds of a cycle, as last measured


class Reading(NamedTuple):
    """The time of a call on the device, and on the host to launch it.

    ``clean``: the device did not wait for the host.
    """

    seconds: float
    issued: float
    clean: bool = True


class Stopwatch:
    """Times calls on one device, by the host's clock: the thread that launches them is the device."""

    def time(self, calls: Sequence[Call], ahead: float = 0.0) -> tuple[Reading, Any]:
        """Return the average time of the calls, and the result of the last.

        ``ahead``: seconds for which the device is kept busy meanwhile, at least; it should be the
        time to launch them.
        """
        start = time.perf_counter()
        returned = _called(calls)
        taken = (time.perf_counter() - start) / len(calls)
        return Reading(taken, taken), returned


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    return Stopwatch() if device.type == "cpu" else EventWatch(device)


class EventWatch(Stopwatch):
    """Records events on a device's current stream, which must remain the same while it measures."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.accelerator.current_stream(device)
        self.empty = 0.0
        self.cycle = 0.0
        synchronize(device)
        self._calibrate()
        self.empty = statistics.median(
            self.time([_nothing], _SPARE)[0].seconds for _ in range(_TRIES)
        )

    def time(self, calls: Sequence[Call], ahead: float = 0.0) -> tuple[Reading, Any]:
        """See ``Stopwatch``.

        A reading is clean if the device still slept when the last call was launched. After one that
        is not, the sleep is calibrated again.
        """
        first, last = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        sleeps = ahead > 0 and self.cycle > 0
        if sleeps:
            self._sleep(int(min(ahead + _SPARE, _LONGEST) / self.cycle))
        first.record(self.stream)
        start = time.perf_counter()
        returned = _called(calls)
        issued = time.perf_counter() - start
        last.record(self.stream)
        clean = not sleeps or not first.query()
        last.synchronize()
        taken = float(first.elapsed_time(last)) / 1e3 - self.empty
        taken = 0.0 if -_NOISE < taken < 0 else taken
        if not clean:
            self._calibrate()
        return Reading(taken / len(calls), issued / len(calls), clean), returned

    def _calibrate(self) -> None:
        """Measure the cycle of the sleep until two measurements agree."""
        if self.device.type != "cuda":
            return
        self.cycle = _cycles.get(self.device, 0.0)
        for _ in range(_MOST):
            before = self.cycle
            taken = self.time([lambda: self._sleep(_CYCLES)] * _SLEEPS)[0].seconds
            self.cycle = max(taken, 0.0) / _CYCLES
            if abs(self.cycle - before) <= _AGREED * self.cycle:
                break
        _cycles[self.device] = self.cycle

    def _sleep(self, cycles: int) -> None:
        with torch.cuda.device(self.device):  # a kernel without a tensor goes to the current device
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def synchronize(*devices: torch.device) -> None:
    """Wait until devices are idle."""
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def median(readings: Sequence[Reading]) -> Reading | None:
    """Return the median of the clean readings, or of all if none is clean; None without any."""
    counted = [reading for reading in readings if reading.clean] or readings
    if not counted:
        return None
    seconds = statistics.median(reading.seconds for reading in counted)
    return Reading(seconds, statistics.median(reading.issued for reading in counted))


def _called(calls: Sequence[Call]) -> Any:
    for call in calls[:-1]:
        call()
    return calls[-1]()


def _nothing() -> None:
    pass
