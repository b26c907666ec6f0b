"""Improve an order of a pipeline by simulated annealing.

A move takes an action to another place in the row of its device: half of them into a gap, where the
device waits, the others by a few places. The order is simulated again until it is known to be too
long, or to exceed the memory. Besides the longest time of a device, the sum of their times counts a little:
gaps close also where another device takes longest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import PRIME, below, kernel, mode
from autosched.parallel.orders import KINDS, Action, Order

_HOT, _COLD = 0.02, 0.001  # temperatures, in times of a micro-batch
_SUM = 0.02  # what the sum of times counts
_NEAR, _FAR = 40, 30  # the most places of moves into gaps, and of others
_LOOKS = 20  # for a gap
# Moves: as many as take a second or a few.
_LEAST_MOVES, _MOST_MOVES, _WORK = 3_000, 1_000_000, 1.2e8
_LARGE = 12_000  # actions; to make an order of more takes seconds, so it gets fewer moves


class Tables(NamedTuple):
    """What an order is of. An action's number is (kind * stages + stage) * chunks + chunk."""

    device: NDArray[Any]  # [stage]
    seconds: NDArray[Any]  # [kind * stages + stage]
    work: NDArray[Any]  # [device] seconds
    at: NDArray[Any]  # [device + 1] where its row begins


class State(NamedTuple):
    """An order that is changed, and the simulation of its devices."""

    rows: NDArray[Any]  # [place] the rows of all devices, one after another
    best: NDArray[Any]  # [place] the best so far
    waits: NDArray[Any]  # [place] seconds in which the device has waited, before an action
    new: NDArray[Any]  # [place] the same of the changed order
    ends: NDArray[Any]  # [action] -1 if not simulated yet
    place: NDArray[Any]  # [device] of its next action
    free: NDArray[Any]  # [device]
    held: NDArray[Any]  # [device] half stages' activations
    random: NDArray[Any]  # [1]


@kernel
def arrival(t: Tables, w: State, chunks: int, copy: float, action: int) -> float:
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
        if w.ends[other] < 0:
            return -1.0
        is_far = t.device[other // chunks % stages] != t.device[stage]
        found = max(found, w.ends[other] + (copy if is_far else 0.0))
    return found


@kernel
def simulated(
    t: Tables, w: State, chunks: int, copy: float, limit: int, most: float
) -> tuple[float, float]:
    """Time the changed order; return the longest time of a device, and with what the sum counts.

    Infinity if the latter exceeds ``most``, memory the ``limit``, or devices wait for each other.
    """
    for action in range(len(w.rows)):
        w.ends[action] = -1.0
    longest = 0.0
    total = 0.0
    for d in range(len(t.work)):
        w.place[d] = t.at[d]
        w.free[d] = 0.0
        w.held[d] = 0
        longest = max(longest, t.work[d])
        total += t.work[d]
    left = len(w.rows)
    before = left + 1
    while 0 < left < before:
        before = left
        for d in range(len(t.work)):
            while w.place[d] < t.at[d + 1]:
                i = w.place[d]
                action = w.rows[i]
                start = arrival(t, w, chunks, copy, action)
                if start < 0:
                    break
                waited = 0.0
                if i > t.at[d]:
                    gap = max(start - w.free[d], 0.0)
                    waited = w.new[i - 1] + gap
                    total += gap
                    longest = max(longest, t.work[d] + waited)
                w.new[i] = waited
                w.held[d] += 2 if action // chunks < len(t.device) else -1
                if w.held[d] > limit or longest + _SUM * total > most:
                    return math.inf, math.inf
                w.free[d] = max(start, w.free[d]) + t.seconds[action // chunks]
                w.ends[action] = w.free[d]
                w.place[d] += 1
                left -= 1
    return (math.inf, math.inf) if left else (longest, longest + _SUM * total)


@kernel
def shift(w: State, old: int, new: int) -> None:
    """Take the action at a place to another place."""
    action = w.rows[old]
    step = 1 if new > old else -1
    for i in range(old, new, step):
        w.rows[i] = w.rows[i + step]
    w.rows[new] = action


@kernel
def is_possible(t: Tables, w: State, chunks: int, old: int, new: int) -> bool:
    """Return whether an action may pass those between it and another place."""
    stages = len(t.device)
    operation = w.rows[old] // chunks
    for i in range(min(old, new), max(old, new) + 1):
        other = w.rows[i] // chunks
        same = other % stages == operation % stages and (w.rows[i] - w.rows[old]) % chunks == 0
        if i != old and (same or other == operation):
            return False
    return True


@kernel
def propose(t: Tables, w: State, chunks: int) -> tuple[int, int, int]:
    """Return a place of an action, another one in the same row, and where the row begins."""
    d = below(w.random, len(t.work))
    if below(w.random, 2):  # that which takes longest
        for other in range(len(t.work)):
            if t.work[other] + w.waits[t.at[other + 1] - 1] > t.work[d] + w.waits[t.at[d + 1] - 1]:
                d = other
    low = t.at[d]
    count = t.at[d + 1] - low
    old = low + below(w.random, count)
    if below(w.random, 2):
        for _ in range(_LOOKS):
            new = low + 1 + below(w.random, count - 1)
            if w.waits[new] > w.waits[new - 1]:
                return new + 1 + below(w.random, 1 + below(w.random, _NEAR)), new, low
    far = 1 + below(w.random, 1 + below(w.random, _FAR))
    return old, old - far if below(w.random, 2) else old + far, low


@kernel
def anneal(
    t: Tables, w: State, chunks: int, copy: float, limit: int, moves: int, hot: float, cold: float,
    enough: float,
) -> float:  # fmt: skip
    """Anneal an order for a number of moves; return the longest time of the best.

    Temperatures go from ``hot`` to ``cold``; ``limit`` is in half stages' activations.
    """
    best, now = simulated(t, w, chunks, copy, limit, math.inf)
    for i in range(len(w.rows)):
        w.waits[i] = w.new[i]
    heat = hot
    cooling = (cold / hot) ** (1.0 / moves)
    for _ in range(moves):
        heat *= cooling
        old, new, low = propose(t, w, chunks)
        high = t.at[t.device[w.rows[low] // chunks % len(t.device)] + 1]
        if new < low or new == old or max(old, new) >= high:
            continue
        if not is_possible(t, w, chunks, old, new):
            continue
        shift(w, old, new)
        most = now - heat * math.log((1 + below(w.random, PRIME - 2)) / PRIME)
        longest, total = simulated(t, w, chunks, copy, limit, most)
        if total > most:
            shift(w, new, old)
            continue
        now = total
        for i in range(len(w.rows)):
            w.waits[i] = w.new[i]
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
    count = sum(map(len, order.rows))
    moves = int(max(_LEAST_MOVES, min(_MOST_MOVES, _WORK / count * min(1.0, _LARGE / count))))
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
    how = mode(float(moves) * len(numbers), anneal)
    t = how.of(Tables(np.array(places), seconds, work, at))
    count = len(numbers)
    rows = np.array(numbers)
    w = State(
        how.whole(rows), how.whole(rows), how.numbers(count), how.numbers(count),
        how.numbers(count), how.counts(devices), how.numbers(devices), how.counts(devices),
        how.counts(1, 7919),
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
