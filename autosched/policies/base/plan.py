"""Maintain a partial schedule, and find where a task would finish first.

Tasks are inserted into gaps that are long enough. Copies are appended to the copy streams that they
occupy. The arithmetic is that of ``kernels``, uncompiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from autosched._lib.jit import Mode
from autosched.errors import ScheduleError
from autosched.policies.base.kernels import Planning, arrive, earliest_gap, issue, sources, take
from autosched.problem import Problem

_NOWHERE = math.inf, -1, -1


class Slot(NamedTuple):
    """A device, a gap of a stream, and a time at which a task could start."""

    device: int
    stream: int
    gap: int
    start: float


class Plan:
    """A partial schedule: the tasks on each compute stream, the copies on each copy stream."""

    def __init__(self, problem: Problem):
        self.problem = problem
        tasks = len(problem.tasks)
        self.device = [-1] * tasks
        self.start = [math.nan] * tasks
        self.finish = [0.0] * tasks
        self._tables = problem.lists
        self._seconds = problem.seconds
        self._total = problem.together
        self._stored = -1  # the task whose sources are stored in `state`,
        self._count = 0  # and their number
        self.state = Planning.of(problem.tables, Mode(False), tasks + 1)

    def earliest_finish(self, task: int, devices: Iterable[int]) -> Slot:
        """Return the slot of least finish time; ties go to the device named earlier.

        The first task of a group decides for all. Raises ScheduleError if it fits nowhere.
        """
        total = self._total[task]
        count = self._sources(task)
        ready = self._ready(task)
        best: Slot | None = None
        least = math.inf
        for device in devices:
            start, stream, gap = self._gap(task, device, count, ready, least - total[device])
            if start + total[device] < least:
                best = Slot(device, stream, gap, start)
                least = start + total[device]
        if best is None:
            name = self.problem.tasks[task]
            raise ScheduleError(
                f"task {name!r} would end later than a float can say, wherever it runs"
            )
        return best

    def commit(self, task: int, slot: Slot) -> None:
        """Plan a task and its copies in this slot."""
        device, stream, gap, start = slot
        s = self.state
        arrive(self._tables, device, self._sources(task), 0.0, math.inf, s, True)
        if s.issues:
            issue(self._tables, self._where(task, device), 0.0, s, True)
        finish = start + self._seconds[task][device]
        take(s, stream, gap, start, finish)
        self.device[task] = device
        self.start[task] = start
        self.finish[task] = finish
        self._stored = -1

    def _sources(self, task: int) -> int:
        """Store what a task reads, as far as it is planned, and return the number of data."""
        if task != self._stored:
            self._count = sources(self._tables, task, self.device, self.finish, self.state)
            self._stored = task
        return self._count

    def _where(self, task: int, device: int) -> int:
        return task * len(self.problem.devices) + device

    def _ready(self, task: int) -> float:
        """Return when predecessors that produce no data for a task have ended."""
        t = self._tables
        before = t.before[t.before_at[task] : t.before_at[task + 1]]
        return max([self.finish[u] for u in before]) if before else 0.0

    def _gap(
        self, task: int, device: int, count: int, ready: float, limit: float
    ) -> tuple[float, int, int]:
        """Return the earliest start below ``limit``, its stream and gap; or infinity."""
        s = self.state
        ready = arrive(self._tables, device, count, ready, limit, s, False)
        if ready >= limit:
            return _NOWHERE
        if s.issues:
            ready = issue(self._tables, self._where(task, device), ready, s, False)
        return earliest_gap(s, device, ready, self._seconds[task][device], limit)
