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
        self.state = Planning.of(problem.tables, Mode(False), tasks + 1)

    def slots(self, task: int, devices: Iterable[int]) -> list[Slot]:
        """Return the earliest slot on each of these devices where the task ends in finite time.

        The first task of a group decides for all. Raises ScheduleError if there is none.
        """
        t, s = self._tables, self.state
        before = t.before[t.before_at[task] : t.before_at[task + 1]]
        after = max([self.finish[other] for other in before], default=0.0)
        count = sources(t, task, self.device, self.finish, s)
        found = []
        for device in devices:
            ready = arrive(t, device, count, after, math.inf, s, False)
            if s.issues:
                ready = issue(t, self._where(task, device), ready, s, False)
            seconds = self._seconds[task][device]
            start, stream, gap = earliest_gap(s, device, ready, seconds, math.inf)
            if start + self.problem.together[task][device] < math.inf:
                found.append(Slot(device, stream, gap, start))
        if not found:
            name = self.problem.tasks[task]
            raise ScheduleError(
                f"task {name!r} would end later than a float can say, wherever it runs"
            )
        return found

    def earliest_finish(self, task: int, devices: Iterable[int]) -> Slot:
        """Return the slot of least finish time; ties go to the device named earlier."""
        total = self.problem.together[task]
        return min(self.slots(task, devices), key=lambda slot: slot.start + total[slot.device])

    def commit(self, task: int, slot: Slot) -> None:
        """Plan a task and its copies in this slot."""
        device, stream, gap, start = slot
        t, s = self._tables, self.state
        count = sources(t, task, self.device, self.finish, s)
        arrive(t, device, count, 0.0, math.inf, s, True)
        if s.issues:
            issue(t, self._where(task, device), 0.0, s, True)
        finish = start + self._seconds[task][device]
        take(s, stream, gap, start, finish)
        self.device[task] = device
        self.start[task] = start
        self.finish[task] = finish

    def _where(self, task: int, device: int) -> int:
        return task * len(self.problem.devices) + device
