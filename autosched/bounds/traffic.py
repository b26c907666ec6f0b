"""Lower bounds from copies that constraints, or devices that cannot hold all values, force.

Knows where tasks may run and what they read; no order but that of edges. Copy streams are one per device and
direction, not one per pair of devices, because all copies out of a device share its port.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from autosched.bounds.load import shared
from autosched.bounds.relaxation import Array, Relaxation, links, readers
from autosched.graph.graph import Task
from autosched.problem import Problem

__all__ = ["copies", "fitting", "places", "traffic"]


class _Copy(NamedTuple):
    """A copy that must be made from one of some devices to one of others; both are bit sets."""

    nbytes: float
    pageable: bool
    sources: int
    destinations: int


def copies(relaxed: Relaxation) -> float:
    """Return the time that copy streams need for copies that constraints force.

    A datum is copied if none of the devices where it may be produced, or where it is, may run a
    reader. It is copied from there, or from the host if memory is short and it may have been
    spilled. Copies out of devices and into devices are two loads, each distributed optimally. A
    copy between a CPU and an accelerator occupies a stream of the accelerator alone. Data that no
    link carries are forwarded by other devices, and count nothing. Without contention the result is
    0.
    """
    machine = relaxed.problem.machine
    if not machine.contention:
        return 0.0
    short = any(
        math.isfinite(device.nbytes) for device in machine.devices if device.name != machine.host
    )
    host = 1 << machine.names.index(machine.host) if short else 0
    forced = _forced(relaxed)
    coming = [
        copy._replace(sources=copy.sources | host) for of_datum in forced for copy in of_datum
    ]
    # Where memory is short, a datum may be spilled to the host once, and be reloaded as often
    # as necessary.
    leaving = [copy for of_datum in forced for copy in (of_datum[:1] if short else of_datum)]
    leaving = [copy._replace(destinations=copy.destinations | host) for copy in leaving]
    return max(
        _load(relaxed.problem, coming, into=True), _load(relaxed.problem, leaving, into=False)
    )


def places(relaxed: Relaxation) -> list[int]:
    """Return by task the devices where its whole group can run, as a bit set."""
    bits = np.isfinite(relaxed.seconds) @ np.array(
        [1 << p for p in range(len(relaxed.streams))], object
    )
    group = relaxed.group.tolist()
    found = dict.fromkeys(group, -1)
    for here, devices in zip(group, bits, strict=True):
        found[here] &= devices
    return [found[here] for here in group]


def _forced(relaxed: Relaxation) -> list[list[_Copy]]:
    """Return for each datum copies that are all necessary and pairwise different."""
    problem = relaxed.problem
    t = problem.lists
    possible = places(relaxed)
    users = readers(problem)
    back = dict(problem.returns)
    found = []
    for datum in dict.fromkeys([*back, *range(len(users))]):
        maker = t.maker[datum]
        sources = 1 << t.home[datum] if maker < 0 else possible[maker]
        others = [u for u in users[datum] if maker < 0 or t.group[u] != t.group[maker]]
        ends = [possible[task] for task in others]
        if datum in back:
            ends.append(1 << back[datum])
        taken = sources
        copies = []
        for destinations in sorted(dict.fromkeys(ends), key=int.bit_count):
            if sources and destinations and not destinations & taken:
                taken |= destinations
                pageable = t.row[datum] >= len(problem.devices)
                copies.append(_Copy(t.nbytes[datum], pageable, sources, destinations))
        found.append(copies)
    return found


def _load(problem: Problem, copies: Sequence[_Copy], into: bool) -> float:
    """Return how long the copy streams into devices, or out of them, are busy at least."""
    devices = range(len(problem.devices))
    holds = problem.tables.holds_in if into else problem.tables.holds_out
    held = holds[: len(devices) ** 2].reshape(len(devices), -1).astype(bool)

    @cache
    def rate(pageable: bool, sources: int, destinations: int) -> Array:
        """Return latency and seconds per byte by device.

        Infinite latency where no such copy is possible.
        """
        table = np.stack(links(problem, pageable))
        table = np.where(held & np.isfinite(table), table, 0.0)
        q = [p for p in devices if sources >> p & 1]
        p = [p for p in devices if destinations >> p & 1 and (into or not sources >> p & 1)]
        found = np.zeros((2, len(devices)))
        found[0] = math.inf
        if into:
            inner = table[:, q][:, :, p]
            found[:, p] = np.where(np.equal.outer(q, p), math.inf, inner).min(axis=1)
        else:
            found[:, q] = table[:, q][:, :, p].min(axis=2)
        return found

    rows = [each[0] + copy.nbytes * each[1] for copy in copies for each in (rate(*copy[1:]),)]
    return shared(np.array(rows), np.ones(len(devices))) if rows else 0.0


# ---- memory: a value is held on the device of its producer, and on each device that it was copied
# to, until its last use there. A value that is on a device from the beginning is always held. Views
# and unused values take no memory.


_TRIED = 8  # points in time examined on each device
_WEIGHTS = np.linspace(0.0, 1.0, 65)[:, None]  # compute streams against copy stream


def fitting(problem: Problem) -> Array:
    """Return the durations of tasks, infinite where a task does not fit into a device's memory."""
    seconds: Array = problem.by_task(problem.tables.seconds)
    if not _short(problem):
        return seconds
    limits = np.array([device.nbytes for device in problem.machine.devices], float)
    held = _resident(problem)
    homes = _homes(problem)
    seconds = seconds.copy()
    for task in problem.graph.tasks:
        needed = held.copy()
        for root, nbytes in _working(problem, task).items():
            needed += nbytes
            if root in homes:
                needed[homes[root]] -= nbytes
        seconds[task.index, needed > limits * (1 + 1e-9)] = math.inf
    return seconds


