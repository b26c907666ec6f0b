"""Time the calls of a graph in serial runs on one device.

The device stands for all equal devices of a machine. A device is measured while it is kept busy: a
kernel that sleeps holds it until all of a task is launched, so that two events measure the kernels,
and the host's clock measures the launches. A task costs the larger of the two, or only the first if
the schedule will be replayed.

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
from autosched.measurement.kept import Kept, model, real
from autosched.measurement.sanity import SLOW, doubt, work_of
from autosched.measurement.shapes import Shape, shape_of, spelt
from autosched.measurement.stopwatch import Reading, Stopwatch, stopwatch
from autosched.measurement.walking import walk
from autosched.placement import constraint

__all__ = ["Bench"]

_SHORT = 2e-5  # seconds that a reading of an accelerator's clock should span, which ticks every half microsecond
_MOST = 64  # calls in a row
_LONG = 0.02  # longest CPU estimate for a task that is ten times faster on an accelerator
_MISSES = (
    2  # readings in which the device waited for the host, after which it is not kept busy any more
)


@dataclass
class Readings:
    """The measurements of calls of one shape."""

    task: Task  # the first of them
    issue: float = math.inf  # the least seconds that one took to launch
    calls: int = 1  # in a row, for one reading
    missed: int = 0
    readings: list[Reading] = field(default_factory=list)
    kept: bool = False  # from a file: slow readings were already repeated

    def is_done(self, repeat: int) -> bool:
        return (
            sum(reading.clean for reading in self.readings) >= repeat
            or len(self.readings) >= 2 * repeat
        )

    def ahead(self) -> float:
        """Return how long the device is to be kept busy while calls are launched."""
        return 2 * self.issue * self.calls if self.missed < _MISSES else 0.0

    def note(self, reading: Reading, short: bool) -> None:
        """Add a reading, or increase the number of calls that are timed in a row."""
        self.issue = min(self.issue, reading.issued)
        self.missed += not reading.clean
        if short and self.calls == 1 and reading.clean and reading.seconds < _SHORT:
            self.calls = max(
                2, min(_MOST, math.ceil(_SHORT / max(reading.seconds, _SHORT / _MOST)))
            )
            reading = reading._replace(clean=False)  # counts if there is no better one
        self.readings.append(reading)

    def median(self) -> Reading | None:
        counted = [reading for reading in self.readings if reading.clean] or self.readings
        if not counted:
            return None
        return Reading(
            *(statistics.median(pair) for pair in zip(*(r[:2] for r in counted), strict=True))
        )


class Bench:
    """The first of some equal devices, and the measurements on it."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        inputs: Mapping[str, Any],
        known: Costs,
        devices: tuple[Device, ...],
        repeat: int,
        kept: Kept,
    ):
        self.graph = graph
        self.machine = machine
        self.inputs = inputs
        self.known = known
        self.devices = devices
        self.repeat = repeat
        self.kept = kept
        self.device = real(devices[0])
        self.model = model(self.device)
        self.watch: Stopwatch = stopwatch(self.device)
        self.works: dict[Shape, Readings] = {}
        self.shape: dict[str, Shape] = {}  # by task
        self.nbytes: dict[str, float] = {}
        self.complaints: list[str] = []

    def is_done(self, run: int) -> bool:
        """Whether nothing remains to be measured in a run after the first one."""
        return run > 0 and all(work.is_done(self.repeat) for work in self.works.values())

    def walk(self, warm: bool = False) -> None:
        """Run the graph serially once, and time what is not yet measured.

        To warm up, measure only the launches.
        """
        self.nbytes = walk(
            self.graph, self.inputs, self.device, self._place, partial(self._do, warm)
        )

    def _elsewhere(self, task: Task) -> str | None:
        """Return the device where a task runs unmeasured: where it must, or because it would take too long here."""
        if not self.machine.accelerators:
            return None
        where = constraint(task, self.machine)
        if where is None and self.devices[0].kind == "cpu":
            seconds = {
                name: self.known.task_seconds(task, self.machine.device(name))
                for name in self.machine.names
            }
            best = min(self.machine.accelerators, key=seconds.__getitem__)
            if seconds[self.devices[0].name] > max(_LONG, 10 * seconds[best]):
                return best
        return None if where in {device.name for device in self.devices} else where

    def _place(self, task: Task) -> torch.device:
        where = self._elsewhere(task)
        return self.device if where is None else real(self.machine.device(where))

    def _do(self, warm: bool, task: Task, args: Any, kwargs: Any, where: torch.device) -> Any:
        assert task.fn is not None
        call = partial(task.fn, *args, **kwargs)
        if (
            task.view
            or self._elsewhere(task)
            or math.isinf(self.known.task_seconds(task, self.devices[0]))
        ):
            return call()
        shape = self.shape[task.name] = shape_of(task.fn, args, kwargs)
        work = self.works.get(shape)
        if work is None:
            work = self.works[shape] = Readings(task)
            if earlier := self.kept.get(self.model, spelt(shape)):
                work.readings = [Reading(*earlier)] * self.repeat
                work.kept = True
        if work.is_done(self.repeat):
            return call()
        repeatable = not (task.writes or task.shared)  # and not from one call to the next another
        if work.calls > 1 and not repeatable:
            return call()
        reading, returned = self.watch.time([call] * work.calls, 0.0 if warm else work.ahead())
        if warm:
            work.issue = min(work.issue, reading.issued)
        else:
            work.note(reading, short=repeatable and self.device.type != "cpu")
        return returned

    # ---- accepted readings

    def believed(self, replay: bool) -> dict[str, float]:
        """Return the seconds of each measured task.

        An impossible reading is repeated once, and then omitted.
        """
        first = {shape: work.median() for shape, work in self.works.items()}
        odd = {shape: why for shape, work in self.works.items() if (why := self._doubt(work))}
        for shape in odd:
            self.works[shape] = Readings(self.works[shape].task, self.works[shape].issue)
        for run in range(self.repeat if odd else 0):
            if not self.is_done(run + 1):
                self.walk()
        refused = {shape for shape in odd if self._refused(self.works[shape], first[shape])}
        found = {}
        for shape, work in self.works.items():
            reading = work.median()
            if reading is not None and shape not in refused:
                found[shape] = reading.seconds if replay else max(reading.seconds, reading.issued)
                self.kept.put((reading.seconds, reading.issued), self.model, spelt(shape))
        return {name: found[shape] for name, shape in self.shape.items() if shape in found}

    def _doubt(self, work: Readings) -> str | None:
        """Return why a reading is impossible, or should be repeated."""
        reading = work.median()
        if reading is None:
            return None
        known = work_of(work.task, self.known)
        device = self.devices[0]
        if (
            known is not None
            and not work.kept
            and reading.seconds > SLOW * known.seconds(device) > 0
        ):
            return f"is more than {SLOW} times what its work lets expect"
        return doubt(reading.seconds, known, device)

    def _refused(self, work: Readings, before: Reading | None) -> bool:
        """Report a reading that is odd again; a slow one that is as slow as before is accepted."""
        why = self._doubt(work)
        reading = work.median()
        if why is None or reading is None or before is None:
            return False
        possible = doubt(reading.seconds, work_of(work.task, self.known), self.devices[0]) is None
        slow = possible and before.seconds / 2 <= reading.seconds <= before.seconds * 2
        then = (
            "it was the same when measured again, and is believed"
            if slow
            else "it is left as estimated"
        )
        self.complaints.append(
            f"task {work.task.name!r} took {reading.seconds:.3g} s on {self.devices[0].name}, which {why}; {then}"
        )
        return not slow
