"""Improve a plan by simulated annealing, for a number of moves or for some seconds.

See ``search`` for what a state is, and for what moves change. ``decode`` evaluates a state.

    list  a b c d on p0 p1 p1 p0, where d reads c       after the move of c to p0
    p0    aaa....ddddd                                  aaaccccccddddd
    p1    bcccccc          takes 12                     b                  takes 14: 2 longer

A plan that is no longer is taken; one that is longer by x seconds with probability exp(-x / heat). The
heat falls in each round, and rounds begin again from the best plan so far, so that early moves leave
local optima and late ones only improve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import kernel
from autosched.graph.flow import grouped
from autosched.policies.base.kernels import Planning, copy_seconds, decode
from autosched.policies.base.listing import Listed, Listing
from autosched.problem import Tables

Progress = Callable[[float, float], None]  # of the part that is done, and the best makespan

_STEPS = 50  # of temperature in a round
# By round: the first temperature, in mean durations of a task, and the weight of added work. No
# pair is best: plans limited by copies need high temperature and no weight, plans limited by
# compute need low temperature and a large weight.
_ROUNDS = ((0.1, 0.3), (0.5, 0.0), (0.2, 0.0), (0.1, 0.0), (0.05, 0.3), (0.02, 1.0))
_COLD = 0.005  # the last temperature, in mean seconds of a task


class Annealer:
    """A plan being improved; ``makespan`` is that of the best found, ``bound`` a lower bound."""

    def __init__(self, listing: Listing, found: Listed, seed: int = 0, bound: float = 0.0):
        self.listing = listing
        self.bound = bound
        self.makespan = self._current = found.makespan
        self._state = _state(listing, found, seed)
        seconds = listing.arrays.seconds[np.isfinite(listing.arrays.seconds)]
        self.mean = float(seconds.mean()) if len(seconds) else 0.0
        self.restore_best()

    @property
    def best(self) -> Listed:
        """The best plan found."""
        return self.listing.placed(self._state.best_device, self._state.best_order)

    def restore_best(self) -> None:
        """Restore the best state, with its tasks in order of start if that is not worse."""
        w = self._state
        best = self.best
        order = self.listing.by_start(best.start)
        sorted_by_start = self.listing.placed(w.best_device, order)
        if sorted_by_start.makespan <= best.makespan:
            best = sorted_by_start
            w.best_order[:] = order
        w.order[:], w.device[:] = w.best_order, w.best_device
        w.start[:], w.finish[:] = best.start, best.finish
        self.makespan = self._current = best.makespan

    def move(self, moves: int, heat: float, weight: float = 0.0) -> None:
        """Make a number of moves at one temperature, in mean durations of a task.

        A second of added work, averaged over the devices, counts as ``weight`` seconds of makespan.
        """
        listing = self.listing
        self._current, self.makespan = listing.mode(anneal)(
            listing.tables,
            self._state,
            listing.planning,
            moves,
            heat * self.mean,
            weight / listing.devices,
            self._current,
            self.makespan,
            self.bound,
        )

    @property
    def done(self) -> bool:
        """Whether the lower bound is reached."""
        return self.makespan <= self.bound


def cool(annealer: Annealer, report: Progress, moves: int | None, end: float) -> None:
    """Make moves in rounds that start from the best state and cool down.

    They are so many, or end at a deadline of ``time.perf_counter``.
    """
    began = perf_counter()
    span = max(end - began, 1e-9) / len(_ROUNDS)
    each = 200 if moves is None else -(-moves // (len(_ROUNDS) * _STEPS))
    for turn, (hot, weight) in enumerate(_ROUNDS):
        if turn and not annealer.done:
            annealer.restore_best()
        for step in count():
            before = perf_counter()
            part = (before - began) / span - turn if moves is None else step / (_STEPS - 1)
            if part > 1 or annealer.done:
                break
            annealer.move(each, hot * float((_COLD / hot) ** part), weight)
            if moves is None:
                faster = min(4.0, 0.01 / max(perf_counter() - before, 1e-6))
                each = max(20, min(int(each * faster), 100_000))
            report((turn + part) / len(_ROUNDS), annealer.makespan)


def _state(listing: Listing, found: Listed, seed: int) -> State:
    mode = listing.mode
    t = listing.arrays
    n = len(listing.arrays.group)
    before, after = _pairs(t).T
    tables = {
        "before": grouped(after, before, n),
        "after": grouped(before, after, n),
        "neighbours": grouped(np.append(after, before), np.append(before, after), n),
        "members": grouped(t.group, np.arange(n), n),
    }
    ragged = {name: mode.whole(items) for name, (_, items) in tables.items()}
    ragged |= {f"{name}_at": mode.whole(offsets) for name, (offsets, _) in tables.items()}
    return State(
        order=mode.whole(found.order),
        position=mode.counts(n),
        device=mode.whole(found.device),
        start=mode.numbers(n),
        finish=mode.numbers(n),
        other_start=mode.numbers(n),
        other_finish=mode.numbers(n),
        best_order=mode.whole(found.order),
        best_device=mode.whole(found.device),
        tail=listing.tail,
        path=mode.counts(n),
        moved=mode.counts(n),
        moved_from=mode.counts(n),
        seeds=mode.whole([1 + seed * 7919 % 2147483000, 1 + seed * 104729 % 2147483000]),
        **ragged,
    )


def _pairs(t: Tables) -> NDArray[np.int64]:
    """Return the pairs of predecessor and successor, each once."""
    n = len(t.group)
    reader = np.repeat(np.arange(n), np.diff(t.reads_at))
    maker = t.maker[t.reads]
    later = np.repeat(np.arange(n), np.diff(t.before_at))
    pairs = np.concatenate(
        [np.stack([maker, reader], 1)[maker >= 0], np.stack([t.before, later], 1)]
    )
    return np.unique(pairs, axis=0)


# ---- kernels


class State(NamedTuple):
    """Working memory of ``anneal``: a state, its schedule, the best state, and neighbours."""

    order: Any
    position: Any
    device: Any
    start: Any
    finish: Any
    other_start: Any
    other_finish: Any
    best_order: Any
    best_device: Any
    tail: Any
    path: Any
    moved: Any
    moved_from: Any
    seeds: Any
    neighbours_at: Any
    neighbours: Any
    before_at: Any
    before: Any
    after_at: Any
    after: Any
    members_at: Any
    members: Any


@kernel
def anneal(
    t: Tables,
    w: State,
    s: Planning,
    moves: int,
    heat: float,
    weight: float,
    current: float,
    best: float,
    bound: float,
) -> tuple[float, float]:
    """Make moves at one temperature, ``heat`` seconds; return the current and the best makespan.

    A move that adds a second of work counts as one that also adds ``weight`` seconds to the
    makespan. ``w`` holds the state and the best one found, in ``best_*``. Stops at ``bound``.
    """
    n = len(w.order)
    length = 0
    for i in range(n):
        w.position[w.order[i]] = i
    for move in range(moves):
        if best <= bound:
            break
        if move % 50 == 0:
            length = critical_path(t, w)
        task = w.path[below(w.seeds, length)] if uniform(w.seeds) < 0.6 else below(w.seeds, n)
        kind = uniform(w.seeds)
        changed = 0
        old = w.position[task]
        new = w.position[task]
        if kind < 0.65:
            changed = propose_device(t, w, task)
        if kind >= 0.45:
            new = propose_place(w, task)
            shift(w, old, new)
        if changed == 0 and new == old:
            continue
        cap = (
            current - heat * math.log(max(uniform(w.seeds), 1e-12)) - weight * added(t, w, changed)
        )
        end = decode(t, w.order, w.device, w.tail, w.other_start, w.other_finish, cap, s)
        if end < math.inf:
            for i in range(n):
                w.start[i], w.finish[i] = w.other_start[i], w.other_finish[i]
            if end != current:
                length = critical_path(t, w)
            current = end
            if end < best:
                best = end
                for i in range(n):
                    w.best_order[i], w.best_device[i] = w.order[i], w.device[i]
        else:
            shift(w, new, old)
            for i in range(changed):
                w.device[w.moved[i]] = w.moved_from[i]
    return current, best


@kernel
def added(t: Tables, w: State, changed: int) -> float:
    """Return how many seconds of work the last ``changed`` moved tasks have added."""
    more = 0.0
    devices = len(t.streams)
    for i in range(changed):
        base = w.moved[i] * devices
        more += t.seconds[base + w.device[w.moved[i]]] - t.seconds[base + w.moved_from[i]]
    return more


@kernel
def uniform(seeds: Any) -> float:
    """Return a random number in (0, 1), by L'Ecuyer's combined generator (CACM 31(6), 1988)."""
    seeds[0] = 40014 * seeds[0] % 2147483563
    seeds[1] = 40692 * seeds[1] % 2147483399
    return float((seeds[0] - seeds[1]) % 2147483562 + 1) / 2147483563.0


@kernel
def below(seeds: Any, count: int) -> int:
    """Return a random integer below ``count``."""
    return int(uniform(seeds) * count)


@kernel
def propose_device(t: Tables, w: State, task: int) -> int:
    """Move a task, its group and perhaps neighbours to another device; return how many moved."""
    devices = len(t.streams)
    before = w.device[task]
    where = w.device[neighbour(w, task)] if uniform(w.seeds) < 0.58 else below(w.seeds, devices)
    if where == before:
        where = below(w.seeds, devices)
    if where == before:
        return 0
    count = relocate(t, w, task, where, 0)
    if count and uniform(w.seeds) < 0.3:
        reach = 0.3 + 0.6 * uniform(w.seeds)
        i = 0
        while i < count < 12:
            for j in range(w.neighbours_at[w.moved[i]], w.neighbours_at[w.moved[i] + 1]):
                if w.device[w.neighbours[j]] == before and count < 12 and uniform(w.seeds) < reach:
                    count = relocate(t, w, w.neighbours[j], where, count)
            i += 1
    return count


@kernel
def neighbour(w: State, task: int) -> int:
    """Return a random producer or reader of this task's data; itself if there is none."""
    count = w.neighbours_at[task + 1] - w.neighbours_at[task]
    return w.neighbours[w.neighbours_at[task] + below(w.seeds, count)] if count else task


