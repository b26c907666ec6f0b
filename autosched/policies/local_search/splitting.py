"""Split a graph into stages on devices so that the busiest device or copy stream is least busy.

That bounds the period of a loop with enough runs in flight, if no device waits within a run for
work that depends on its own. Streams are in order, so a device must have finished a run's last task
before it begins the next run. Therefore stages are contiguous: no data flow back to an earlier
stage.

1. Tasks that must share a device, and those between them, are one unit. Tasks that can run on one
   device alone belong to no stage.
2. For several topological orders of the units: the best split of the order into consecutive parts,
   by dynamic programming. Each prefix is an ideal of the graph; Tarnawski et al., "Efficient
   Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020, do so for all ideals, or
   for one such order.
3. The same for orders that resemble the best one so far, again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.topological import best_order, topological_order
from autosched.errors import ScheduleError
from autosched.graph.flow import grouped
from autosched.placement import Placement, Send
from autosched.problem import Policy, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# In dynamic programming: units, beyond which neighbours in the order are joined, and steps.
_MOST_UNITS = 500
_MOST_STEPS = 200_000_000
_MOST_KINDS = 12  # of devices: there are two to the power of that many subsets at least
_AS_FAST = 1.001  # times the seconds of a direct copy
_ORDERS = 60  # that resemble the best one, without a time limit
_ALL_STEPS = 30_000_000  # for all of them, at most


def split(
    stages: int | None = None,
    seed: int = 0,
    *,
    seconds: float | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> Policy:
    """Return the policy that splits a graph into at most so many stages, by default any number.

    With ``seconds`` it searches that long; ``progress`` is called with the part that is done, and
    the greatest load. Devices copy while they compute.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.add(abs, graph.input("x"), seconds=2.0), seconds=2.0)
    >>> placement = split()(Problem(graph, Machine.emulated(gpus=1)))
    >>> sorted(placement.device.values())
    ['cpu', 'cuda:0']
    """

    def policy(problem: Problem) -> Placement:
        splitter = _Splitter(problem)
        end = None if seconds is None else perf_counter() + seconds
        return splitter.placement(stages, seed, end, progress or (lambda *_: None))

    policy.__name__ = "split"
    return policy


class _Units(NamedTuple):
    """Sets of tasks that move together, numbered in a topological order."""

    unit: Ints  # [task], -1 for tasks that only one device can run
    seconds: Floats  # [unit, device]
    pairs: Ints  # [pair, 2]: units, the second after the first


@dataclass(frozen=True)
class _Split:
    """The stage of each unit, the device of each stage, and the greatest load."""

    stage: Ints
    device: tuple[int, ...]
    order: Ints  # units in the order that was split
    load: float


class _Splitter:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.contention = problem.machine.contention
        t = problem.tables
        self.fixed = _only_device(problem)
        self.units = _units(problem, self.fixed)
        self.count = len(self.units.seconds)
        self.kinds = _kinds(problem)
        self.streams = np.asarray(t.streams, float)
        count = len(problem.devices)
        self.holds = t.holds_in[: count * count].reshape(count, count)

    def placement(
        self,
        stages: int | None,
        seed: int,
        end: float | None,
        report: Callable[[float, float], None],
    ) -> Placement:
        """Return the placement of the best split. Raises ScheduleError if there is none."""
        began = perf_counter()
        most = len(self.problem.devices) if stages is None else stages
        enough = max(min(_ORDERS, _ALL_STEPS // self._steps), 1)

        def going_on(number: int, load: float) -> bool:
            done = number / enough
            if end is not None:
                done = (perf_counter() - began) / max(end - began, 1e-9)
            if done < 1.0:
                report(done, load)
            return done < 1.0

        if not self.count:  # every task is fixed, or free
            return self._placement(None)
        at, before = grouped(self.units.pairs[:, 1], self.units.pairs[:, 0], self.count)
        best = best_order(
            [before[a:b].tolist() for a, b in pairwise(at)],
            self.units.seconds.min(axis=1, initial=math.inf).tolist(),
            lambda order: self._divided(np.array(order), most),
            lambda split: split.load,
            going_on,
            seed,
        )
        if best is None:
            raise ScheduleError(
                "no contiguous split gives each task a device, or kinds of devices are too many"
            )
        return self._placement(best)

    # ---- dynamic programming

    def _divided(self, order: Ints, most: int) -> _Split | None:
        """Return the best split of an order into at most ``most`` parts; None if there is none."""
        chunk = self._chunks(order)
        n = int(chunk[-1]) + 1
        where = np.empty(self.count, np.int64)
        where[order] = chunk
        copied = self._copy_loads(where, n)
        loads = [self._part_loads(where, n, devices[0], copied) for devices in self.kinds]
        counts = [len(devices) for devices in self.kinds]
        best = _best_parts(loads, counts, n, most) if len(counts) <= _MOST_KINDS else None
        if best is None:
            return None
        stage = np.empty(n, np.int64)
        taken = [iter(devices) for devices in self.kinds]
        device = []
        for number, (first, last, kind) in enumerate(best):
            stage[first:last] = number
            device.append(next(taken[kind]))
        load = self._load(stage[where], np.array(device))
        return _Split(stage[where], tuple(device), order, load)

    @property
    def _states(self) -> int:
        """How many sets of devices dynamic programming considers, times the kinds of devices."""
        return math.prod(len(devices) + 1 for devices in self.kinds) * len(self.kinds)

    @property
    def _steps(self) -> int:
        """About how many steps the split of an order takes."""
        return self._states * min(self.count, _MOST_UNITS) ** 2 + 1

    def _chunks(self, order: Ints) -> Ints:
        """Return the part of each unit in an order: itself, or where there are many, some of them."""
        most = max(min(_MOST_UNITS, math.isqrt(_MOST_STEPS // self._states)), 1)
        if self.count <= most:
            return np.arange(self.count)
        least = np.minimum(self.units.seconds.min(axis=1), 1e300)[order]
        share = np.cumsum(least) / max(float(least.sum()), 1e-300)
        return np.unique((share * most).astype(np.int64), return_inverse=True)[1]

    def _part_loads(
        self, where: Ints, n: int, device: int, copied: tuple[Floats, Floats]
    ) -> Floats:
        """Return by [first, end] the load of a device with these parts; infinite where impossible."""
        seconds = np.zeros(n + 1)
        column = self.units.seconds[:, device] / self.streams[device]
        never = np.zeros(n + 1)
        np.add.at(seconds, where + 1, np.where(np.isinf(column), 0.0, column))
        np.add.at(never, where + 1, np.isinf(column).astype(float))
        total, impossible = np.cumsum(seconds), np.cumsum(never)
        load = total[None, :] - total[:, None]
        into, out = copied
        if self.holds[:, device].any():
            load = np.maximum(np.maximum(load, into), out)
        load[(impossible[None, :] - impossible[:, None]) > 0] = math.inf
        load[np.tril_indices(n + 1)] = math.inf
        return load

    def _copy_loads(self, where: Ints, n: int) -> tuple[Floats, Floats]:
        """Return by [first, end] the seconds of copies into and out of consecutive parts."""
        into, out = np.zeros((2, n + 2, n + 2))
        if self.contention:
            for maker, readers, seconds in self._data():
                at = -1 if maker < 0 else int(where[maker])
                before = at + 1  # parts that begin here or later do not contain the maker
                ends = sorted({int(where[unit]) for unit in readers})
                for end in ends:
                    if end >= before:  # parts that begin at most at ``end`` and end behind it
                        _add(into, before, end + 1, end + 1, n + 1, seconds)
                    before = max(before, end + 1)
                if at >= 0 and ends and ends[-1] > at:
                    _add(out, 0, at + 1, at + 1, ends[-1] + 1, seconds)
        return tuple(np.cumsum(np.cumsum(each, 0), 1)[: n + 1, : n + 1] for each in (into, out))  # type: ignore[return-value]

    def _data(self) -> Iterable[tuple[int, list[int], float]]:
        """Yield the unit that makes a datum, or -1, the units that read it, and a copy's mean seconds."""
        t = self.problem.lists
        unit = self.units.unit.tolist()
        readers: list[dict[int, None]] = [{} for _ in t.maker]
        for task, reads in enumerate(self.problem.reads):
            for datum in reads:
                if unit[task] >= 0:
                    readers[datum][unit[task]] = None
        for datum, units in enumerate(readers):
            maker = t.maker[datum]
            if maker >= 0 and unit[maker] < 0:
                continue
            count = len(self.problem.devices)
            rows = range(count) if maker >= 0 else (t.row[datum],)
            pairs = [(p, q) for p in rows for q in range(count) if p % count != q]
            total = sum(self.problem.copy_seconds(datum, *ends) for ends in pairs)
            yield (-1 if maker < 0 else unit[maker]), list(units), total / max(len(pairs), 1)

    def _load(self, stage: Ints, device: Ints) -> float:
        """Return the greatest load: of compute streams, or of copies out or in if these overlap.

        A datum is copied once to each other device where it is read, or must be in the end.
        """
        problem = self.problem
        t = problem.lists
        on = device[stage]
        loads = np.zeros((len(problem.devices), 3))
        np.add.at(loads[:, 0], on, self.units.seconds[np.arange(self.count), on] / self.streams[on])
        unit = self.units.unit
        where = np.where(unit >= 0, on[unit], self.fixed).tolist()
        copies = [
            (datum, where[task]) for task, reads in enumerate(problem.reads) for datum in reads
        ]
        for datum, q in dict.fromkeys([*copies, *problem.returns]) if self.contention else ():
            p = where[t.maker[datum]] if t.maker[datum] >= 0 else t.home[datum]
            row = p if t.maker[datum] >= 0 else t.row[datum]
            seconds = problem.copy_seconds(datum, row, q)
            if p != q:
                path = p * len(loads) + q
                loads[p, 1] += seconds * t.holds_out[path]
                loads[q, 2] += seconds * t.holds_in[path]
        return float(loads.max(initial=0.0))

    # ---- the result

    def _placement(self, found: _Split | None) -> Placement:
        """Return devices and order: stage by stage, each in the order that was split."""
        n = len(self.problem.tasks)
        device = self.fixed.copy()
        key = [(0, 0)] * n
        if found is not None:
            position = np.empty(self.count, np.int64)
            position[found.order] = np.arange(self.count)
            for task, unit in enumerate(self.units.unit.tolist()):
                if unit >= 0:
                    device[task] = found.device[found.stage[unit]]
                    key[task] = int(found.stage[unit]), int(position[unit])
        order = topological_order(self.problem.before, key)
        sends = () if found is None else self._relays(found, order[0])
        return self.problem.placement(device, order, sends)

    def _relays(self, found: _Split, first: int) -> tuple[Send, ...]:
        """Return the copies to stages other than the next, by way of the host or of stages between.

        A direct copy between two accelerators occupies a stream of each, so a loop would not copy
        to the next stage before the last one is done with the run before.
        """
        problem = self.problem
        unit = self.units.unit.tolist()
        far: dict[int, dict[int, None]] = {}
        for task, reads in enumerate(problem.reads):
            for datum in reads:
                maker = problem.lists.maker[datum]
                if unit[task] >= 0 and maker >= 0 and unit[maker] >= 0:
                    a, b = int(found.stage[unit[maker]]), int(found.stage[unit[task]])
                    if b > a + 1 and not problem.versions[datum]:
                        far.setdefault(datum, {})[b] = None
        sends: dict[tuple[int, int], Send] = {}
        for datum, stages in far.items():
            start = int(found.stage[unit[problem.lists.maker[datum]]])
            for stage in stages:
                for target, source in self._route(found, datum, start, stage):
                    names = problem.devices[target], problem.tasks[first], problem.devices[source]
                    send = Send(problem.names[datum], 0, *names)
                    sends[datum, target] = send
        return tuple(sends.values())

    def _route(self, found: _Split, datum: int, start: int, stage: int) -> list[tuple[int, int]]:
        """Return (device, source) of the copies of a datum to a stage, unless the direct one will do."""
        p, q = found.device[start], found.device[stage]
        out = self.problem.tables.holds_out[: self.holds.size].reshape(self.holds.shape)
        if not self.contention or not (out[p, q] and self.holds[p, q]):
            return []
        copy = self.problem.copy_seconds
        for host in range(len(self.problem.devices)):
            if self.holds[p, host] or out[host, q] or host in (p, q):
                continue
            if max(copy(datum, p, host), copy(datum, host, q)) <= copy(datum, p, q) * _AS_FAST:
                return [(q, host)]
        hops = range(start + 2, stage + 1)
        return [(found.device[k], found.device[k - 1]) for k in hops]


