"""Decide which steps of one device are repeated, so that its memory suffices in the least time.

Steps run in a given order, one at a time. What a step makes is in memory from its start to the end of
its last reader. A step that is repeated gives up its memory in between:

    a b c d     b reads a, c reads b, d reads a and c: a is in memory during c
    a b c a d   it is not, but is made twice

Up to ``_FEW`` steps, the plan is the best of all: Dijkstra's algorithm over the sets of what can be in
memory. Of more, it is the best for chains, improved by annealing. Knows no graph and no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from autosched.recomputation.annealing import improved
from autosched.recomputation.chains import Chain

_FEW = 16


class Step(NamedTuple):
    """What runs on the device, with the memory that it makes.

    ``reads`` are positions of steps whose memory it reads. It may be repeated before the step at
    ``last_repeat`` or an earlier one with the same result; -1: never. ``is_kept``: its memory is held
    to the end.
    """

    seconds: float
    nbytes: float
    reads: tuple[int, ...]
    last_repeat: int = -1
    is_kept: bool = False


class Plan(NamedTuple):
    """An order in which a position that comes again is repeated."""

    order: tuple[int, ...]
    seconds: float
    peak: float


def planned(
    steps: Sequence[Step], limit: float, *, base: float = 0.0, seconds: float | None = None
) -> Plan | None:
    """Return a plan of little time whose peak is within a limit, or None if none was found.

    ``base`` is held all the time. The search takes up to ``seconds``; by default, it is as long for
    the same steps on every machine.

    >>> steps = [Step(1, 4, (), 3), Step(1, 4, (0,), 3), Step(1, 4, (1,), 3), Step(1, 4, (2, 0), 3)]
    >>> planned(steps, 12)
    Plan(order=(0, 1, 2, 3), seconds=4.0, peak=12.0)
    """
    room = limit - base
    last = last_uses(steps)
    order: tuple[int, ...] | None = tuple(range(len(steps)))
    plain = profile_of(steps, range(len(steps)))
    if max(plain, default=0.0) > room:
        if least_room(steps, last) > room:
            return None
        if len(steps) <= _FEW:
            order = _shortest(steps, room)
        else:
            start = Chain(steps, plain, last, room).repetitions()
            order = improved(steps, start, room, seconds)
    if order is None:
        return None
    peak = peak_of(steps, order)
    took = math.fsum(steps[i].seconds for i in order)
    return Plan(order, took, peak + base) if peak <= room else None


def peak_of(steps: Sequence[Step], order: Sequence[int]) -> float:
    """Return the most memory that an order holds at any time."""
    return max(profile_of(steps, order), default=0.0)


def profile_of(steps: Sequence[Step], order: Sequence[int]) -> list[float]:
    """Return the memory that each run of an order holds."""
    made: dict[int, int] = {}
    end = [*range(len(order))]
    for at, i in enumerate(order):
        for read in steps[i].reads:
            end[made[read]] = at
        made[i] = at
    for i, step in enumerate(steps):
        if step.is_kept:
            end[made[i]] = len(order) - 1
    change = [0.0] * (len(order) + 1)
    for at, i in enumerate(order):
        change[at] += steps[i].nbytes
        change[end[at] + 1] -= steps[i].nbytes
    return [*accumulate(change)][:-1]


def last_uses(steps: Sequence[Step]) -> list[int]:
    """Return the last reader of each step; the number of steps if it is kept."""
    last = list(range(len(steps)))
    for i, step in enumerate(steps):
        for read in step.reads:
            last[read] = i
    return [len(steps) if step.is_kept else i for i, step in zip(last, steps, strict=True)]


def least_room(steps: Sequence[Step], last: Sequence[int]) -> float:
    """Return memory that every plan needs: at first runs, for what is read and what must stay.

    What is needed later stays, from when it cannot be repeated any more.
    """
    change = [0.0] * (len(steps) + 1)
    here = [step.nbytes for step in steps]
    since = [max(i + 1, step.last_repeat) for i, step in enumerate(steps)]
    for i, step in enumerate(steps):
        here[i] += sum(steps[read].nbytes for read in {*step.reads} if since[read] > i)
        if since[i] <= min(last[i], len(steps) - 1):
            change[since[i]] += step.nbytes
            change[min(last[i] + 1, len(steps))] -= step.nbytes
    return max((a + b for a, b in zip(here, accumulate(change), strict=False)), default=0.0)


# ---- few steps


def _shortest(steps: Sequence[Step], room: float) -> tuple[int, ...] | None:
    """Return the shortest plan within ``room``, or None if there is none.

    A state is the next step that has not run, and what is in memory, as bits.
    """
    count = len(steps)
    reads = [sum(1 << read for read in {*step.reads}) for step in steps]
    kept = sum(1 << i for i, step in enumerate(steps) if step.is_kept)
    needed = [kept] * (count + 1)  # by the next step: what may be read from then on
    for at in range(count + 1):
        for i, step in enumerate(steps):
            if i >= at or step.last_repeat >= at:
                needed[at] |= reads[i]
    size = [0.0]
    for i in range(count):
        size += [nbytes + steps[i].nbytes for nbytes in size]
    rest = [*accumulate((step.seconds for step in reversed(steps)), initial=0.0)][::-1]
    before: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
    best = {(0, 0): 0.0}
    heap = [(rest[0], 0, 0, 0)]
    done = set[tuple[int, int]]()
    while heap:
        _, _, at, held = heapq.heappop(heap)
        state = at, held
        if state in done:
            continue
        done.add(state)
        took = best[state]
        if at == count and held & kept == kept:
            return _backwards(before, state)
        following = [((at, held & ~(1 << i)), 0.0, -1) for i in range(count) if held >> i & 1]
        for i in range(min(at + 1, count)):
            is_next = i == at
            if held >> i & 1 or not (is_next or at <= steps[i].last_repeat):
                continue
            if held & reads[i] == reads[i] and size[held | 1 << i] <= room:
                to = at + is_next
                following.append(((to, (held | 1 << i) & needed[to]), steps[i].seconds, i))
        for after, more, i in following:
            if took + more < best.get(after, math.inf):
                best[after] = took + more
                before[after] = state, i
                heapq.heappush(heap, (took + more + rest[after[0]], -after[0], *after))
    return None


def _backwards(
    before: dict[tuple[int, int], tuple[tuple[int, int], int]], state: tuple[int, int]
) -> tuple[int, ...]:
    order = []
    while state in before:
        state, i = before[state]
        if i >= 0:
            order.append(i)
    return tuple(reversed(order))
