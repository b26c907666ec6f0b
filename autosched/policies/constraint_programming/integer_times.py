"""Convert a problem to integer times.

Where all durations are multiples of a power of ten, the conversion is exact. Otherwise they are
rounded down, to one part in ten million of the horizon. A lower bound proved for integer times then
holds for the durations in seconds, since no duration grew. So does a plan: rounded down, its starts
keep all that they kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from autosched.bounds import chains
from autosched.bounds.relaxation import Relaxation
from autosched.policies.base.possible import Possible
from autosched.problem import Problem

_PARTS = 10_000_000  # units of the horizon, if no unit is exact
_MOST = 10**8  # units of the horizon, at most, if a unit is exact

Moment = tuple[int, int]  # start, end


@dataclass(frozen=True)
class IntegerTimes:
    """The durations of a problem in units of ``unit`` seconds, and the devices of each task."""

    problem: Problem
    unit: float
    devices: Sequence[tuple[int, ...]]  # by task
    seconds: Sequence[Sequence[int]]  # [task][device], 0 where it may not go
    heads: Sequence[Sequence[int]]  # [task][device], a lower bound on its start there
    tails: Sequence[Sequence[int]]  # [task][device], and on the time after its end

    @classmethod
    @np.errstate(over="ignore")
    def of(cls, problem: Problem, horizon: float) -> IntegerTimes:
        """Convert a problem whose makespan is at most ``horizon`` seconds."""
        possible = Possible(problem)
        devices = [possible.devices(task) for task in range(len(problem.tasks))]
        unit = _unit(_durations(problem, devices), horizon)
        seconds = [
            [_count(number, unit) if p in allowed else 0 for p, number in enumerate(row)]
            for row, allowed in zip(problem.seconds, devices, strict=True)
        ]
        relaxed = Relaxation.of(problem)
        own = np.where(np.isinf(relaxed.seconds), 0.0, relaxed.seconds)
        heads, tails = (
            [[_count(number, unit) for number in row] for row in (passed - own).clip(0.0).tolist()]
            for passed in (chains.heads(relaxed), chains.tails(relaxed))
        )
        return cls(problem, unit, devices, seconds, heads, tails)

    def count(self, seconds: float) -> int:
        """Return a moment or a duration in units, rounded down but for rounding errors."""
        return _count(seconds, self.unit)

    @cached_property
    def sources(self) -> Sequence[tuple[tuple[int, int], ...]]:
        """Return for each datum the devices it may be copied from, each with its row of paths."""
        t = self.problem.lists
        return [
            tuple((q, q) for q in self.devices[maker]) if maker >= 0 else ((home, row),)
            for maker, home, row in zip(t.maker, t.home, t.row, strict=True)
        ]

    def copy(self, datum: int, row: int, destination: int) -> int:
        """Return the duration of a copy."""
        return _count(self.problem.copy_seconds(datum, row, destination), self.unit)

    @cached_property
    def apart(self) -> dict[tuple[int, int], dict[tuple[int, int], int]]:
        """Return the delay of a reader on one device after a producer on another.

        By (maker, reader), then (device, device), for delays that are not 0.
        """
        found: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                maker = self.problem.lists.maker[datum]
                if maker < 0 or self.problem.lists.group[maker] == self.problem.lists.group[task]:
                    continue
                between = found.setdefault((maker, task), {})
                for q, p in product(self.devices[maker], self.devices[task]):
                    seconds = self.copy(datum, q, p) if q != p else 0
                    if seconds > between.get((q, p), 0):
                        between[q, p] = seconds
        return found


def _durations(problem: Problem, devices: Sequence[Iterable[int]]) -> set[float]:
    found = {problem.seconds[task][p] for task, allowed in enumerate(devices) for p in allowed}
    t = problem.lists
    links = set(zip(t.latency, t.rate, strict=True))
    found |= {latency + nbytes / rate for latency, rate in links for nbytes in set(t.nbytes)}
    return {seconds for seconds in found if seconds < math.inf}


def _unit(durations: Iterable[float], horizon: float) -> float:
    """Return the largest power of ten dividing all durations, or else a part of the horizon."""
    numbers = sorted(durations)
    exponent = math.floor(math.log10(horizon)) - 1 if horizon else 0
    while horizon < _MOST * 10.0**exponent:
        unit = 10.0**exponent
        if all(abs(number - unit * round(number / unit)) <= 1e-7 * unit for number in numbers):
            return unit
        exponent -= 1
    return horizon / _PARTS


def _count(seconds: float, unit: float) -> int:
    """Return a duration in units, rounded down except for floating-point rounding errors.

    One that no plan within the horizon can have counts no more than any other such.
    """
    return math.floor(min(seconds / unit, 2.0 * _MOST) + 1e-6)