def _add(table: Floats, top: int, bottom: int, left: int, right: int, seconds: float) -> None:
    """Add to a rectangle of a table whose cumulative sums count."""
    table[top, left] += seconds
    table[bottom, left] -= seconds
    table[top, right] -= seconds
    table[bottom, right] += seconds


def _only_device(problem: Problem) -> Ints:
    """Return the device of tasks that only one can run, of several; -1 for others."""
    together = problem.by_task(problem.tables.together)
    able = np.isfinite(together)
    only = np.where(able.sum(axis=1) == 1, able.argmax(axis=1), -1)
    return only if able.shape[1] > 1 else np.full(len(only), -1)


def _kinds(problem: Problem) -> list[list[int]]:
    """Return the devices by kind: those that are equal for all tasks and all copies."""
    t = problem.tables
    count = len(problem.devices)
    seconds = problem.by_task(t.seconds)
    links = np.stack([t.latency[: count * count], t.rate[: count * count]]).reshape(2, count, count)
    alike: dict[Any, list[int]] = {}
    for p in range(count):
        others = [q for q in range(count) if q != p]
        facts: tuple[Any, ...] = (
            np.sort(links[:, p, others], axis=1).tobytes(),
            np.sort(links[:, others, p]).tobytes(),
        )
        held = t.holds_in[: count * count].reshape(count, count)[others, p]
        facts = *facts, np.sort(held).tobytes(), seconds[:, p].tobytes(), int(t.streams[p])
        alike.setdefault(facts, []).append(p)
    return list(alike.values())


