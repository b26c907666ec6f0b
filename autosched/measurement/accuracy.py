"""Compare a schedule's predicted makespan with its measured run time.

Runs are timed by the host's clock and without profiling.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from autosched.measurement.hardware import torch_device
from autosched.measurement.stopwatch import synchronize
from autosched.scheduling.schedule import Schedule

__all__ = ["Accuracy", "accuracy"]


class Accuracy(NamedTuple):
    """The predicted seconds, and the median of the measured ones."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """The predicted seconds divided by the measured ones; less than 1 is too optimistic."""
        return self.predicted / self.measured


def accuracy(
    schedule: Schedule, inputs: Mapping[str, Any], *, repeat: int = 9, warmup: int = 3
) -> Accuracy:
    """Time runs of a schedule until all devices are idle, and compare with its prediction.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> with asc.schedule(graph, asc.Machine.emulated(gpus=0)) as schedule:
    ...     0 < accuracy(schedule, {"x": 1}).ratio
    True
    """
    devices = () if schedule.machine.imagined else schedule.machine.devices
    physical = list(dict.fromkeys(map(torch_device, devices)))
    times = []
    for _ in range(warmup + repeat):
        synchronize(*physical)
        start = time.perf_counter()
        schedule(**inputs)
        synchronize(*physical)
        times.append(time.perf_counter() - start)
    return Accuracy(schedule.makespan, statistics.median(times[warmup:]))