def _short(problem: Problem) -> bool:
    """Whether some device might not hold all values, each counted twice."""
    least = min(device.nbytes for device in problem.machine.devices)
    nbytes = problem.costs.value_nbytes
    return not math.isinf(least) and 2 * sum(map(nbytes, problem.graph.values)) > least


def _homes(problem: Problem) -> dict[int, int]:
    """Return the devices of inputs and constants, by value."""
    number = problem.devices.index
    return {value: number(device) for value, device in problem.homes.items()}


def _resident(problem: Problem) -> Array:
    """Return by device the bytes that are there from the beginning."""
    held = np.zeros(len(problem.devices))
    for value, device in _homes(problem).items():
        held[device] += problem.costs.value_nbytes(problem.graph.values[value])
    return held


def _working(problem: Problem, task: Task) -> dict[int, float]:
    """Return the memory, by root, that a task needs while it runs."""
    graph = problem.graph
    costs = problem.costs
    found: dict[int, float] = {}
    for use in (*task.reads, *task.outputs):
        value = graph.values[use.value]
        if graph.is_used(use.value):
            nbytes = min(costs.value_nbytes(value), costs.value_nbytes(graph.values[value.root]))
            found[value.root] = max(found.get(value.root, 0.0), nbytes)
    return found


class _Retained(NamedTuple):
    """A result that is produced and read on one device, without views and later writes."""

    nbytes: float
    maker: int
    readers: Sequence[int]


