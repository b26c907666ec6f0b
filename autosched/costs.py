"""Costs: how many seconds a task takes on a device, how many bytes a value has.

Pure data, given by a table, estimated from work and rates (the roofline model), or learnt from a profile.
Where a copy goes and how long the link takes is the machine's part. Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

from autosched.errors import ScheduleError
from autosched.graph import Graph, Task, Value
from autosched.machine import Device

__all__ = ["Costs", "Work"]

Seconds = float | Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """What a task does, whatever the device: floating point operations, and bytes read and written.

    >>> Work(flops=2e9, nbytes=1e6).seconds(Device("cuda:0", flops_per_second=1e12, launch_seconds=0))
    0.002
    """

    flops: float
    nbytes: float

    def seconds(self, device: Device) -> float:
        """Return the seconds on a device by the roofline model (Williams, Waterman, Patterson, CACM 2009)."""
        busy = max(self.flops / device.flops_per_second, self.nbytes / device.bytes_per_second)
        return device.launch_seconds + busy


@dataclass(frozen=True)
class Costs:
    """Seconds per task and device, bytes per value. What comes first here wins.

    1. ``seconds`` and ``nbytes`` of this table, by name; 2. what the user said when adding the task;
    3. views cost nothing; 4. the roofline of ``work``; 5. ``default_seconds`` and ``default_nbytes``.

    >>> costs = Costs.table(seconds={"a": 1.0, "b": {"cpu:0": 2.0, "cpu:1": 3.0}}, nbytes={"a": 4096})
    >>> costs.override(seconds={"a": 0.5}).seconds["a"]
    0.5
    """

    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    nbytes: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, Work] = field(default_factory=dict)
    default_seconds: float = 1e-5
    default_nbytes: float = 0.0

    @classmethod
    def table(cls, seconds: Mapping[str, Seconds], nbytes: Mapping[str, float] | None = None) -> Costs:
        """Make costs of plain tables: seconds by task name (a number, or one per device), bytes by value name.

        Raises ScheduleError for numbers that are negative or no numbers.
        """
        return cls().override(seconds, nbytes)

    def override(
        self, seconds: Mapping[str, Seconds] | None = None, nbytes: Mapping[str, float] | None = None
    ) -> Costs:
        """Return costs in which these entries replace or join what is there."""
        for name, given in (seconds or {}).items():
            for number in given.values() if isinstance(given, Mapping) else [given]:
                _check(number, f"seconds of {name!r}")
        for name, number in (nbytes or {}).items():
            _check(number, f"nbytes of {name!r}")
        return replace(self, seconds={**self.seconds, **(seconds or {})}, nbytes={**self.nbytes, **(nbytes or {})})

    def task_seconds(self, task: Task, device: Device) -> float:
        """Return the seconds of a task on a device; infinity where a table per device leaves the device out."""
        given = self.seconds.get(task.name, task.seconds)
        if given is not None:
            return float(given.get(device.name, math.inf) if isinstance(given, Mapping) else given)
        if task.view:
            return 0.0
        work = self.work.get(task.name)
        return self.default_seconds if work is None else work.seconds(device)

    def value_nbytes(self, value: Value) -> float:
        """Return the bytes of a value."""
        given = self.nbytes.get(value.name, value.nbytes)
        return float(self.default_nbytes if given is None else given)

    def check(self, graph: Graph) -> None:
        """Raise ScheduleError if a table names what the graph does not have: a misspelt name would cost nothing."""
        tasks = {task.name for task in graph.tasks}
        values = {value.name for value in graph.values}
        for kind, given, known in (("seconds", self.seconds, tasks), ("nbytes", self.nbytes, values)):
            for name in given:
                if name not in known:
                    raise ScheduleError(f"costs give {kind} for {name!r}, which graph {graph.name!r} does not have")


def _check(number: float, what: str) -> None:
    if isinstance(number, bool) or not isinstance(number, Real) or not number >= 0:
        raise ScheduleError(f"{what} must be a number, 0 or more, got {number!r}")
