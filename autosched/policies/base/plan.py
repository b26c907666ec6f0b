"""Maintain a partial schedule: streams, start times and copies.

Answers the question of list scheduling: where would this task finish first, given everything that
is already placed? Tasks are inserted into gaps that are long enough. Copies are appended to the
copy streams that they occupy. The order of tasks is chosen by the caller.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autosched.errors import ScheduleError
from autosched.policies.base.problem import Path, Problem

__all__ = ["Plan", "Slot"]

_MOST_GAPS = 64  # examined; without a limit, many small gaps make planning quadratic

# A datum to read: when it is created, its number, its device, paths from there, bytes, and its
# arrival on other devices.
_Source = tuple[float, int, int, Sequence[Path], float, dict[int, float]]
_Copy = tuple[int, int, float]  # datum, source, end


class Slot(NamedTuple):
    """A device, stream and time at which a task could run, and the copies that this requires."""

    device: int
    stream: int
    gap: int  # index among the gaps of the stream
    start: float
    copies: list[_Copy]


class Plan:
    """A partial schedule: the tasks on each compute stream, the copies on each copy stream."""

    def __init__(self, problem: Problem):
        self.problem = problem
        devices = range(len(problem.devices))
        tasks = len(problem.tasks)
        self.device = [-1] * tasks
        self.start = [math.nan] * tasks
        self.finish = [0.0] * tasks
        # By device and stream: begins and ends of gaps. The last gap does not end.
        self.gaps = [[([0.0], [math.inf]) for _ in range(streams)] for streams in problem.streams]
        self.out_free = [0.0 for _ in devices]
        self.in_free = [0.0 for _ in devices]
        # By datum: the devices that it is copied to, and when it arrives there.
        self.arrival: list[dict[int, float]] = [{} for _ in problem.data.names]
        self.together = _group_seconds(problem)

    def earliest_finish(
        self, task: int, devices: Iterable[int], bias: Sequence[float] = ()
    ) -> Slot:
        """Return the slot of least finish time, or of least finish time plus ``bias[device]``.

        Ties go to the device named earlier. Raises ScheduleError if it fits nowhere.
        """
        best = self.find(task, devices, bias)
        if best is None:
            raise self.nowhere(task)
        return best

    def find(self, task: int, devices: Iterable[int], bias: Sequence[float] = ()) -> Slot | None:
        """Return the slot of ``earliest_finish``, or None."""
        after = self._after(task)
        sources = self._sources(task)
        total = self._total(task)
        best = None
        least = math.inf
        for device in devices:
            more = total[device] + bias[device] if bias else total[device]
            slot = self._slot(task, device, after, sources, least - more)
            if slot is not None and slot.start + more < least:
                best = slot
                least = slot.start + more
        return best

    def slots(self, task: int, devices: Iterable[int]) -> list[Slot]:
        """Return the earliest slot on each device on which the task can finish."""
        after = self._after(task)
        sources = self._sources(task)
        found = (self._slot(task, device, after, sources, math.inf) for device in devices)
        return [slot for slot in found if slot is not None and self.end(task, slot) < math.inf]

    def end(self, task: int, slot: Slot) -> float:
        """Return when a task and the rest of its group would end there.

        Its first task decides for all.
        """
        return slot.start + self._total(task)[slot.device]

    def commit(self, task: int, slot: Slot) -> Callable[[], None]:
        """Plan a task and its copies in this slot; return a function that undoes it.

        It must be called before anything else is planned.
        """
        device, stream, gap, start, copies = slot
        finish = start + self.problem.seconds[task][device]
        begins, ends = self.gaps[device][stream]
        whole = begins[gap], ends[gap]
        parts = [(a, b) for a, b in ((whole[0], start), (finish, whole[1])) if a < b]
        begins[gap : gap + 1] = [a for a, _ in parts]
        ends[gap : gap + 1] = [b for _, b in parts]
        self.device[task] = device
        self.start[task] = start
        self.finish[task] = finish
        held = []
        for datum, source, end in copies:
            self.arrival[datum][device] = end
            path = self.problem.paths[source][device]
            for holds, free, where in (
                (path.holds_out, self.out_free, source),
                (path.holds_in, self.in_free, device),
            ):
                if holds:
                    held.append((free, where, free[where]))
                    free[where] = end

        def undo() -> None:
            begins[gap : gap + len(parts)] = [whole[0]]
            ends[gap : gap + len(parts)] = [whole[1]]
            self.device[task] = -1
            self.start[task] = math.nan
            self.finish[task] = 0.0
            for free, where, since in reversed(held):
                free[where] = since
            for datum, _, _ in copies:
                del self.arrival[datum][device]

        return undo

    def nowhere(self, task: int) -> ScheduleError:
        """Return the error for a task without a slot."""
        name = self.problem.tasks[task]
        return ScheduleError(
            f"task {name!r} would end later than a float can say, wherever it runs"
        )

    def _after(self, task: int) -> float:
        """Return when all predecessors of a task that are planned have ended."""
        return max([self.finish[u] for u in self.problem.before[task]], default=0.0)

    def _total(self, task: int) -> Sequence[float]:
        """Return by device the duration of all tasks of the task's group."""
        return self.together.get(self.problem.group[task], self.problem.seconds[task])

    def _slot(
        self, task: int, device: int, after: float, sources: list[_Source], limit: float
    ) -> Slot | None:
        """Return the earliest slot on a device; None if its start is not below ``limit``."""
        copies: list[_Copy] = []
        ready = self._ready(device, sources, after, limit, copies)
        if ready >= limit:
            return None
        stream, gap, start = self._gap(device, ready, self.problem.seconds[task][device], limit)
        return Slot(device, stream, gap, start, copies) if start < limit else None

    def _sources(self, task: int) -> list[_Source]:
        """Return the existing or planned data that a task reads, by time of creation."""
        data = self.problem.data
        paths = self.problem.paths
        sources = []
        for datum in self.problem.reads[task]:
            maker = data.maker[datum]
            if maker >= 0 and self.device[maker] < 0:
                continue
            since, device = (
                (self.finish[maker], self.device[maker]) if maker >= 0 else (0.0, data.home[datum])
            )
            row = paths[device if maker >= 0 else data.row[datum]]
            sources.append((since, datum, device, row, data.nbytes[datum], self.arrival[datum]))
        sources.sort()
        return sources

    def _ready(
        self, device: int, sources: list[_Source], ready: float, limit: float, copies: list[_Copy]
    ) -> float:
        """Return when all of ``sources`` are on a device, and append the copies for that.

        Returns infinity as soon as the time is not below ``limit``.
        """
        in_free = self.in_free[device]
        out_free: dict[int, float] = {}  # after the copies so far
        for since, datum, source, paths, nbytes, arrival in sources:
            end = since if source == device else arrival.get(device)
            if end is None:
                latency, rate, holds_out, holds_in = paths[device]
                start = since
                if holds_out and (free := out_free.get(source, self.out_free[source])) > start:
                    start = free
                if holds_in and in_free > start:
                    start = in_free
                end = out_free[source] = start + (latency + nbytes / rate)
                if holds_in:
                    in_free = end
                copies.append((datum, source, end))
            if end > ready:
                ready = end
                if ready >= limit:
                    return math.inf
        return ready

    def _gap(
        self, device: int, ready: float, seconds: float, limit: float
    ) -> tuple[int, int, float]:
        """Return (stream, gap, start) of the earliest sufficient gap.

        Infinity if not below ``limit``.
        """
        found = (0, 0, math.inf)
        for stream, (begins, ends) in enumerate(self.gaps[device]):
            gap = first = bisect_right(ends, ready)
            start = max(ready, begins[gap])
            while start < limit and start + seconds > ends[gap]:
                gap = gap + 1 if gap < first + _MOST_GAPS else len(ends) - 1
                start = begins[gap]
            if start < limit:
                found = (stream, gap, start)
                limit = start
        return found


def _group_seconds(problem: Problem) -> dict[int, list[float]]:
    """Return for each group of several tasks their total duration on each device."""
    members: dict[int, list[int]] = {}
    for task, group in enumerate(problem.group):
        members.setdefault(group, []).append(task)
    return {
        group: [
            sum(column) for column in zip(*(problem.seconds[task] for task in tasks), strict=True)
        ]
        for group, tasks in members.items()
        if len(tasks) > 1
    }
