"""Compare a schedule's predicted makespan with its measured run time.

Runs are timed by the host's clock and without profiling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from autosched.measurement.kept import real
from autosched.measurement.stopwatch import settle
from autosched.scheduling.schedule import Schedule

__all__ = ["Accuracy", "accuracy"]


class Accuracy(NamedTuple):
    """The predicted seconds, and the median of the measured ones."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """The predicted seconds divided by the measured ones: 1 is exact, less is too optimistic."""
        return self.predicted / self.measured


def accuracy(
    schedule: Schedule, inputs: Mapping[str, Any], *, repeat: int = 9, warmup: int = 3
) -> Accuracy:
    """Run a schedule, and compare the time with its prediction: from the call until all devices are idle.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> with asc.schedule(graph, asc.Machine.emulated(gpus=0)) as schedule:
    ...     0 < accuracy(schedule, {"x": 1}).ratio
    True
    """
    real_ones = () if schedule.machine.imagined else schedule.machine.devices
    devices = list(dict.fromkeys(map(real, real_ones)))
    times = []
    for _ in range(warmup + repeat):
        settle(*devices)
        start = time.perf_counter()
        schedule(**inputs)
        settle(*devices)
        times.append(time.perf_counter() - start)
    return Accuracy(schedule.makespan, statistics.median(times[warmup:]))
