"""Run list scheduling with kernels over tables.

Joins ``Tables`` with the kernels and holds their working memory. The choice of lists is made by the
callers, such as ``portfolio``.

A placement includes the order of its copies. Copy streams are first in, first out, so devices alone
do not determine a schedule where copies matter: a HEFT plan of 1.78 times the lower bound was
simulated at 2.83 when its copies were issued in the order of the tasks that produce them.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode
from autosched.errors import ScheduleError
from autosched.placement import Placement, Send
from autosched.policies.base import kernels
from autosched.policies.base.ranks import MeanLinks, mean_seconds, optimistic, ranks
from autosched.problem import Problem, Tables

# Gaps of a stream; the earliest are dropped, since tasks of low rank rarely fit there.
_MOST_GAPS = 4096


class Listed(NamedTuple):
    """A plan: makespan, order, device, start and finish of each task, and copies by start.

    A copy is a number: datum * number of devices + destination.
    """

    makespan: float
    order: Any
    device: Any
    start: Any
    finish: Any
    copies: NDArray[np.int64]
    begins: NDArray[np.float64]


class Listing:
    """The tables of a problem, with orders, plans and their evaluation.

    Requires a finite duration of each task on some device.
    """

    def __init__(self, tables: Tables, mode: Mode):
        self.arrays = tables
        self.mode = mode
        self.tables = mode.of(tables)
        self.count = len(tables.group)
        self.devices = len(tables.streams)

    @cached_property
    def backwards(self) -> Listing:
        """The problem with all edges reversed; its task ``i`` is task ``n - 1 - i``."""
        return Listing(self.arrays.reversed(), self.mode)

    @cached_property
    def alike(self) -> bool:
        """Whether each task takes equally long wherever it can run."""
        together = self.arrays.together.reshape(self.count, self.devices)
        return bool(((together == self.arrays.least[:, np.newaxis]) | np.isinf(together)).all())

    # ---- orders

    @cached_property
    def mean(self) -> NDArray[np.float64]:
        """Upward ranks at the mean duration of each task over the devices where it can run."""
        return self._upward(mean_seconds(self.seconds, self._possible))

    @cached_property
    def least(self) -> NDArray[np.float64]:
        """Upward ranks at the least duration of each task."""
        return self._upward(self.seconds.min(axis=1, initial=math.inf))

    def _upward(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        links = MeanLinks.of(self.arrays, self._possible)
        return ranks(self.tables, self.mode, weight, links)

    @cached_property
    def optimistic(self) -> Any:
        """The optimistic cost table, at the mean link."""
        links = MeanLinks.of(self.arrays, np.ones((1, self.devices), bool))
        return self._optimistic(float(links.latency[0, 0]), float(links.per_byte[0, 0]))

    @cached_property
    def tail(self) -> Any:
        """Optimistic costs at the best link: a lower bound on the time after a task's end."""
        p = self.devices
        apart = ~np.eye(p, dtype=bool).ravel()
        latency = float(self.arrays.latency[: p * p][apart].min(initial=math.inf))
        rate = float(self.arrays.rate[: p * p][apart].max(initial=1.0))
        return self._optimistic(latency if p > 1 else 0.0, 1 / rate)

    def _optimistic(self, latency: float, per_byte: float) -> Any:
        table = self.mode.numbers(self.count * self.devices)
        column = self.mode.numbers(self.devices)
        self.mode(optimistic)(self.tables, latency, per_byte, table, column)
        return table

    @property
    def seconds(self) -> NDArray[np.float64]:
        """The durations by [task, device]."""
        return self.arrays.seconds.reshape(self.count, self.devices)

    @property
    def _possible(self) -> NDArray[np.bool_]:
        return np.isfinite(self.arrays.together.reshape(self.count, self.devices))

    @cached_property
    def _zeros(self) -> Any:
        return self.mode.numbers(self.count * self.devices)

    # ---- plans

    def plan(self, order: Any, excess: float = 0.0, ahead: float = 0.0) -> Listed:
        """Place tasks in this order by ``kernels.list_schedule``."""
        mode = self.mode
        device = mode.counts(self.count, -1)
        fixed = mode.counts(self.count, -1)
        start = mode.numbers(self.count, math.nan)
        finish = mode.numbers(self.count, math.nan)
        optimism = self.optimistic if ahead else self._zeros
        run = mode(kernels.list_schedule)
        end = run(
            self.tables, order, excess, ahead, optimism, fixed, device, start, finish, self.planning
        )
        return self._listed(end, order, device, start, finish)

    def placed(self, device: Any, order: Any, cap: float = math.inf) -> Listed:
        """Place tasks in this order, each on its device; from ``cap`` on makespans are infinite."""
        start = self.mode.numbers(self.count)
        finish = self.mode.numbers(self.count)
        run = self.mode(kernels.decode)
        tail = self.tail if cap < math.inf else self._zeros
        end = run(self.tables, order, device, tail, start, finish, cap, self.planning)
        return self._listed(end, order, device, start, finish)

    def _listed(self, end: float, order: Any, device: Any, start: Any, finish: Any) -> Listed:
        s = self.planning
        copies = np.array(s.copy[: s.sent[0]], np.int64)
        begins = np.array(s.begin[: s.sent[0]], float)
        by_begin = np.argsort(begins, kind="stable")
        return Listed(end, order, device, start, finish, copies[by_begin], begins[by_begin])

    def order(self, rank: NDArray[np.float64]) -> Any:
        """Return the tasks by descending rank; ties go to the task added earlier."""
        return self.mode.whole(np.argsort(-rank, kind="stable"))

    def by_start(self, start: Any) -> Any:
        """Return the tasks by start; ties, to the task added earlier, keep dependencies."""
        return self.mode.whole(np.argsort(np.asarray(start), kind="stable"))

    def mirrored(self, planned: Listed) -> tuple[Any, Any]:
        """Return devices and order of tasks for a plan of the reversed problem."""
        begin = planned.makespan - np.asarray(planned.finish)[::-1]
        return self.mode.whole(np.asarray(planned.device)[::-1]), self.by_start(begin)

    def placement(self, problem: Problem, found: Listed) -> Placement:
        """Return a plan as a placement: tasks and copies by start, those of 0 s first.

        Raises ScheduleError if the makespan overflows.
        """
        if found.makespan == math.inf:
            raise ScheduleError("tasks would end later than a float can say, wherever they run")
        start = np.asarray(found.start)
        finish = np.asarray(found.finish)
        return timed(problem, found, np.lexsort((finish > start, start)))

    @cached_property
    def planning(self) -> kernels.Planning:
        """Working memory for ``kernels.list_schedule`` and ``kernels.decode``."""
        return kernels.Planning.of(self.arrays, self.mode, min(self.count + 1, _MOST_GAPS))


def timed(problem: Problem, found: Listed, order: NDArray[np.int64]) -> Placement:
    """Return a plan with tasks in this order, which is sorted by start, as a placement."""
    before = np.searchsorted(np.asarray(found.start)[order], found.begins).tolist()
    datum, device = (number.tolist() for number in np.divmod(found.copies, len(problem.devices)))
    ahead = [*map(problem.tasks.__getitem__, order.tolist()), None]
    sends = zip(
        map(problem.names.__getitem__, datum),
        map(problem.versions.__getitem__, datum),
        map(problem.devices.__getitem__, device),
        map(ahead.__getitem__, before),
        strict=True,
    )
    # Copies after all tasks write inputs back, which happens as soon as possible anyway.
    copies = tuple(
        Send(name, version, where, task) for name, version, where, task in sends if task is not None
    )
    return problem.placement(found.device, order, copies)
