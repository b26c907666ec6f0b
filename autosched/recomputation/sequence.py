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
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from autosched.errors import MemoryLimitError, ScheduleError
from autosched.recomputation.annealing import Search
from autosched.recomputation.chains import Chain

_FEW = 12


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
    """An order in which a position that comes again is repeated; ``bound`` holds for all plans."""

    order: tuple[int, ...]
    seconds: float
    peak: float
    bound: float


def recomputed(
    steps: Sequence[Step],
    limit: float,
    *,
    base: float = 0.0,
    seconds: float | None = None,
    seed: int = 0,
) -> Plan:
    """Return a plan of little time whose peak is at most ``limit``; ``base`` is held all the time.

    The search takes up to ``seconds``; by default, it is as long for the same steps on every machine.
    Raises MemoryLimitError with the least limit that was found to suffice.

    >>> steps = [Step(1, 4, (), 3), Step(1, 4, (0,), 3), Step(1, 4, (1,), 3), Step(1, 4, (2, 0), 3)]
    >>> recomputed(steps, 16).order, recomputed(steps, 12).order
    ((0, 1, 2, 3), (0, 1, 2, 3))
    """
    _check(steps, limit)
    found = _planned(steps, limit - base, seconds, seed)
    if found is None:
        raise MemoryLimitError(_refusal(steps, limit, base, seconds, seed))
    return found._replace(peak=found.peak + base)


def curve(
    steps: Sequence[Step],
    limits: Sequence[float],
    *,
    base: float = 0.0,
    seconds: float | None = None,
    seed: int = 0,
) -> list[Plan | None]:
    """Return a plan for each limit, None where none was found: a lower limit is never faster."""
    for limit in limits:
        _check(steps, limit)
    found = [_planned(steps, limit - base, seconds, seed) for limit in limits]
    plans = []
    for limit, own in zip(limits, found, strict=True):
        fitting = [plan for plan in found if plan and plan.peak <= limit - base]
        best = min(fitting, key=lambda plan: plan.seconds, default=None)
        shared = best and own and best._replace(bound=own.bound)
        plans.append(shared and shared._replace(peak=shared.peak + base))
    return plans


def _check(steps: Sequence[Step], limit: float) -> None:
    if not limit >= 0:
        raise ScheduleError(f"a limit of memory is at least 0 B, got {limit}")
    for i, step in enumerate(steps):
        if not all(0 <= other < i for other in step.reads):
            raise ScheduleError(f"step {i} reads {step.reads}: it may only read earlier steps")


def _planned(steps: Sequence[Step], room: float, seconds: float | None, seed: int) -> Plan | None:
    """Return a plan within ``room``, or None."""
    plain = tuple(range(len(steps)))
    if (once := _plan(steps, plain, room)).peak <= room:
        return once
    if least_room(steps) > room:
        return None
    if len(steps) <= _FEW:
        order = _shortest(steps, room)
        found = _plan(steps, order, room) if order else None
        return found and found._replace(bound=found.seconds)
    chain = Chain(steps, _profile(steps, plain), _last_uses(steps), room)
    order = Search(steps, seed).plan(room, seconds, chain.repetitions())
    found = _plan(steps, order, room) if order else None
    return found if found and found.peak <= room else None


def _plan(steps: Sequence[Step], order: Iterable[int], room: float) -> Plan:
    order = tuple(order)
    seconds = math.fsum(steps[i].seconds for i in order)
    return Plan(
        order, seconds, max(_profile(steps, order), default=0.0), least_seconds(steps, room)
    )


def _profile(steps: Sequence[Step], order: Sequence[int]) -> list[float]:
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


def _last_uses(steps: Sequence[Step]) -> list[int]:
    """Return the last reader of each step; the number of steps if it is kept."""
    last = list(range(len(steps)))
    for i, step in enumerate(steps):
        for read in step.reads:
            last[read] = i
    return [len(steps) if step.is_kept else i for i, step in zip(last, steps, strict=True)]


def _refusal(
    steps: Sequence[Step], limit: float, base: float, seconds: float | None, seed: int
) -> str:
    """Return what a plan needs at least, and which limit suffices."""
    least = least_room(steps)
    enough, _ = _enough(steps, max(least, limit - base), seconds, seed)
    return (
        f"{limit:,.0f} B of memory do not suffice for {len(steps)} steps, also where they are "
        f"repeated: any plan needs {least + base:,.0f} B, and {enough + base:,.0f} B suffice"
    )


def _enough(
    steps: Sequence[Step], low: float, seconds: float | None, seed: int
) -> tuple[float, Plan]:
    """Return the least room that is found to suffice by halving, with its plan."""
    plan = _plan(steps, range(len(steps)), math.inf)
    for _ in range(5):
        if low >= plan.peak * (1 - 1e-3):
            break
        middle = (low + plan.peak) / 2
        found = _planned(steps, middle, seconds, seed)
        if found:
            plan = found
        else:
            low = middle
    return plan.peak, plan


# ---- bounds


def _held(steps: Sequence[Step]) -> list[tuple[float, list[int]]]:
    """Return for each step what is certainly in memory when it first runs, and what may be dropped.

    What it reads is, and what is needed later and cannot be repeated after it.
    """
    last_use = _last_uses(steps)
    held = []
    alive: list[int] = []
    for i, step in enumerate(steps):
        alive = [other for other in alive if last_use[other] >= i]
        stay = {other for other in alive if steps[other].last_repeat <= i} | {*step.reads}
        least = step.nbytes + sum(steps[other].nbytes for other in stay)
        held.append((least, [other for other in alive if other not in stay]))
        alive.append(i)
    return held


def least_room(steps: Sequence[Step]) -> float:
    """Return memory that every plan needs."""
    return max((least for least, _ in _held(steps)), default=0.0)


def least_seconds(steps: Sequence[Step], room: float) -> float:
    """Return seconds that every plan within ``room`` takes.

    What must be dropped while a step runs, and is read later, is repeated. The least is a knapsack;
    its bound is that of parts of steps.
    """
    most = 0.0
    for least, others in _held(steps):
        over = least + sum(steps[i].nbytes for i in others) - room
        more = 0.0
        for i in sorted(others, key=lambda i: steps[i].seconds / (steps[i].nbytes or 1e-9)):
            if over <= 0 or not steps[i].nbytes:
                break
            more += steps[i].seconds * min(1.0, over / steps[i].nbytes)
            over -= steps[i].nbytes
        most = max(most, more)
    return math.fsum(step.seconds for step in steps) + most * (1 - 1e-9)


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
