"""Run list scheduling with kernels over tables.

Joins ``Tables`` with the kernels and holds their working memory. The choice of lists is made by the
callers, such as ``portfolio``.

A placement includes the order of its copies. Copy streams are first in, first out, so devices alone
do not determine a schedule where copies matter: a HEFT plan of 1.78 times the lower bound was
simulated at 2.83 when its copies were issued in the order of the tasks that produce them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode
from autosched.errors import ScheduleError
from autosched.placement import Placement, Send
from autosched.policies.base import kernels
from autosched.policies.base.problem import Problem
from autosched.policies.base.tables import Tables

__all__ = ["Listed", "Listing", "timed"]

_MOST_KEPT = (
    4096  # gaps of a stream; the earliest are dropped, since tasks of low rank rarely fit there
)


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

    Requires a machine on which all devices are linked, and a finite duration of each task on some
    device.
    """

    def __init__(self, tables: Tables, mode: Mode, names: Sequence[str]):
        self.shape = tables
        self.names = names
        self.mode = mode
        self.tables = mode.of(tables)
        self.devices = len(tables.streams)

    @cached_property
    def backwards(self) -> Listing:
        """The problem with all edges reversed; its task ``i`` is task ``n - 1 - i``."""
        return Listing(self.shape.reversed(), self.mode, self.names[::-1])

    # ---- orders

    @cached_property
    def mean(self) -> NDArray[np.float64]:
        """The mean duration of each task over the devices where it can run."""
        return self._upward(_mean(self._seconds, self._finite))

    @cached_property
    def least(self) -> NDArray[np.float64]:
        """Upward ranks at the least duration of each task."""
        return self._upward(self._seconds.min(axis=1, initial=math.inf))

    def _upward(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        rank = self.mode.numbers(len(weight))
        kind, kinds, latency, per_byte = self._links
        made = (
            (weight, latency, per_byte)
            if self.mode.fast
            else map(np.ndarray.tolist, (weight, latency, per_byte))
        )
        weight, latency, per_byte = made
        self.mode(kernels.upward)(
            self.tables, weight, self.mode.whole(kind), kinds, latency, per_byte, rank
        )
        return np.asarray(rank, float)

    @cached_property
    def optimistic(self) -> Any:
        """The optimistic cost table, at the mean link."""
        _, _, latency, per_byte = _links(
            np.zeros(1, np.int64), np.ones((1, self.devices), bool), self.shape
        )
        size = len(self.shape.group) * self.devices
        table = self.mode.numbers(size)
        column = self.mode.numbers(self.devices)
        self.mode(kernels.optimistic)(
            self.tables, float(latency[0]), float(per_byte[0]), table, column
        )
        return table

    @cached_property
    def tail(self) -> Any:
        """Optimistic costs at the best link: a lower bound on the time after a task's end."""
        p = self.devices
        apart = ~np.eye(p, dtype=bool).ravel()
        latency = self.shape.latency[: p * p][apart]
        rate = self.shape.rate[: p * p][apart]
        table = self.mode.numbers(len(self.shape.seconds))
        column = self.mode.numbers(p)
        best = float(latency.min(initial=math.inf)), 1 / float(rate.max(initial=1.0))
        self.mode(kernels.optimistic)(
            self.tables, best[0] if p > 1 else 0.0, best[1], table, column
        )
        return table

    @cached_property
    def _seconds(self) -> NDArray[np.float64]:
        return self.shape.seconds.reshape(len(self.shape.group), self.devices)

    @cached_property
    def _finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.shape.together.reshape(len(self.shape.group), self.devices))

    @cached_property
    def _links(self) -> tuple[NDArray[np.int64], int, NDArray[np.float64], NDArray[np.float64]]:
        if self._finite.all():
            return _links(np.zeros(len(self._finite), np.int64), self._finite[:1], self.shape)
        masks, kind = np.unique(self._finite, axis=0, return_inverse=True)
        return _links(kind.reshape(-1), masks, self.shape)

    @cached_property
    def _none(self) -> Any:
        return self.mode.numbers(len(self.shape.seconds))

    # ---- plans

    def plan(self, order: Any, excess: float = 0.0, ahead: float = 0.0) -> Listed:
        """Place tasks in this order by ``kernels.list_schedule``."""
        n = len(self.shape.group)
        mode = self.mode
        s = self.planning
        device = mode.counts(n, -1)
        start = mode.numbers(n, math.nan)
        finish = mode.numbers(n, math.nan)
        optimism = self.optimistic if ahead else self._none
        run = mode(kernels.list_schedule)
        fixed = mode.counts(n, -1)
        end = run(
            self.tables, order, excess, ahead, optimism, fixed, device, start, finish, s, self.keep
        )
        return self._listed(end, order, device, start, finish)

    def placed(self, device: Any, order: Any, cap: float = math.inf) -> Listed:
        """Place tasks in this order, each on its device.

        Makespans not below ``cap`` become infinite.
        """
        n = len(self.shape.group)
        mode = self.mode
        start = mode.numbers(n)
        finish = mode.numbers(n)
        run = mode(kernels.decode)
        tail = self.tail if cap < math.inf else self._none
        end = run(self.tables, order, device, tail, start, finish, cap, self.planning, self.keep)
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
        """Return the tasks by start.

        Ties go to the task added earlier, which keeps dependencies.
        """
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
    def keep(self) -> int:
        """The number of gaps of a stream that are stored."""
        return min(len(self.shape.group) + 1, _MOST_KEPT)

    @cached_property
    def planning(self) -> kernels.Planning:
        """Working memory for ``kernels.list_schedule`` and ``kernels.decode``."""
        mode = self.mode
        devices = self.devices
        streams = int(self.shape.streams.sum())
        reads = int(np.diff(self.shape.reads_at).max(initial=1))
        contended = bool(self.shape.holds_out.any() or self.shape.holds_in.any())
        copies = len(self.shape.reads) + len(self.shape.returns) if contended else 0
        return kernels.Planning(
            since=mode.numbers(reads),
            datum=mode.counts(reads),
            where=mode.counts(reads),
            out_next=mode.numbers(devices),
            out_free=mode.numbers(devices),
            in_free=mode.numbers(devices),
            arrival=mode.numbers(len(self.shape.maker) * devices if contended else 0, math.nan),
            first=self._first,
            begins=mode.numbers(streams * self.keep),
            ends=mode.numbers(streams * self.keep),
            gaps=mode.counts(streams, 1),
            copy=mode.counts(copies),
            begin=mode.numbers(copies),
            sent=mode.counts(1),
        )

    @cached_property
    def _first(self) -> Any:
        at = np.zeros(self.devices + 1, np.int64)
        np.cumsum(self.shape.streams, out=at[1:])
        return self.mode.whole(at)


