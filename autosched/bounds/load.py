"""Lower bounds from the total work of devices, of copy streams and of threads that issue tasks.

Each piece of work may be done by one of several devices or streams. Knows pieces, durations and
streams, the earliest starts and latest ends that ``chains`` derives, and where data are made and
read; no other edge between pieces.

The bounds use prices of devices, which are the dual variables of distributing the work. They are
found without an LP solver. Any prices give a valid bound, so approximate prices are still correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.bounds.chains import through
from autosched.bounds.relaxation import Array, Relaxation, links, readers
from autosched.problem import Problem

_ENOUGH = 1e-6  # relative tolerance
_ROUNDS = 40  # for each device, at most
_SAMPLE = 10_000
_NOTHING = 1e-300  # a price of practically 0, whose product with infinity is infinite


def gathered(seconds: Array, group: NDArray[np.int64]) -> Array:
    """Return the total duration of each group on each device, a row per group."""
    groups, row = np.unique(group, return_inverse=True)
    if len(groups) == len(group):
        return seconds
    together = np.zeros((len(groups), seconds.shape[1]))
    np.add.at(together, row, seconds)
    return together


def shared(pieces: Array, streams: NDArray[Any]) -> float:
    """Return the time that the streams of all devices need for all pieces, which may be split.

    ``pieces[piece, device]`` are durations, infinite where a piece cannot run.
    """
    return float(np.min(pieces * prices(pieces, streams), axis=1, initial=math.inf).sum())


def prices(pieces: Array, streams: NDArray[Any]) -> Array:
    """Return the prices of devices, per second of a stream, that maximize the cost of all pieces.

    The prices of all streams sum to 1. In T seconds the streams then cost at most T, so no schedule
    is shorter than the cost of the pieces, each where it is cheapest, at any prices. The prices are
    the dual solution of the linear relaxation, exact up to rounding; for very many pieces, of a
    sample. Devices that are equal for all pieces count as one.
    """
    every = max(1, len(pieces) // _SAMPLE)
    columns = np.ascontiguousarray(pieces[::every].T)
    models: list[int] = []
    kind = []
    for p, column in enumerate(columns):
        alike = (k for k, model in enumerate(models) if np.array_equal(columns[model], column))
        kind.append(next(alike, len(models)))
        models += [p] if kind[-1] == len(models) else []
    found = _simplex(columns[models], np.bincount(kind, weights=streams).astype(float))
    return found[kind]


def _simplex(seconds: Array, streams: NDArray[Any]) -> Array:
    """Mix loads of devices so that the largest load is least, by column generation.

    Each round adds the cheapest load at the current prices. The linear program maximizes sum(x)
    subject to loads @ x <= 1. Source: Dantzig, Wolfe, Operations Research 8(1), 1960.
    """
    devices = len(streams)
    best = price = np.full(devices, 1 / streams.sum())
    most = scale = float(np.min(seconds * price[:, None], axis=0, initial=math.inf).sum())
    if devices == 1 or not 0 < scale < math.inf:
        return best
    inverse = np.eye(devices)  # of the initial basis, in which all devices are idle
    mix = np.ones(devices)
    worth = np.zeros(devices)
    pieces = np.arange(seconds.shape[1])
    for _ in range(_ROUNDS * devices):
        cost = seconds * price[:, None]
        where = cost.argmin(axis=0)
        total = float(cost[where, pieces].sum())
        if total > most:
            most = total
            best = price
        load = np.bincount(where, weights=seconds[where, pieces], minlength=devices) / (
            streams * scale
        )
        column = inverse @ load
        if 1.0 - worth @ column <= _ENOUGH:
            break
        ratio = np.divide(mix, column, out=np.full(devices, math.inf), where=column > 1e-12)
        row = int(ratio.argmin())
        if math.isinf(ratio[row]):
            break
        pivot = inverse[row] / column[row]
        share = ratio[row]
        inverse = inverse - np.outer(column, pivot)
        mix = mix - column * share
        inverse[row] = pivot
        mix[row] = share
        worth[row] = 1.0
        duals = np.maximum(worth @ inverse, 0.0)
        price = np.maximum(duals / (duals.sum() * streams), _NOTHING)
    return best


# ---- issuing: one thread issues all streams that do not wait for a CPU. If no task can run on a CPU,
# it issues every task. Otherwise each stream may have a thread of its own.


def host(relaxed: Relaxation) -> float:
    """Return the time that threads need at least to issue all tasks; 0 if issuing is free."""
    machine = relaxed.problem.machine
    costs = relaxed.problem.costs
    if not len(relaxed.seconds) or not costs.has_issuing(machine.devices):
        return 0.0
    begin = 0.0 if costs.replay is None else costs.replay.call
    on_cpu = np.array([not device.is_accelerator for device in machine.devices])
    possible = np.isfinite(relaxed.seconds)
    issue = relaxed.problem.by_task(relaxed.problem.tables.issue)
    cpus = on_cpu.sum() - len(machine.storage)
    if cpus <= 1 and not possible[:, on_cpu].any():  # two CPUs may copy to each other
        each = np.where(possible, issue, math.inf).min(axis=1, initial=math.inf)
        graph = 0.0 if costs.replay is None or not each.any() else costs.replay.graph
        return float(begin + graph + each.sum())
    if costs.replay is not None:  # one thread may issue what runs on several streams
        return begin
    # A thread of a CPU or of storage is busy with the tasks, others with issuing them.
    busy = np.where(on_cpu, relaxed.seconds, np.where(possible, issue, math.inf))
    return shared(gathered(busy, relaxed.group), relaxed.streams)


# ---- copies that constraints force. Copy streams are one per device and direction, not one per pair of
# devices, because all copies out of a device share its port.


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
    coming = [copy._replace(sources=copy.sources | host) for copies in forced for copy in copies]
    # Where memory is short, a datum may be spilled to the host once, and be reloaded as often
    # as necessary.
    once = (copies[:1] if short else copies for copies in forced)
    leaving = [copy._replace(destinations=copy.destinations | host) for c in once for copy in c]
    return max(_load(relaxed.problem, coming, True), _load(relaxed.problem, leaving, False))


def _places(relaxed: Relaxation) -> list[int]:
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
    possible = _places(relaxed)
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
        table = np.where(held, table, 0.0)
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


# ---- intervals that contain more work than streams can do


_MOST = 100_000  # pairs of a task and a begin of a window that are processed together
_STEPS = 12
_NARROW = 1e-6  # relative tolerance


class _Case(NamedTuple):
    """Consequences of a makespan, by [task, device]; durations are infinite where impossible."""

    seconds: Array
    early: Array  # the earliest start
    late: Array  # the latest
    price: Array  # by device, of a second of one stream


def interval(relaxed: Relaxation, head: Array, tail: Array, least: float) -> float:
    """Raise a lower bound until no window [a, b] must contain more work than fits into it.

    If the makespan were T, a task on a device would start between its earliest start and T minus
    the time that must follow it, and would not run on devices where that is impossible. The work of
    each task that therefore must be in a window, on the device where it is cheapest at prices that
    sum to 1 over all streams, is at most the length of the window. If the sum is larger, T grows by
    the difference. For up to 300 tasks all windows are considered that begin or end at a limit of
    some task; for more tasks, only some. Source: Fernandez, Bussell, IEEE Trans. Computers C-22(8),
    1973, there for identical devices.
    """
    rounds = _STEPS if len(head) ** 2 <= _MOST else max(1, _STEPS * 100 // len(head))
    for _ in range(rounds if 0 < least < math.inf else 0):
        found, until = _raised(relaxed, head, tail, least)
        if found <= least * (1 + _NARROW):
            break
        least = min(found, until)
    return least


def _raised(relaxed: Relaxation, head: Array, tail: Array, end: float) -> tuple[float, float]:
    """Return the makespan implied by a bound, and up to which bound that holds.

    Beyond it, tasks may run on other devices.
    """
    needed = through(head, tail, relaxed.seconds)
    barred = needed > end * (1 + 1e-9)
    until = float(np.min(needed[barred], initial=math.inf))
    seconds = np.where(barred, math.inf, relaxed.seconds)
    price = prices(gathered(seconds, relaxed.group), relaxed.streams)
    excess = 0.0
    for one, other in ((head, tail), (tail, head)):
        early = np.where(barred, math.inf, one - np.where(barred, 0.0, seconds))
        late = np.where(barred, -math.inf, end - np.where(barred, 0.0, other))
        excess = max(excess, _excess(_Case(seconds, early, late, price)))
    return end + excess, until


def _excess(case: _Case) -> float:
    """Return by how much the work that must be in a window exceeds its length."""
    latest = case.late.max(axis=1)
    slope = np.min(np.where(np.isinf(case.seconds), math.inf, case.price), axis=1)
    most = 0.0
    for begins in _begins(case):
        left = np.clip((case.early + case.seconds) - begins[:, None, None], 0.0, case.seconds)
        height = np.min(left * case.price, axis=2)
        since = np.maximum(latest, begins[:, None])
        points = np.concatenate([since, since + height / slope], axis=1)
        order = points.argsort(axis=1)
        points = np.take_along_axis(points, order, axis=1)
        steep = np.concatenate([slope, -slope])[order].cumsum(axis=1)
        work = (steep[:, :-1] * np.diff(points, axis=1)).cumsum(axis=1)
        most = max(most, float(np.max(work - (points[:, 1:] - begins[:, None]), initial=0.0)))
    return most


def _begins(case: _Case) -> Iterator[Array]:
    """Yield the begins of windows in batches."""
    tasks = len(case.early)
    found = np.unique(case.early.min(axis=1))
    most = max(_MOST // tasks, 4)
    if tasks * len(found) > _MOST:
        found = found[np.unique(np.linspace(0, len(found) - 1, most).astype(int))]
    yield from np.array_split(found, math.ceil(len(found) / most))