@kernel
def relocate(t: Tables, w: State, task: int, where: int, count: int) -> int:
    """Move a task and its group, if allowed; store their old devices, and return their number."""
    devices = len(t.streams)
    group = t.group[task]
    if (
        t.together[task * devices + where] == math.inf
        or t.seconds[task * devices + where] == math.inf
    ):
        return count
    for i in range(w.members_at[group], w.members_at[group + 1]):
        member = w.members[i]
        if w.device[member] != where:
            w.moved[count], w.moved_from[count] = member, w.device[member]
            w.device[member] = where
            count += 1
    return count


@kernel
def propose_place(w: State, task: int) -> int:
    """Return a random position in the list between a task's predecessors and successors."""
    low = 0
    high = len(w.order) - 1
    for i in range(w.before_at[task], w.before_at[task + 1]):
        low = max(low, w.position[w.before[i]] + 1)
    for i in range(w.after_at[task], w.after_at[task + 1]):
        high = min(high, w.position[w.after[i]] - 1)
    return low + below(w.seeds, high - low + 1)


@kernel
def shift(w: State, old: int, new: int) -> None:
    """Move an element of the list to another position."""
    task = w.order[old]
    step = 1 if new > old else -1
    for i in range(old, new, step):
        w.order[i] = w.order[i + step]
        w.position[w.order[i]] = i
    w.order[new] = task
    w.position[task] = new


@kernel
def critical_path(t: Tables, w: State) -> int:
    """Store the tasks of a critical path, the last first; return their number."""
    devices = len(t.streams)
    n = len(w.order)
    task = 0
    for i in range(n):
        if w.finish[i] > w.finish[task]:
            task = i
    count = 0
    while task >= 0 and count < n:
        w.path[count] = task
        count += 1
        p = w.device[task]
        begin = w.start[task]
        latest = 0.0
        found = -1
        for j in range(t.before_at[task], t.before_at[task + 1]):
            if w.finish[t.before[j]] >= latest:
                latest = w.finish[t.before[j]]
                found = t.before[j]
        for j in range(t.reads_at[task], t.reads_at[task + 1]):
            datum = t.reads[j]
            maker = t.maker[datum]
            if maker >= 0:
                since = w.finish[maker]
                if w.device[maker] != p:
                    since += copy_seconds(t, datum, w.device[maker] * devices + p)
                if since >= latest:
                    latest = since
                    found = maker
        if latest < begin:
            for other in range(n):
                if (
                    other != task
                    and w.device[other] == p
                    and w.finish[other] == begin
                    and w.start[other] < begin
                ):
                    found = other
                    break
        task = found if begin > 0 else -1
    return count