def _units(problem: Problem, fixed: Ints) -> _Units:
    """Join the tasks of a group, and of a cycle of groups, to units."""
    import networkx as nx

    t = problem.tables
    whole: Any = nx.DiGraph()
    group = t.group.tolist()
    free = (fixed < 0).tolist()
    whole.add_nodes_from(dict.fromkeys(group[i] for i in range(len(group)) if free[i]))
    for task, before in enumerate(problem.before):
        for other in before:
            if free[task] and free[other] and group[task] != group[other]:
                whole.add_edge(group[other], group[task])
    joined = nx.condensation(whole)
    number = {
        node: u
        for u, node in enumerate(
            nx.lexicographical_topological_sort(
                joined, key=lambda node: min(joined.nodes[node]["members"])
            )
        )
    }
    of_group = {g: number[node] for g, node in joined.graph["mapping"].items()}
    unit = np.array([of_group[group[i]] if free[i] else -1 for i in range(len(group))], np.int64)
    seconds = np.zeros((len(number), len(problem.devices)))
    inside = unit >= 0
    np.add.at(seconds, unit[inside], problem.by_task(t.seconds)[inside])
    pairs = [(number[a], number[b]) for a, b in joined.edges]
    return _Units(unit, seconds, np.array(sorted(pairs), np.int64).reshape(-1, 2))


