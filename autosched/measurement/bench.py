"""Time the calls of a graph in serial runs on one device.

The device stands for all equal devices of a machine. A device is measured while it is kept busy: a
kernel that sleeps holds it until all of a task is launched, so that two events measure the kernels,
and the host's clock measures the launches.

Runs are whole, and the first one is a warm-up. So each task finds the caches as the previous task
left them, as it will in real runs: that task's results are cached, weights used long before may not
be. A task that is too short for the device's clock is timed many times in a row, with its arguments
in the cache.

An estimate may be a thousand times too low (an SVD, a task that sleeps), so a reading that is much
longer than its estimate is accepted if it is repeated. A reading beyond the peak performance of any
device is rejected, however often it is repeated.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autosched.costs.costs import Costs
from autosched.graph.graph import Graph, Task
from autosched.machine.machine import Device, Machine
from autosched.measurement.cache import MeasurementCache
from autosched.measurement.hardware import model_name, torch_device
from autosched.measurement.sanity import SLOW, least_work, objection, work_of
from autosched.measurement.serial_run import Call, run_serially
from autosched.measurement.signatures import Signature, signature_of, signature_text
from autosched.measurement.stopwatch import Reading, Stopwatch, stopwatch
from autosched.placement import constraint

__all__ = ["Bench"]

# Seconds that a reading of an accelerator's clock should span, which ticks every half microsecond.
_SHORT = 2e-5
_MOST = 64  # calls in a row
_LONG = 0.02  # longest CPU estimate for a task that is ten times faster on an accelerator
# Readings in which the device waited for the host, after which it is not kept busy any more.
_MISSES = 2


@dataclass
class Readings:
    """The measurements of calls of one signature."""

    task: Task  # the first of them
    issue: float = math.inf  # the least seconds that one took to launch
    calls: int = 1  # in a row, for one reading
    missed: int = 0
    readings: list[Reading] = field(default_factory=list)
    cached: bool = False  # from a file: slow readings were already repeated

    def is_done(self, repeat: int) -> bool:
        clean = sum(reading.clean for reading in self.readings)
        return clean >= repeat or len(self.readings) >= 2 * repeat

    def busy_seconds(self) -> float:
        """Return how long the device is to be kept busy while calls are launched."""
        return 2 * self.issue * self.calls if self.missed < _MISSES else 0.0

    def add(self, reading: Reading, short: bool) -> None:
        """Add a reading, or increase the number of calls that are timed in a row."""
        self.issue = min(self.issue, reading.issued)
        self.missed += not reading.clean
        if short and self.calls == 1 and reading.clean and reading.seconds < _SHORT:
            calls = math.ceil(_SHORT / max(reading.seconds, _SHORT / _MOST))
            self.calls = max(2, min(_MOST, calls))
            reading = reading._replace(clean=False)  # counts if there is no better one
        self.readings.append(reading)

    def median(self) -> Reading | None:
        counted = [reading for reading in self.readings if reading.clean] or self.readings
        if not counted:
            return None
        seconds = statistics.median(reading.seconds for reading in counted)
        return Reading(seconds, statistics.median(reading.issued for reading in counted))


@dataclass
class Bench:
    """The first of some equal devices, and the measurements on it."""

    graph: Graph
    machine: Machine
    inputs: Mapping[str, Any]
    known: Costs
    devices: tuple[Device, ...]
    repeat: int
    cached: MeasurementCache
    readings: dict[Signature, Readings] = field(default_factory=dict)
    signature: dict[str, Signature] = field(default_factory=dict)  # by task
    nbytes: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = torch_device(self.devices[0])
        self.model = model_name(self.device)
        self.watch: Stopwatch = stopwatch(self.device)

    def is_done(self, run: int) -> bool:
        """Whether nothing remains to be measured in a run after the first one."""
        return run > 0 and all(each.is_done(self.repeat) for each in self.readings.values())

    def run(self, warm: bool = False) -> None:
        """Run the graph serially once, and time what is not yet measured.

        To warm up, measure only the launches.
        """
        self.run_by(partial(self._call, warm))

    def run_by(self, call: Call) -> None:
        """Run the graph serially once; tasks are called by ``call``."""
        self.nbytes = run_serially(self.graph, self.inputs, self.device, self._place, call)

    def _elsewhere(self, task: Task) -> str | None:
        """Return the device where a task runs unmeasured, if any.

        It must run there, or would take too long on the device that is measured.
        """
        if not self.machine.accelerators:
            return None
        where = constraint(task, self.machine)
        if where is None and self.devices[0].kind == "cpu":
            devices = self.machine.devices
            seconds = {device.name: self.known.task_seconds(task, device) for device in devices}
            best = min(self.machine.accelerators, key=seconds.__getitem__)
            if seconds[self.devices[0].name] > max(_LONG, 10 * seconds[best]):
                return best
        return None if where in {device.name for device in self.devices} else where

    def _place(self, task: Task) -> torch.device:
        where = self._elsewhere(task)
        return self.device if where is None else torch_device(self.machine.device(where))

    def _call(self, warm: bool, task: Task, args: Any, kwargs: Any, where: torch.device) -> Any:
        """Call a task's function, and time it if a measurement is missing."""
        assert task.fn is not None
        call = partial(task.fn, *args, **kwargs)
        is_possible = self.known.task_seconds(task, self.devices[0]) < math.inf
        if task.view or self._elsewhere(task) or not is_possible:
            return call()
        signature = signature_of(task.fn, args, kwargs)
        self.signature[task.name] = signature
        measured = self.readings.get(signature) or self._new_readings(signature, task)
        # A task that writes, or keeps a state, may do other work when it is called again.
        repeatable = not (task.writes or task.shared)
        if measured.is_done(self.repeat) or (measured.calls > 1 and not repeatable):
            return call()
        busy = 0.0 if warm else measured.busy_seconds()
        reading, returned = self.watch.time([call] * measured.calls, busy)
        if warm:
            measured.issue = min(measured.issue, reading.issued)
        else:
            measured.add(reading, short=repeatable and self.device.type != "cpu")
        return returned

    def _new_readings(self, signature: Signature, task: Task) -> Readings:
        """Return the readings of a signature, from the cache if it has some."""
        measured = self.readings[signature] = Readings(task)
        if earlier := self.cached.get(self.model, signature_text(signature)):
            measured.readings = [Reading(*earlier)] * self.repeat
            measured.cached = True
        return measured

    # ---- accepted readings

    def accepted_readings(self) -> dict[str, Reading]:
        """Return the reading of each measured task.

        An impossible reading is repeated once, and then omitted.
        """
        first = {signature: measured.median() for signature, measured in self.readings.items()}
        odd = [key for key, measured in self.readings.items() if self._objection(measured)]
        for signature in odd:
            before = self.readings[signature]
            self.readings[signature] = Readings(before.task, before.issue)
        for number in range(self.repeat if odd else 0):
            if not self.is_done(number + 1):
                self.run()
        refused = {key for key in odd if self._is_refused(self.readings[key], first[key])}
        found = {}
        for signature, measured in self.readings.items():
            reading = measured.median()
            if reading is not None and signature not in refused:
                found[signature] = reading
                pair = reading.seconds, reading.issued
                self.cached.put(pair, self.model, signature_text(signature))
        tasks = self.signature.items()
        return {name: found[signature] for name, signature in tasks if signature in found}

    def _objection(self, measured: Readings) -> str | None:
        """Return why a reading is impossible, or should be repeated."""
        reading = measured.median()
        if reading is None:
            return None
        known = work_of(measured.task, self.known)
        device = self.devices[0]
        expected = 0.0 if known is None or measured.cached else known.seconds(device)
        if reading.seconds > SLOW * expected > 0:
            return f"is more than {SLOW} times what its work lets expect"
        return objection(reading.seconds, least_work(measured.task, self.known), device)

    def _is_refused(self, measured: Readings, before: Reading | None) -> bool:
        """Report a reading that is odd again; accept one as slow as before."""
        why = self._objection(measured)
        reading = measured.median()
        if why is None or reading is None or before is None:
            return False
        device = self.devices[0]
        possible = objection(reading.seconds, least_work(measured.task, self.known), device) is None
        slow = possible and before.seconds / 2 <= reading.seconds <= before.seconds * 2
        result = "it is left as estimated"
        if slow:
            result = "it was the same when measured again, and is accepted"
        took = f"task {measured.task.name!r} took {reading.seconds:.3g} s on {device.name}"
        self.complaints.append(f"{took}, which {why}; {result}")
        return not slow
