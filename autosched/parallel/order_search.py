"""Improve an order of a pipeline by simulated annealing.

A move takes an action to another place in the row of its device: half of them into a gap, where the
device waits, the others by a few places. The order is simulated again from there on, until it is
known to be too long. Besides the longest time of a device, the sum of their times counts a little:
gaps close also where another device takes longest. No move exceeds the memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import kernel, mode
from autosched.parallel.orders import HELD, KINDS, Action, Order

_HOT, _COLD = 0.02, 0.001  # temperatures, in times of a micro-batch
_SUM = 0.02  # what the sum of times counts
_NEAR, _FAR = 40, 30  # the most places of moves into gaps, and of others
_LOOKS = 20  # for a gap
_PRIME = 2147483647
# Moves: as many as take a second or a few.
_LEAST_MOVES, _MOST_MOVES, _WORK = 20_000, 300_000, 6e8


class Tables(NamedTuple):
    """What an order is of. An action's number is (kind * stages + stage) * chunks + chunk."""

    device: NDArray[Any]  # [stage]
    seconds: NDArray[Any]  # [kind * stages + stage]
    work: NDArray[Any]  # [device] seconds
    at: NDArray[Any]  # [device + 1] where its row begins


class State(NamedTuple):
    """An order, with the times of its actions, and a changed one, with those that are new."""

    rows: NDArray[Any]  # [place] the rows of all devices, one after another
    best: NDArray[Any]  # [place] the best so far
    held: NDArray[Any]  # [place] half stages' activations after an action
    waits: NDArray[Any]  # [place] seconds in which the device has waited, before an action
    starts: NDArray[Any]  # [action]
    new: NDArray[Any]  # [action]
    stamp: NDArray[Any]  # [action] the trial in which ``new`` was computed
    place: NDArray[Any]  # [device] of its next action
    free: NDArray[Any]  # [device]
    gaps: NDArray[Any]  # [device] the seconds in which it waits
    random: NDArray[Any]  # [1]


@kernel
def below(w: State, count: int) -> int:
    """Return a random number; Park and Miller, CACM 31(10), 1988."""
    w.random[0] = w.random[0] * 48271 % _PRIME
    return int(w.random[0] % count)


