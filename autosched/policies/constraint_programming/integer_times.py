"""Convert a problem to integer times, and evaluate placements in them.

Where all durations are multiples of a power of ten, the conversion is exact. Otherwise they are
rounded down, to one part in ten million of the horizon. A lower bound proved for integer times then
holds for the durations in seconds, since no duration grew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from itertools import product

from autosched.policies.base.kernels import send
from autosched.policies.base.possible import Possible
from autosched.problem import Problem

_PARTS = 10_000_000  # units of the horizon, if no unit is exact
_MOST = 10**8  # units of the horizon, at most, if a unit is exact

Moment = tuple[int, int]  # start, end


@dataclass(frozen=True)
class Times:
    """Start and end of tasks, and of copies of a datum to a device; and the makespan."""

    tasks: Sequence[Moment]
    copies: dict[tuple[int, int], Moment]
    makespan: int


@dataclass(frozen=True)
class IntegerTimes:
    """The durations of a problem in units of ``unit`` seconds, and the devices of each task."""

    problem: Problem
    unit: float
    devices: Sequence[tuple[int, ...]]  # by task
    seconds: Sequence[Sequence[int]]  # [task][device], 0 where it may not go

    @classmethod
    def of(cls, problem: Problem, horizon: float) -> IntegerTimes:
        """Convert a problem whose makespan is at most ``horizon`` seconds."""
        possible = Possible(problem)
        devices = [possible.devices(task) for task in range(len(problem.tasks))]
        unit = _unit(_durations(problem, devices), horizon)
        seconds = [
            [_count(number, unit) if p in allowed else 0 for p, number in enumerate(row)]
            for row, allowed in zip(problem.seconds, devices, strict=True)
        ]
        return cls(problem, unit, devices, seconds)

    @classmethod
    def fitting(
        cls,
        problem: Problem,
        device: Sequence[int],
        order: Sequence[int],
        copies: Sequence[tuple[int, int]] = (),
    ) -> IntegerTimes:
        """Convert a problem whose makespan is at most that of a placement."""
        rough = cls.of(problem, sum(problem.seconds[task][p] for task, p in enumerate(device)))
        return cls.of(problem, rough.times(device, order, copies).makespan * rough.unit)

    @cached_property
    def sources(self) -> Sequence[tuple[tuple[int, int], ...]]:
        """Return for each datum the devices it may be copied from, each with its row of paths."""
        t = self.problem.lists
        return [
            tuple((q, q) for q in self.devices[maker]) if maker >= 0 else ((home, row),)
            for maker, home, row in zip(t.maker, t.home, t.row, strict=True)
        ]

    def copy(self, datum: int, row: int, destination: int) -> int | None:
        """Return the duration of a copy, None without a link."""
        seconds = self.problem.copy_seconds(datum, row, destination)
        return _count(seconds, self.unit) if seconds < math.inf else None

    @cached_property
    def contended(self) -> bool:
        """Return whether copies occupy streams."""
        return any(self.problem.lists.holds_out) or any(self.problem.lists.holds_in)

    @cached_property
    def apart(self) -> dict[tuple[int, int], dict[tuple[int, int], int | None]]:
        """Return the delay of a reader on one device after a producer on another.

        None without a link.

        By (maker, reader), then (device, device), for delays that are not 0.
        """
        found: dict[tuple[int, int], dict[tuple[int, int], int | None]] = {}
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                maker = self.problem.lists.maker[datum]
                if maker < 0 or self.problem.lists.group[maker] == self.problem.lists.group[task]:
                    continue
                between = found.setdefault((maker, task), {})
                for q, p in product(self.devices[maker], self.devices[task]):
                    seconds = self.copy(datum, q, p) if q != p else 0
                    if seconds is None or ((q, p) in between and between[q, p] is None):
                        between[q, p] = None
                    elif seconds > (between.get((q, p)) or 0):
                        between[q, p] = seconds
        return found

    @cached_property
    def heads(self) -> Sequence[Sequence[int]]:
        """Return by task and device a lower bound on its start there."""
        given = [[0] * len(self.problem.devices) for _ in self.devices]
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                if self.problem.lists.maker[datum] < 0:
                    ((_, row),) = self.sources[datum]
                    for p in self.devices[task]:
                        given[task][p] = max(given[task][p], self.copy(datum, row, p) or 0)
        tasks = range(len(self.devices))
        return self._longest(tasks, self.problem.before, given, forward=True)

    @cached_property
    def returned(self) -> Sequence[Sequence[int]]:
        """Return by task and device how long it takes to copy written inputs back to their home."""
        found = [[0] * len(self.problem.devices) for _ in self.devices]
        for datum, home in self.problem.returns:
            maker = self.problem.lists.maker[datum]
            for p in self.devices[maker]:
                found[maker][p] = max(found[maker][p], self.copy(datum, p, home) or 0)
        return found

    @cached_property
    def tails(self) -> Sequence[Sequence[int]]:
        """Return by task and device a lower bound on the time after its end there."""
        tasks = reversed(range(len(self.devices)))
        return self._longest(tasks, self.problem.after, self.returned, forward=False)

    def _longest(
        self,
        tasks: Iterable[int],
        beside: Sequence[Iterable[int]],
        given: Sequence[Sequence[int]],
        forward: bool,
    ) -> list[list[int]]:
        """Return the longest path to each task and device, other tasks on their best devices."""
        passed = [list(row) for row in given]
        for task in tasks:
            for other in beside[task]:
                between = self.apart.get((other, task) if forward else (task, other), {})
                same = self.problem.lists.group[task] == self.problem.lists.group[other]
                for p in self.devices[task]:
                    ways = [
                        passed[other][q] + self.seconds[other][q] + seconds
                        for q in ((p,) if same else self.devices[other])
                        if (seconds := between.get((q, p) if forward else (p, q), 0)) is not None
                    ]
                    passed[task][p] = max(passed[task][p], min(ways, default=0))
        return passed

    def times(
        self, device: Sequence[int], order: Iterable[int], copies: Iterable[tuple[int, int]] = ()
    ) -> Times:
        """Return the times if tasks start in this order, and copies (datum, device) in theirs.

        Copies that are not listed start when they are first needed. On a device with several
        compute streams, a task gets the one that is free first.
        """
        clock = _Clock(self, device, copies)
        for task in order:
            clock.run(task)
        for datum, home in self.problem.returns:
            clock.bring(datum, home)
        moments = [clock.tasks[task] for task in range(len(self.devices))]
        ends = (end for _, end in (*moments, *clock.copies.values()))
        return Times(moments, clock.copies, max(ends, default=0))


class _Clock:
    """Start and end of tasks and copies, computed in the order of their starts."""

    def __init__(
        self, integer: IntegerTimes, device: Sequence[int], copies: Iterable[tuple[int, int]]
    ):
        self.integer = integer
        self.problem = integer.problem
        self.device = device
        self.streams = [[0] * count for count in self.problem.lists.streams]  # heaps
        self.out_free = [0] * len(self.streams)
        self.in_free = [0] * len(self.streams)
        self.tasks: dict[int, Moment] = {}
        self.copies: dict[tuple[int, int], Moment] = {}
        self.waiting = dict.fromkeys(copies)

    def run(self, task: int) -> None:
        """Run a task after its data arrive, as soon as its device is free."""
        p = self.device[task]
        arrivals = [self.bring(datum, p) for datum in self.problem.reads[task]]
        ends = (self.tasks[other][1] for other in self.problem.before[task])
        start = max([self.streams[p][0], *arrivals, *ends])
        end = start + self.integer.seconds[task][p]
        heapreplace(self.streams[p], end)
        self.tasks[task] = start, end

    def bring(self, datum: int, p: int) -> int:
        """Return when a datum is on a device; first issue the copies that precede it."""
        maker = self.problem.lists.maker[datum]
        if self._source(datum)[0] == p:
            return self.tasks[maker][1] if maker >= 0 else 0
        self.waiting.setdefault((datum, p))
        while (datum, p) not in self.copies:
            self._send(*next(copy for copy in self.waiting if self._is_made(copy[0])))
        return self.copies[datum, p][1]

    def _is_made(self, datum: int) -> bool:
        maker = self.problem.lists.maker[datum]
        return maker < 0 or maker in self.tasks

    def _source(self, datum: int) -> tuple[int, int]:
        maker = self.problem.lists.maker[datum]
        if maker < 0:
            return self.integer.sources[datum][0]
        return self.device[maker], self.device[maker]

    def _send(self, datum: int, p: int) -> None:
        del self.waiting[datum, p]
        t = self.problem.lists
        maker = t.maker[datum]
        q, row = self._source(datum)
        since = self.tasks[maker][1] if maker >= 0 else 0
        seconds = self.integer.copy(datum, row, p) or 0
        path = row * len(self.streams) + p
        start = send(t, path, since, seconds, self.out_free, q, self.in_free, p)
        self.copies[datum, p] = start, start + seconds


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
    """Return a duration in units, rounded down except for floating-point rounding errors."""
    return math.floor(seconds / unit + 1e-6)