def timed(problem: Problem, found: Listed, order: NDArray[np.int64]) -> Placement:
    """Return a plan with tasks in this order, which is sorted by start, as a placement."""
    before = np.searchsorted(np.asarray(found.start)[order], found.begins).tolist()
    datum, device = (number.tolist() for number in np.divmod(found.copies, len(problem.devices)))
    ahead = [*map(problem.tasks.__getitem__, order.tolist()), None]
    sends = zip(
        map(problem.data.names.__getitem__, datum),
        map(problem.data.versions.__getitem__, datum),
        map(problem.devices.__getitem__, device),
        map(ahead.__getitem__, before),
        strict=True,
    )
    copies = tuple(
        map(Send._make, takewhile(itemgetter(3), sends))
    )  # inputs are written back as soon as possible
    return problem.placement(found.device, order, copies)


@np.errstate(over="ignore")
def _mean(seconds: NDArray[np.float64], finite: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean of the finite elements of each row, summed from the left."""
    total = np.zeros(len(seconds))
    for column, there in zip(seconds.T, finite.T, strict=True):
        total += np.where(there, column, 0.0)
    return np.asarray(total / finite.sum(axis=1))


def _links(
    kind: NDArray[np.int64], masks: NDArray[np.bool_], t: Tables
) -> tuple[NDArray[np.int64], int, NDArray[np.float64], NDArray[np.float64]]:
    """Return the kind of each task, and mean latency and mean seconds per byte between kinds."""
    devices = masks.shape[1]
    kinds = len(masks)
    latency = np.zeros(kinds * kinds)
    per_byte = np.zeros(kinds * kinds)
    for a in range(kinds):
        for b in range(kinds):
            pairs = [
                q * devices + p
                for q in masks[a].nonzero()[0]
                for p in masks[b].nonzero()[0]
                if q != p
            ]
            if pairs:
                latency[a * kinds + b] = sum(t.latency[pairs].tolist()) / len(pairs)
                per_byte[a * kinds + b] = sum((1 / t.rate[pairs]).tolist()) / len(pairs)
    return kind, kinds, latency, per_byte
