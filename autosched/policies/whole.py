"""Whole: a problem in whole units of time, for solvers that count; and when everything happens if tasks are so placed.

Where all seconds are multiples of a power of ten nothing is lost. Else they are rounded down, to one part in ten
million of the horizon: what is proved of the whole units holds of the seconds, since no time got longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from autosched.policies.possible import Possible
from autosched.policies.problem import Problem

__all__ = ["Moment", "Times", "Whole"]

_PARTS = 10_000_000  # units of the horizon, where none is exact
_MOST = 10**8  # units of the horizon, where one is

Moment = tuple[int, int]  # start, end


@dataclass(frozen=True)
class Times:
    """When tasks, and copies of a datum to a device, start and end; and when the last has ended."""

    tasks: Sequence[Moment]
    copies: dict[tuple[int, int], Moment]
    makespan: int


@dataclass(frozen=True)
class Whole:
    """The tables of a problem that have times, in units of ``unit`` seconds; where tasks may go is decided."""

    problem: Problem
    unit: float
    devices: Sequence[tuple[int, ...]]  # by task
    seconds: Sequence[Sequence[int]]  # [task][device], 0 where it may not go

    @classmethod
    def of(cls, problem: Problem, horizon: float) -> Whole:
        """Count a problem whose makespan is at most ``horizon`` seconds. Raises ScheduleError as ``Possible``."""
        possible = Possible(problem)
        devices = [possible.devices(task) for task in range(len(problem.tasks))]
        unit = _unit(_durations(problem, devices), horizon)
        seconds = [
            [_count(number, unit) if p in allowed else 0 for p, number in enumerate(row)]
            for row, allowed in zip(problem.seconds, devices, strict=True)
        ]
        return cls(problem, unit, devices, seconds)

    @classmethod
    def fitting(cls, problem: Problem, device: Sequence[int], order: Sequence[int]) -> Whole:
        """Count a problem whose makespan is at most that of a placement."""
        rough = cls.of(problem, sum(problem.seconds[task][p] for task, p in enumerate(device)))
        return cls.of(problem, rough.times(device, order).makespan * rough.unit)

    @cached_property
    def sources(self) -> Sequence[tuple[tuple[int, int], ...]]:
        """Return for each datum the devices where it may come from, each with its row of paths."""
        data = self.problem.data
        return [
            tuple((q, q) for q in self.devices[maker]) if maker >= 0 else ((data.home[datum], data.row[datum]),)
            for datum, maker in enumerate(data.maker)
        ]

    def copy(self, datum: int, row: int, destination: int) -> int | None:
        """Return how long a copy takes, None if no link is there."""
        seconds = self.problem.paths[row][destination].seconds(self.problem.data.nbytes[datum])
        return _count(seconds, self.unit) if seconds < math.inf else None

    @cached_property
    def contended(self) -> bool:
        """Return whether copies occupy anything."""
        return any(path.holds_out or path.holds_in for row in self.problem.paths for path in row)

    def always_out(self, datum: int, destination: int) -> bool:
        """Return whether a copy holds the copy-out stream of wherever it comes from."""
        paths = self.problem.paths
        return all(paths[row][destination].holds_out for q, row in self.sources[datum] if q != destination)

    def always_in(self, datum: int, destination: int) -> bool:
        """Return whether a copy holds the copy-in stream of its destination, wherever it comes from."""
        paths = self.problem.paths
        return all(paths[row][destination].holds_in for q, row in self.sources[datum] if q != destination)

    @cached_property
    def apart(self) -> dict[tuple[int, int], dict[tuple[int, int], int | None]]:
        """Return how long after a maker, on one device, its reader can start on another; None where no link is.

        By (maker, reader), then (device, device), where that is not at once.
        """
        found: dict[tuple[int, int], dict[tuple[int, int], int | None]] = {}
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                maker = self.problem.data.maker[datum]
                if maker < 0 or self.problem.group[maker] == self.problem.group[task]:
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
        """Return by task and device the time that passes at least before it starts there."""
        given = [[0] * len(self.problem.devices) for _ in self.devices]
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                if self.problem.data.maker[datum] < 0:
                    ((_, row),) = self.sources[datum]
                    for p in self.devices[task]:
                        given[task][p] = max(given[task][p], self.copy(datum, row, p) or 0)
        before = [dict.fromkeys(makers) for makers in self.problem.before]
        return self._longest(range(len(before)), before, given, forward=True)

    @cached_property
    def returned(self) -> Sequence[Sequence[int]]:
        """Return by task and device how long it takes to bring back what goes back to its home."""
        found = [[0] * len(self.problem.devices) for _ in self.devices]
        for datum, home in self.problem.returns:
            maker = self.problem.data.maker[datum]
            for p in self.devices[maker]:
                found[maker][p] = max(found[maker][p], self.copy(datum, p, home) or 0)
        return found

    @cached_property
    def tails(self) -> Sequence[Sequence[int]]:
        """Return by task and device the time that passes at least after it has ended there."""
        after: list[dict[int, None]] = [{} for _ in self.devices]
        for task, makers in enumerate(self.problem.before):
            for maker in makers:
                after[maker][task] = None
        return self._longest(reversed(range(len(after))), after, self.returned, forward=False)

    def _longest(
        self, tasks: Iterable[int], beside: Sequence[Iterable[int]], given: Sequence[Sequence[int]], forward: bool
    ) -> list[list[int]]:
        """Return the longest way to each task and device that no choice of devices of the others makes shorter."""
        passed = [list(row) for row in given]
        for task in tasks:
            for other in beside[task]:
                between = self.apart.get((other, task) if forward else (task, other), {})
                same = self.problem.group[task] == self.problem.group[other]
                for p in self.devices[task]:
                    ways = [
                        passed[other][q] + self.seconds[other][q] + seconds
                        for q in ((p,) if same else self.devices[other])
                        if (seconds := between.get((q, p) if forward else (p, q), 0)) is not None
                    ]
                    passed[task][p] = max(passed[task][p], min(ways, default=0))
        return passed

    def times(self, device: Sequence[int], order: Iterable[int]) -> Times:
        """Return when everything happens in the program that such a placement is lowered to.

        Copies stand behind what makes the datum, in the order in which they are first needed. Of several compute
        streams of a device a task gets the one that is free first.
        """
        problem, data, order = self.problem, self.problem.data, list(order)
        needed = [(datum, device[task]) for task in order for datum in problem.reads[task]] + list(problem.returns)
        sent: dict[int, list[tuple[int, int]]] = {}  # by maker
        for datum, p in dict.fromkeys(needed):
            sent.setdefault(data.maker[datum], []).append((datum, p))
        streams = [[0] * count for count in problem.streams]
        out_free, in_free = [0] * len(streams), [0] * len(streams)
        moments: list[Moment] = [(0, 0)] * len(order)
        copies: dict[tuple[int, int], Moment] = {}

        def send(maker: int, since: int) -> None:
            for datum, p in sent.get(maker, ()):
                q, row = (device[maker], device[maker]) if maker >= 0 else self.sources[datum][0]
                if q != p:
                    path, start = problem.paths[row][p], since
                    start = max(start, out_free[q] if path.holds_out else 0, in_free[p] if path.holds_in else 0)
                    end = start + (self.copy(datum, row, p) or 0)
                    out_free[q] = end if path.holds_out else out_free[q]
                    in_free[p] = end if path.holds_in else in_free[p]
                    copies[datum, p] = start, end

        send(-1, 0)
        for task in order:
            p = device[task]
            stream = min(range(len(streams[p])), key=streams[p].__getitem__)
            arrivals = [copies[datum, p][1] for datum in problem.reads[task] if (datum, p) in copies]
            start = max([streams[p][stream], *arrivals, *(moments[u][1] for u in problem.before[task])])
            streams[p][stream] = end = start + self.seconds[task][p]
            moments[task] = start, end
            send(task, end)
        return Times(moments, copies, max([end for _, end in (*moments, *copies.values())], default=0))


def _durations(problem: Problem, devices: Sequence[Iterable[int]]) -> set[float]:
    """Return all seconds that may count: of tasks, and of copies."""
    found = {problem.seconds[task][p] for task, allowed in enumerate(devices) for p in allowed}
    paths = {path for row in problem.paths for path in row}
    found |= {path.seconds(nbytes) for path in paths for nbytes in set(problem.data.nbytes)}
    return {seconds for seconds in found if seconds < math.inf}


def _unit(durations: Iterable[float], horizon: float) -> float:
    """Return the largest power of ten of which all are multiples, if that is not too small; else a small part."""
    numbers = sorted(durations)
    exponent = math.floor(math.log10(horizon)) - 1 if horizon else 0
    while horizon < _MOST * 10.0**exponent:
        unit = 10.0**exponent
        if all(abs(number - unit * round(number / unit)) <= 1e-7 * unit for number in numbers):
            return unit
        exponent -= 1
    return horizon / _PARTS


def _count(seconds: float, unit: float) -> int:
    """Return how many units these seconds have, rounded down but for the rounding of floating point numbers."""
    return math.floor(seconds / unit + 1e-6)
