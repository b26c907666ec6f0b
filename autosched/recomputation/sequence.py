"""Decide which steps of one device are repeated, so that its memory suffices in the least time.

Steps run in a given order, one at a time. What a step makes is in memory from its start to the end of
its last reader. A step that is repeated gives up its memory in between:

    a b c d     b reads a, c reads b, d reads a and c: a is in memory during c
    a b c a d   it is not, but is made twice

Up to ``_FEW`` steps, the plan is the best of all: Dijkstra's algorithm over the sets of what can be in
memory. Of more steps, simulated annealing adds and removes repetitions; an excess of memory counts
as seconds, more and more until the plans fit. Knows no graph and no torch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from autosched._lib.jit import Mode, kernel, mode
from autosched.errors import MemoryLimitError, ScheduleError

_FEW = 12
_WORK = 1e8  # steps that are measured in a search
_MOVES = 100_000  # in a search at most
_PRIME = 2147483647


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
    order = _Search(steps, seed).plan(room, seconds)
    found = _plan(steps, order, room) if order else None
    return found if found and found.peak <= room else None


def _plan(steps: Sequence[Step], order: Iterable[int], room: float) -> Plan:
    order = tuple(order)
    seconds = math.fsum(steps[i].seconds for i in order)
    return Plan(order, seconds, peak_of(steps, order), least_seconds(steps, room))


def peak_of(steps: Sequence[Step], order: Sequence[int]) -> float:
    """Return the most memory that an order holds at any time."""
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
    return max(accumulate(change), default=0.0)


# ---- bounds


def _held(steps: Sequence[Step]) -> list[tuple[float, list[int]]]:
    """Return for each step what is certainly in memory when it first runs, and what may be dropped.

    What it reads is, and what is needed later and cannot be repeated after it.
    """
    last_use = list(range(len(steps)))
    for i, step in enumerate(steps):
        for read in step.reads:
            last_use[read] = i
    for i, step in enumerate(steps):
        if step.is_kept:
            last_use[i] = len(steps)
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


# ---- many steps


class _Tables(NamedTuple):
    """The steps. Reads of a step are at ``reads_at[step]`` to ``reads_at[step + 1]``."""

    seconds: Any
    nbytes: Any
    last: Any
    kept: Any
    reads_at: Any
    reads: Any


class _State(NamedTuple):
    """An order: runs of steps, sorted by slot and step.

    A repetition has the slot of the step before whose first run it is; a first run has its own.
    """

    slot: Any  # [run]
    step: Any  # [run]
    end: Any  # [run] the last run that reads it
    held: Any  # [run] bytes in memory
    freed: Any  # [run]
    made: Any  # [step] its last run
    old_slot: Any  # [run]
    old_step: Any
    best_slot: Any
    best_step: Any
    counts: Any  # [2] runs of this order, and of the best
    stack: Any  # [step]
    random: Any  # [1]


@kernel
def below(w: _State, count: int) -> int:
    """Return a random number; Park and Miller, CACM 31(10), 1988."""
    w.random[0] = w.random[0] * 48271 % _PRIME
    return int(w.random[0] % count)


@kernel
def measured(t: _Tables, w: _State, room: float) -> float:
    """Fill ``end`` and ``held``; return the sum over runs of the bytes above ``room``."""
    length = w.counts[0]
    for i in range(length):
        step = w.step[i]
        for k in range(t.reads_at[step], t.reads_at[step + 1]):
            w.end[w.made[t.reads[k]]] = i
        w.made[step] = i
        w.end[i] = i
        w.freed[i] = 0.0
    w.freed[length] = 0.0
    for step in range(len(t.kept)):
        if t.kept[step]:
            w.end[w.made[step]] = length - 1
    for i in range(length):
        w.freed[w.end[i] + 1] += t.nbytes[w.step[i]]
    held = 0.0
    excess = 0.0
    for i in range(length):
        held += t.nbytes[w.step[i]] - w.freed[i]
        w.held[i] = held
        if held > room:
            excess += held - room
    return excess


@kernel
def place_of(w: _State, slot: int, step: int) -> int:
    """Return where a step is, or would be, in a slot."""
    low = 0
    high = w.counts[0]
    while low < high:
        middle = (low + high) // 2
        if w.slot[middle] < slot or (w.slot[middle] == slot and w.step[middle] < step):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def inserted(w: _State, slot: int, step: int) -> bool:
    """Repeat a step in a slot; return whether it was not there."""
    length = w.counts[0]
    at = place_of(w, slot, step)
    if length + 1 >= len(w.slot):
        return False
    if at < length and w.slot[at] == slot and w.step[at] == step:
        return False
    for i in range(length, at, -1):
        w.slot[i] = w.slot[i - 1]
        w.step[i] = w.step[i - 1]
    w.slot[at] = slot
    w.step[at] = step
    w.counts[0] = length + 1
    return True


@kernel
def remove(w: _State, at: int) -> None:
    """Remove a run."""
    w.counts[0] -= 1
    for i in range(at, w.counts[0]):
        w.slot[i] = w.slot[i + 1]
        w.step[i] = w.step[i + 1]


@kernel
def next_use(t: _Tables, w: _State, run: int, after: int) -> int:
    """Return the first run after one that reads what a run made; the end if none does."""
    step = w.step[run]
    for i in range(after + 1, w.end[run] + 1):
        for k in range(t.reads_at[w.step[i]], t.reads_at[w.step[i] + 1]):
            if t.reads[k] == step:
                return i
    return int(w.counts[0])


@kernel
def reads(t: _Tables, step: int, other: int) -> bool:
    """Return whether a step reads another."""
    found = False
    for k in range(t.reads_at[step], t.reads_at[step + 1]):
        found = found or t.reads[k] == other
    return found


@kernel
def chosen(t: _Tables, w: _State, at: int, tries: int) -> tuple[int, int]:
    """Return what may be dropped during a run, and the slot of its next use; -1 if nothing is found.

    Of some candidates, that with the most bytes and runs per second is taken.
    """
    best = -1
    best_slot = 0
    best_rate = -1.0
    for _ in range(tries):
        run = below(w, at + 1)
        while run >= 0 and (w.end[run] <= at or run == at or reads(t, w.step[at], w.step[run])):
            run -= 1
        if run < 0 or t.nbytes[w.step[run]] <= 0:
            continue
        step = w.step[run]
        use = next_use(t, w, run, at)
        slot = w.slot[use] if use < w.counts[0] else len(t.kept)
        rate = t.nbytes[step] * (use - at) / (t.seconds[step] + 1e-12)
        if rate > best_rate and slot <= t.last[step]:
            best, best_slot, best_rate = step, slot, rate
    return best, best_slot


@kernel
def drop(t: _Tables, w: _State, room: float, tries: int) -> float:
    """Drop something where memory is exceeded, and repeat it before its next use; return the seconds.

    What it reads is repeated too, if it would have to be kept instead; most often.
    """
    length = w.counts[0]
    at = below(w, length)
    while w.held[at] <= room:
        at = at + 1 if at + 1 < length else 0
    w.stack[0], slot = chosen(t, w, at, tries)
    if w.stack[0] < 0:
        return 0.0
    first = w.slot[at] + 1
    if first < slot and below(w, 4) == 0:
        slot = first + below(w, slot - first)
    depth = 1
    added = 0.0
    while depth:
        depth -= 1
        step = w.stack[depth]
        if not inserted(w, slot, step):
            continue
        added += t.seconds[step]
        here = place_of(w, slot, step)
        for k in range(t.reads_at[step], t.reads_at[step + 1]):
            other = t.reads[k]
            run = here - 1
            while w.step[run] != other:
                run -= 1
            is_gone = run < at and w.end[run] <= at and slot <= t.last[other]
            if is_gone and depth < len(w.stack) and below(w, 8):
                w.stack[depth] = other
                depth += 1
    return added


@kernel
def anneal(
    t: _Tables, w: _State, room: float, moves: int, hot: float, cold: float, price: float
) -> float:
    """Anneal an order for a number of moves; return the seconds of the best within ``room``.

    ``price`` is what a byte above ``room`` during a run counts, in seconds.
    """
    plain = len(t.kept)
    seconds = 0.0
    for i in range(w.counts[0]):
        seconds += t.seconds[w.step[i]]
    excess = measured(t, w, room)
    best = seconds if excess <= 0 else math.inf
    heat = hot
    cooling = (cold / hot) ** (1.0 / moves)
    for _ in range(moves):
        heat *= cooling
        length = w.counts[0]
        for i in range(length):
            w.old_slot[i] = w.slot[i]
            w.old_step[i] = w.step[i]
        more = 0.0
        now = excess
        kind = below(w, 4)
        if length > plain and (kind > 0 or excess <= 0):
            at = below(w, length)
            while w.slot[at] == w.step[at]:
                at = at + 1 if at + 1 < length else 0
            step = w.step[at]
            slot = w.slot[at]
            remove(w, at)
            more -= t.seconds[step]
            if kind == 1:
                other = slot + 1 + below(w, 8) if below(w, 2) else slot - 1 - below(w, 8)
                if step < other <= t.last[step] and inserted(w, other, step):
                    more += t.seconds[step]
            now = measured(t, w, room)
        for _turn in range(1 + below(w, 3)):
            if now <= 0:
                break
            more += drop(t, w, room, 1 + below(w, 8))
            now = measured(t, w, room)
        change = more + price * (now - excess)
        if change <= 0 or change < -heat * math.log((1 + below(w, _PRIME - 2)) / _PRIME):
            seconds += more
            excess = now
            price *= 1.003 if excess > 0 else 0.997
            if excess <= 0 and seconds < best - 1e-12:
                best = seconds
                w.counts[1] = w.counts[0]
                for i in range(w.counts[0]):
                    w.best_slot[i] = w.slot[i]
                    w.best_step[i] = w.step[i]
        else:
            w.counts[0] = length
            for i in range(length):
                w.slot[i] = w.old_slot[i]
                w.step[i] = w.old_step[i]
            price *= 1.003 if excess > 0 else 0.997
            measured(t, w, room)
    return best


class _Search:
    """Tables of steps, and the orders that are being searched."""

    def __init__(self, steps: Sequence[Step], seed: int):
        self.steps = steps
        self.count = len(steps)
        self.moves = max(1000, min(_MOVES, int(_WORK / (3 * self.count))))
        self.how: Mode = mode(3.0 * self.moves * self.count, anneal)
        how = self.how
        ends = np.cumsum([0, *(len(step.reads) for step in steps)])
        flat = [read for step in steps for read in step.reads]
        self.tables = _Tables(
            how.floats([float(step.seconds) for step in steps]),
            how.floats([float(step.nbytes) for step in steps]),
            how.whole([step.last_repeat for step in steps]),
            how.whole([step.is_kept for step in steps]),
            how.whole(ends),
            how.whole(flat),
        )
        most = 8 * self.count + 64
        plain = np.zeros(most, np.int64)
        plain[: self.count] = np.arange(self.count)
        whole, counts, numbers = how.whole, how.counts, how.numbers
        self.state = _State(
            whole(plain), whole(plain), counts(most), numbers(most), numbers(most),
            counts(self.count), counts(most), counts(most), whole(plain), whole(plain),
            counts(2, self.count), counts(self.count), counts(1, 1 + (seed * 7919 + 104729) % _PRIME),
        )  # fmt: skip

    def plan(self, room: float, seconds: float | None) -> tuple[int, ...] | None:
        """Return the order of least time within ``room`` that is found, or None."""
        w, t = self.state, self.tables
        mean = math.fsum(step.seconds for step in self.steps) / self.count
        excess = self.how(measured)(t, w, room)
        if not excess or not mean:
            price = 1.0 / (1.0 + excess)
        else:
            price = mean * self.count / excess
        ends = math.inf if seconds is None else perf_counter() + seconds
        least = math.inf
        found = None
        for turn in range(4):
            if turn and perf_counter() > ends:
                break
            began = self.how(anneal)(
                t, w, room, self.moves // 4, (mean or 1.0) * 0.5**turn, mean * 0.01 or 1e-9, price
            )
            if began < least:
                least = began
                found = tuple(int(w.best_step[i]) for i in range(w.counts[1]))
        return found


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