def traffic(relaxed: Relaxation) -> float:
    """Return the time that is lost because memory is short while a task runs on its only device.

    Values that are produced on the device before the task and read there after it must be in memory
    meanwhile. The excess must be copied back over the copy stream or recomputed on compute streams,
    whichever is better. The copies occupy nothing without contention.
    """
    problem = relaxed.problem
    if not _short(problem):
        return 0.0
    possible = places(relaxed)
    living = _resident(problem)
    homes = _homes(problem)
    before, after = _neighbours(relaxed)
    found = 0.0
    for p, device in enumerate(problem.machine.devices):
        bound = {task: None for task, devices in enumerate(possible) if devices == 1 << p}
        retained = _retained(problem, bound)
        room = device.nbytes - living[p]
        seconds = relaxed.seconds[:, p] / device.streams
        work = float(seconds[list(bound)].sum())
        fetching = _fetching(problem, p) if problem.machine.contention else 0.0
        for task in _peaks(bound, retained):
            ancestors = _reachable(task, before)
            descendants = _reachable(task, after)
            working = _working(problem, problem.graph.tasks[task])
            needed = sum(nbytes for root, nbytes in working.items() if homes.get(root) != p)
            through = [
                retained[root]
                for root in retained
                if root not in working
                and retained[root].maker in ancestors
                and not descendants.isdisjoint(retained[root].readers)
            ]
            excess = needed + sum(item.nbytes for item in through) - room
            if excess > 0 and through:
                found = max(found, _spent(work, excess, through, seconds, fetching))
    return found


def _spent(
    work: float, excess: float, through: Sequence[_Retained], seconds: Array, fetching: float
) -> float:
    """Return the time of the busier of compute streams and copy stream at the best split."""
    nbytes = np.array([item.nbytes for item in through], float)
    recompute = np.array([seconds[item.maker] for item in through], float) / nbytes
    each = _WEIGHTS * recompute  # per byte
    if fetching < math.inf:
        each = np.minimum(each, (1 - _WEIGHTS) * fetching)
    order = each.argsort(axis=1)
    until = np.minimum(nbytes[order].cumsum(axis=1), excess)
    taken = np.diff(until, axis=1, prepend=0.0)
    return float(
        np.max(
            _WEIGHTS[:, 0] * work + (taken * np.take_along_axis(each, order, axis=1)).sum(axis=1)
        )
    )


def _fetching(problem: Problem, p: int) -> float:
    """Return the least time per byte that a copy to a device occupies its copy-in stream."""
    devices = len(problem.devices)
    holds = problem.tables.holds_in[p : devices * devices : devices]
    rates = links(problem)[1][:, p]
    others = (q for q in range(devices) if q != p and math.isfinite(rates[q]))
    return min((float(rates[q]) if holds[q] else 0.0 for q in others), default=math.inf)


def _retained(problem: Problem, bound: Mapping[int, None]) -> dict[int, _Retained]:
    """Return by value what tasks bound to a device keep there for other tasks bound to it."""
    graph = problem.graph
    readers: dict[int, list[int]] = {}
    for task in bound:
        for use in graph.tasks[task].reads:
            readers.setdefault(use.value, []).append(task)
    found = {}
    for index, tasks in readers.items():
        value = graph.values[index]
        nbytes = problem.costs.value_nbytes(value)
        alone = len(graph.members(index)) == 1 and not graph.last_version(index)
        if value.producer is not None and value.producer in bound and alone and nbytes > 0:
            found[index] = _Retained(nbytes, value.producer, tasks)
    return found


def _peaks(bound: Iterable[int], retained: Mapping[int, _Retained]) -> list[int]:
    """Return the tasks during which most is retained if all run in insertion order."""
    change: dict[int, float] = {}
    for item in retained.values():
        change[item.maker + 1] = change.get(item.maker + 1, 0.0) + item.nbytes
        change[item.readers[-1]] = change.get(item.readers[-1], 0.0) - item.nbytes
    held = 0.0
    course = {}
    steps = sorted(change)
    for task in bound:
        while steps and steps[0] <= task:
            held += change[steps.pop(0)]
        course[task] = held
    return sorted(course, key=lambda task: -course[task])[:_TRIED]


def _neighbours(relaxed: Relaxation) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for task, other in zip(relaxed.edges.task.tolist(), relaxed.edges.other.tolist(), strict=True):
        before.setdefault(task, []).append(other)
        after.setdefault(other, []).append(task)
    return before, after


def _reachable(task: int, neighbours: Mapping[int, Sequence[int]]) -> set[int]:
    found = set[int]()
    pending = [task]
    while pending:
        for other in neighbours.get(pending.pop(), ()):
            if other not in found:
                found.add(other)
                pending.append(other)
    return found
