"""Kernels of simulated annealing over the order and the devices of tasks.

A state is a list of tasks and a device for each. It represents the schedule in which each task in
turn is inserted into the first gap of its device that is long enough, and its copies are appended
to their streams. A move changes the device of a task, or of a task and its neighbours on that
device, or moves a task to another position in the list, between its last predecessor and its first
successor. Source: Kirkpatrick, Gelatt, Vecchi, Science 220, 1983; the moves are new.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from autosched._lib.jit import kernel
from autosched.policies.base.kernels import Planning, copy_seconds, decode
from autosched.problem import Tables

__all__ = ["State", "anneal"]


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
    """Move a task, its group, and perhaps its neighbours to another device.

    Return how many moved.
    """
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
    """Move a task and its group, if allowed, and store their old devices.

    Return how many are stored.
    """
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