def _best_parts(
    loads: Sequence[Floats], counts: Sequence[int], n: int, most: int
) -> list[tuple[int, int, int]] | None:
    """Return the parts (first, end, kind) of the split whose greatest load is least."""
    start = np.full(n + 1, math.inf)
    start[0] = 0.0
    none = (0,) * len(counts)
    best: dict[tuple[int, ...], Floats] = {none: start}
    chosen: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
    queue = [none]
    for used in queue:  # the list grows during the loop
        for kind, available in enumerate(counts):
            more = tuple(u + (k == kind) for k, u in enumerate(used))
            if more[kind] > available or sum(more) > most:
                continue
            candidate = np.maximum(best[used][:, None], loads[kind])
            first = candidate.argmin(axis=0)
            value = candidate[first, np.arange(n + 1)]
            if more not in best:
                queue.append(more)
                best[more] = value
                chosen[more] = first, np.full(n + 1, kind)
            else:
                better = value < best[more]
                best[more] = np.where(better, value, best[more])
                chosen[more] = (
                    np.where(better, first, chosen[more][0]),
                    np.where(better, kind, chosen[more][1]),
                )
    used = min(best, key=lambda each: float(best[each][n]))
    if math.isinf(best[used][n]):
        return None
    parts = []
    end = n
    while end:
        first, kind = (int(column[end]) for column in chosen[used])
        parts.append((first, end, kind))
        used = tuple(u - (k == kind) for k, u in enumerate(used))
        end = first
    return parts[::-1]