@kernel
def begin(t: Tables, w: State, chunks: int, since: float) -> int:
    """Set each device to its first action from some time on; return how many follow."""
    left = 0
    for d in range(len(t.work)):
        low = t.at[d]
        high = t.at[d + 1]
        while low < high:
            middle = (low + high) // 2
            if w.starts[w.rows[middle]] < since:
                low = middle + 1
            else:
                high = middle
        w.place[d] = low
        left += t.at[d + 1] - low
        w.free[d] = 0.0
        w.gaps[d] = 0.0
        if low > t.at[d]:
            last = w.rows[low - 1]
            w.free[d] = w.starts[last] + t.seconds[last // chunks]
            w.gaps[d] = w.waits[low - 1]
    return left


@kernel
def arrival(
    t: Tables, w: State, chunks: int, copy: float, since: float, trial: int, action: int
) -> float:
    """Return when an action could begin if its device were free; -1 if that is not known yet."""
    stages = len(t.device)
    kind = action // chunks // stages
    stage = action // chunks % stages
    found = 0.0
    for other in (action - stages * chunks, action - chunks, action + chunks):
        if other == action - stages * chunks:
            counts = kind > 0
        elif other < action:
            counts = kind == 0 and stage > 0
        else:
            counts = kind == 1 and stage + 1 < stages
        if not counts:
            continue
        if w.stamp[other] == trial:
            end = w.new[other]
        elif w.starts[other] < since:
            end = w.starts[other]
        else:
            return -1.0
        end += t.seconds[other // chunks]
        if t.device[other // chunks % stages] != t.device[stage]:
            end += copy
        found = max(found, end)
    return found


@kernel
def simulated(
    t: Tables, w: State, chunks: int, copy: float, since: float, trial: int, most: float
) -> tuple[float, float]:
    """Time a changed order from some time on; return the longest time and the sum of times.

    Infinity if ``most`` is exceeded, or devices wait for each other.
    """
    left = begin(t, w, chunks, since)
    longest = 0.0
    total = 0.0
    for d in range(len(t.work)):
        longest = max(longest, t.work[d] + w.gaps[d])
        total += t.work[d] + w.gaps[d]
    before = left + 1
    while 0 < left < before:
        before = left
        for d in range(len(t.work)):
            while w.place[d] < t.at[d + 1]:
                action = w.rows[w.place[d]]
                start = arrival(t, w, chunks, copy, since, trial, action)
                if start < 0:
                    break
                if w.place[d] > t.at[d] and start > w.free[d]:
                    w.gaps[d] += start - w.free[d]
                    total += start - w.free[d]
                    longest = max(longest, t.work[d] + w.gaps[d])
                    if longest + _SUM * total > most:
                        return math.inf, math.inf
                w.new[action] = max(start, w.free[d])
                w.stamp[action] = trial
                w.free[d] = w.new[action] + t.seconds[action // chunks]
                w.place[d] += 1
                left -= 1
    return (math.inf, math.inf) if left else (longest, total)


@kernel
def accept(t: Tables, w: State, chunks: int, since: float) -> None:
    """Make the new times those of the order."""
    for d in range(len(t.work)):
        low = t.at[d + 1]
        while low > t.at[d] and w.starts[w.rows[low - 1]] >= since:
            low -= 1
        free = 0.0
        for i in range(t.at[d], t.at[d + 1]):
            action = w.rows[i]
            if i >= low:
                w.starts[action] = w.new[action]
            gap = w.starts[action] - free if i > t.at[d] else 0.0
            w.waits[i] = gap + (w.waits[i - 1] if i > t.at[d] else 0.0)
            free = w.starts[action] + t.seconds[action // chunks]


@kernel
def shift(w: State, old: int, new: int) -> None:
    """Take the action at a place to another place."""
    action = w.rows[old]
    step = 1 if new > old else -1
    for i in range(old, new, step):
        w.rows[i] = w.rows[i + step]
    w.rows[new] = action


@kernel
def is_possible(t: Tables, w: State, chunks: int, limit: int, old: int, new: int, low: int) -> bool:
    """Return whether an action may go to another place: by memory, and by what is in between."""
    stages = len(t.device)
    operation = w.rows[old] // chunks
    held = 2 if operation < stages else -1
    if new < old:
        if (w.held[new - 1] if new > low else 0) + held > limit:
            return False
        first, last, change = new, old - 1, held
    else:
        first, last, change = old + 1, new, -held
    for i in range(first, last + 1):
        other = w.rows[i] // chunks
        same = other % stages == operation % stages and (w.rows[i] - w.rows[old]) % chunks == 0
        if same or other == operation or w.held[i] + change > limit:
            return False
    return True


@kernel
def propose(t: Tables, w: State, chunks: int) -> tuple[int, int, int]:
    """Return a place of an action, another one in the same row, and where the row begins."""
    d = below(w, len(t.work))
    if below(w, 2):  # that which takes longest
        for other in range(len(t.work)):
            if t.work[other] + w.waits[t.at[other + 1] - 1] > t.work[d] + w.waits[t.at[d + 1] - 1]:
                d = other
    low = t.at[d]
    count = t.at[d + 1] - low
    old = low + below(w, count)
    if below(w, 2):
        for _ in range(_LOOKS):
            new = low + 1 + below(w, count - 1)
            if w.waits[new] > w.waits[new - 1]:
                return new + 1 + below(w, 1 + below(w, _NEAR)), new, low
    far = 1 + below(w, 1 + below(w, _FAR))
    return old, old - far if below(w, 2) else old + far, low


@kernel
def anneal(
    t: Tables, w: State, chunks: int, copy: float, limit: int, moves: int, hot: float, cold: float,
    enough: float,
) -> float:  # fmt: skip
    """Anneal an order for a number of moves; return the longest time of the best.

    Temperatures go from ``hot`` to ``cold``; ``limit`` is in half stages' activations.
    """
    longest, total = simulated(t, w, chunks, copy, -1.0, 1, math.inf)
    accept(t, w, chunks, -1.0)
    best = longest
    now = longest + _SUM * total
    heat = hot
    cooling = (cold / hot) ** (1.0 / moves)
    for move in range(moves):
        heat *= cooling
        old, new, low = propose(t, w, chunks)
        if new < low or new == old:
            continue
        stages = len(t.device)
        high = t.at[t.device[(w.rows[low] // chunks) % stages] + 1]
        if old >= high or new >= high or not is_possible(t, w, chunks, limit, old, new, low):
            continue
        first = min(old, new)
        since = 0.0
        if first > low:
            since = w.starts[w.rows[first - 1]] + t.seconds[w.rows[first - 1] // chunks]
        shift(w, old, new)
        most = now - heat * math.log((1 + below(w, _PRIME - 2)) / _PRIME)
        longest, total = simulated(t, w, chunks, copy, since, move + 2, most)
        if longest + _SUM * total > most:
            shift(w, new, old)
            continue
        now = longest + _SUM * total
        accept(t, w, chunks, since)
        held = w.held[first - 1] if first > low else 0
        for i in range(first, max(old, new) + 1):
            held += 2 if w.rows[i] // chunks < stages else -1
            w.held[i] = held
        if longest < best:
            best = longest
            for i in range(len(w.rows)):
                w.best[i] = w.rows[i]
            if best <= enough:
                break
    return best


def improved(order: Order, memory: float) -> Order:
    """Return an order that is at least as good, whose devices hold no more than ``memory``.

    ``memory`` is in micro-batches. The same arguments give the same order.
    """
    order = order.split()
    if order.bubble() <= 0.0 or not any(map(any, order.table)):
        return order
    places, chunks = order.devices, order.chunks
    moves = int(max(_LEAST_MOVES, min(_MOST_MOVES, _WORK / sum(map(len, order.rows)))))
    stages, devices = len(places), len(order.rows)
    numbers = [
        (KINDS.index(action.kind) * stages + action.stage) * chunks + action.chunk
        for row in order.rows
        for action in row
    ]
    at = np.cumsum([0, *map(len, order.rows)])
    seconds = np.array(order.table, float).ravel()  # a kernel is compiled for each type
    own = [seconds[np.array(numbers[a:b]) // chunks] for a, b in pairwise(at)]
    work = np.array([each.sum() for each in own])
    held = [np.cumsum([HELD[action.kind] for action in row]) for row in order.rows]
    how = mode(float(moves) * len(numbers), anneal)
    t = how.of(Tables(np.array(places), seconds, work, at))
    count = len(numbers)
    rows = np.array(numbers)
    w = State(
        how.whole(rows), how.whole(rows), how.whole(np.concatenate(held)), how.numbers(count),
        how.numbers(count), how.numbers(count), how.counts(count), how.counts(devices),
        how.numbers(devices), how.numbers(devices), how.counts(1, 7919),
    )  # fmt: skip
    most, copy = float(work.max()), float(order.copy)
    hot, cold = _HOT * (most / chunks), _COLD * (most / chunks)
    limit = math.floor(2 * stages / devices * memory + 1e-9)
    how(anneal)(t, w, chunks, copy, limit, moves, hot, cold, most)
    actions = [
        Action(number // chunks % stages, KINDS[number // chunks // stages], number % chunks)
        for number in map(int, w.best)
    ]
    return replace(order, rows=tuple(tuple(actions[a:b]) for a, b in pairwise(at)))
