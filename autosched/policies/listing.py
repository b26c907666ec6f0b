"""List scheduling over tables: orders by rank, plans in such an order, and when a placement ends.

Joins ``Tables`` and the kernels, and holds the memory they work in. Decides nothing: see ``heft`` and ``portfolio``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.errors import ScheduleError
from autosched.policies import kernels
from autosched.policies.jit import Mode
from autosched.policies.tables import Tables

__all__ = ["Listed", "Listing"]

_MOST_KEPT = 4096  # gaps of a stream; the earliest are forgotten, where tasks of low rank hardly ever fit


class Listed(NamedTuple):
    """A plan: the device, start and finish of each task."""

    device: Any
    start: Any
    finish: Any


class _Planning(NamedTuple):
    """What ``list_schedule`` works in: what a task reads, what copy streams do, what travelled, gaps of streams."""

    since: Any
    datum: Any
    where: Any
    out_next: Any
    out_free: Any
    in_free: Any
    arrival: Any  # [datum, device], nan where it did not travel
    first: Any  # [device], its first stream
    begins: Any
    ends: Any
    gaps: Any


class _Timing(NamedTuple):
    """What ``evaluate`` works in: lists of copies by what makes them, and what streams do."""

    head: Any
    tail: Any
    next: Any
    item: Any
    arrival: Any
    first: Any
    free: Any
    out_free: Any
    in_free: Any


class Listing:
    """A problem's tables, and what can be asked of them.

    Of a machine on which all devices are linked; no task's seconds may be infinite on all devices.
    """

    def __init__(self, tables: Tables, mode: Mode, names: Sequence[str]):
        self.shape = tables
        self.names = names
        self.mode = mode
        self.tables = mode.of(tables)
        self.devices = len(tables.streams)
        self.contention = bool(tables.holds_out.any() or tables.holds_in.any())

    @cached_property
    def backwards(self) -> Listing:
        """The problem with all edges reversed; its task ``i`` is task ``n - 1 - i``."""
        return Listing(self.shape.reversed(), self.mode, self.names[::-1])

    # ---- orders

    @cached_property
    def mean(self) -> NDArray[np.float64]:
        """The mean seconds of each task over the devices where it can run."""
        return self._upward(_mean(self._seconds, self._finite))

    @cached_property
    def least(self) -> NDArray[np.float64]:
        """Upward ranks at the least seconds of each task."""
        return self._upward(self._seconds.min(axis=1, initial=math.inf))

    def _upward(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        rank = self.mode.numbers(len(weight))
        kind, kinds, latency, per_byte = self._links
        made = (weight, latency, per_byte) if self.mode.fast else map(np.ndarray.tolist, (weight, latency, per_byte))
        weight, latency, per_byte = made
        self.mode(kernels.upward)(self.tables, weight, self.mode.whole(kind), kinds, latency, per_byte, rank)
        return np.asarray(rank, float)

    @cached_property
    def optimistic(self) -> Any:
        """The optimistic cost table, at the mean link."""
        _, _, latency, per_byte = _links(np.zeros(1, np.int64), np.ones((1, self.devices), bool), self.shape)
        size = len(self.shape.group) * self.devices
        table, column = self.mode.numbers(size), self.mode.numbers(self.devices)
        self.mode(kernels.optimistic)(self.tables, float(latency[0]), float(per_byte[0]), table, column)
        return table

    @cached_property
    def tail(self) -> Any:
        """The optimistic cost table at the best link: no schedule passes from a task's end to the end of all faster."""
        p = self.devices
        apart = ~np.eye(p, dtype=bool).ravel()
        latency, rate = self.shape.latency[: p * p][apart], self.shape.rate[: p * p][apart]
        table, column = self.mode.numbers(len(self.shape.seconds)), self.mode.numbers(p)
        best = float(latency.min(initial=math.inf)), 1 / float(rate.max(initial=1.0))
        self.mode(kernels.optimistic)(self.tables, best[0] if p > 1 else 0.0, best[1], table, column)
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
        """Place tasks in this order, each where ``kernels.list_schedule`` says.

        Raises ScheduleError where times grow beyond what a float can say.
        """
        n, mode, s = len(self.shape.group), self.mode, self.planning()
        made = Listed(mode.counts(n, -1), mode.numbers(n, math.nan), mode.numbers(n, math.nan))
        optimism = self.optimistic if ahead else self._none
        keep, fixed = len(s.begins) // len(s.gaps), mode.counts(n, -1)
        run = mode(kernels.list_schedule)
        late = run(self.tables, order, excess, ahead, optimism, kernels.MOST_GAPS, fixed, *made, s, keep)
        if late >= 0:
            raise ScheduleError(f"task {self.names[late]!r} would end later than a float can say, wherever it runs")
        return made

    def order(self, rank: NDArray[np.float64]) -> Any:
        """Return the tasks by descending rank; of equal ones the one added earlier first."""
        return self.mode.whole(np.argsort(-rank, kind="stable"))

    def by_start(self, start: Any) -> Any:
        """Return the tasks by their start; of equal ones the one added earlier first, which keeps dependencies."""
        return self.mode.whole(np.argsort(np.asarray(start), kind="stable"))

    def mirrored(self, planned: Listed) -> Listed:
        """Return a plan of the reversed problem as one of this."""
        device, start, finish = (np.asarray(item)[::-1] for item in planned)
        end = float(finish.max(initial=0.0))
        whole = self.mode.whole(device)
        return Listed(whole, end - finish, end - start)

    def evaluate(self, device: Any, order: Any, cap: float = math.inf) -> tuple[float, Any, Any]:
        """Return when all has ended if tasks are issued in this order, and all starts and finishes.

        Infinity if that is not below ``cap``.
        """
        mode, n = self.mode, len(self.shape.group)
        start, finish = mode.numbers(n), mode.numbers(n)
        end = mode(kernels.evaluate)(self.tables, order, device, start, finish, cap, self.timing)
        return end, start, finish

    def planning(self) -> _Planning:
        """Return memory for ``kernels.list_schedule`` and ``annealing.decode``."""
        mode, devices, streams = self.mode, self.devices, int(self.shape.streams.sum())
        reads = int(np.diff(self.shape.reads_at).max(initial=0))
        keep = min(len(self.shape.group) + 1, _MOST_KEPT)
        travelled = len(self.shape.maker) * devices if self.contention else 0
        made = _Planning(
            since=mode.numbers(reads),
            datum=mode.counts(reads),
            where=mode.counts(reads),
            out_next=mode.numbers(devices),
            out_free=mode.numbers(devices),
            in_free=mode.numbers(devices),
            arrival=mode.numbers(travelled, math.nan),
            first=self._first,
            begins=mode.numbers(streams * keep),
            ends=mode.numbers(streams * keep),
            gaps=mode.counts(streams, 1),
        )
        for stream in range(streams):
            made.ends[stream * keep] = math.inf
        return made

    @cached_property
    def timing(self) -> _Timing:
        """Memory for ``kernels.evaluate``, which leaves it as it finds it."""
        mode, devices, n = self.mode, self.devices, len(self.shape.group)
        copies = len(self.shape.reads) + len(self.shape.returns)
        return _Timing(
            head=mode.counts(n + 1),
            tail=mode.counts(n + 1),
            next=mode.counts(copies),
            item=mode.counts(copies),
            arrival=mode.numbers(len(self.shape.maker) * devices, math.nan),
            first=self._first,
            free=mode.numbers(int(self.shape.streams.sum())),
            out_free=mode.numbers(devices),
            in_free=mode.numbers(devices),
        )

    @cached_property
    def _first(self) -> Any:
        at = np.zeros(self.devices + 1, np.int64)
        np.cumsum(self.shape.streams, out=at[1:])
        return self.mode.whole(at)


def _mean(seconds: NDArray[np.float64], finite: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the means of rows over what is finite, summed from the left."""
    total = np.zeros(len(seconds))
    for column, there in zip(seconds.T, finite.T, strict=True):
        total += np.where(there, column, 0.0)
    return np.asarray(total / finite.sum(axis=1))


def _links(
    kind: NDArray[np.int64], masks: NDArray[np.bool_], t: Tables
) -> tuple[NDArray[np.int64], int, NDArray[np.float64], NDArray[np.float64]]:
    """Return the kinds of tasks, and between devices of two kinds the mean latency and mean seconds per byte."""
    devices, kinds = masks.shape[1], len(masks)
    latency, per_byte = np.zeros(kinds * kinds), np.zeros(kinds * kinds)
    for a in range(kinds):
        for b in range(kinds):
            pairs = [q * devices + p for q in masks[a].nonzero()[0] for p in masks[b].nonzero()[0] if q != p]
            if pairs:
                latency[a * kinds + b] = sum(t.latency[pairs].tolist()) / len(pairs)
                per_byte[a * kinds + b] = sum((1 / t.rate[pairs]).tolist()) / len(pairs)
    return kind, kinds, latency, per_byte
