"""Improve an order with repetitions by simulated annealing.

A move takes a repetition away, or to another slot, and then drops something where memory is exceeded
and repeats it before its next use. What is above the limit counts as seconds, a little more after
each move that leaves an excess, and less after others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, count
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autosched._lib.jit import PRIME, below, kernel, mode

if TYPE_CHECKING:
    from autosched.recomputation.sequence import Step

_WORK = 4e7  # steps that are measured in a search
_MOVES = 400  # for each step, at most
_SEED = 104730
_RISE = 1.01  # of the price of memory, in a move
_TURNS = 4
_PRICES = (1.0, 0.03, 0.001)  # at which it is decided what is repeated, or kept longer
_TOGETHER = 16  # steps that are repeated in one move, at most


class _Tables(NamedTuple):
    """The steps. Reads of a step are at ``reads_at[step]`` to ``reads_at[step + 1]``, kept ones last."""

    seconds: Any
    nbytes: Any
    last: Any
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
    used: Any  # [run] the last run so far that reads it
    made: Any  # [step] its last run
    old_slot: Any  # [run]
    old_step: Any
    best_slot: Any
    best_step: Any
    counts: Any  # [2] runs of this order, and of the best
    listed: Any  # steps that are repeated together
    chosen: Any
    random: Any  # [1]


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
    for k in range(t.reads_at[len(t.last)], len(t.reads)):
        w.end[w.made[t.reads[k]]] = length - 1
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
def gathered(
    t: _Tables, w: _State, i: int, slot: int, step: int, price: float
) -> tuple[int, float, float]:
    """List a step and what is repeated with it before run ``i``; return how many, bytes, seconds.

    What is not in memory there any more is repeated, too, or kept longer, whichever costs less; the
    bytes above the limit are those that this adds.
    """
    over = w.freed
    w.listed[0] = step
    count = 1
    done = 0
    added = 0.0
    seconds = t.seconds[step]
    while done < count:
        step = w.listed[done]
        done += 1
        for k in range(t.reads_at[step], t.reads_at[step + 1]):
            other = t.reads[k]
            longer = t.nbytes[other] * (over[i] - over[min(w.end[w.made[other]] + 1, i)])
            for j in range(count):
                if w.listed[j] == other:
                    longer = 0.0
            if longer <= 0:
                continue
            if slot <= t.last[other] and count < _TOGETHER and t.seconds[other] < price * longer:
                w.listed[count] = other
                count += 1
                seconds += t.seconds[other]
            else:
                added += longer
    return count, added, seconds


@kernel
def drop(t: _Tables, w: _State, room: float, price: float, is_random: bool) -> float:
    """Drop something between two uses, and repeat it before the second; return the seconds.

    What saves most bytes above ``room`` per second is taken, or any at random.
    """
    length = w.counts[0]
    is_steep = not is_random or below(w.random, 4) == 0
    over = w.freed
    over[0] = 0.0
    for i in range(length):
        over[i + 1] = over[i] + (1.0 if w.held[i] > room else 0.0)
    best = 0
    best_slot = 0
    best_rate = 0.0
    seconds = 0.0
    for i in range(length + 1):
        first = t.reads_at[w.step[i]] if i < length else t.reads_at[len(t.last)]
        end = t.reads_at[w.step[i] + 1] if i < length else len(t.reads)
        slot = w.slot[i] if i < length else len(t.last)
        for k in range(first, end):
            step = t.reads[k]
            saved = t.nbytes[step] * (over[i] - over[w.used[w.made[step]] + 1])
            w.used[w.made[step]] = i
            is_there = w.slot[w.made[step]] == slot  # and cannot be repeated there once more
            if saved <= 0 or is_there or slot > t.last[step]:
                continue
            draw = float(below(w.random, 1000)) if is_random else 1.0
            if not is_steep and draw <= best_rate:
                continue
            for cheaper in _PRICES:
                count, added, took = gathered(t, w, i, slot, step, price * cheaper)
                rate = draw * ((saved - added) / (took + 1e-12) if is_steep else 1.0)
                if saved > added and rate > best_rate:
                    best, best_slot, best_rate = count, slot, rate
                    for j in range(count):
                        w.chosen[j] = w.listed[j]
        if i < length:
            w.made[w.step[i]] = i
            w.used[i] = i
    for j in range(best):
        if inserted(w, best_slot, w.chosen[j]):
            seconds += t.seconds[w.chosen[j]]
    return seconds


@kernel
def greedy(t: _Tables, w: _State, room: float, price: float) -> None:
    """Drop what saves most bytes per second until the rest fits, or nothing more can be dropped."""
    length = 0
    while measured(t, w, room) > 0 and length < w.counts[0]:
        length = w.counts[0]
        drop(t, w, room, price, False)


@kernel
def prune(t: _Tables, w: _State, room: float, least: float) -> None:
    """Take away repetitions of at least so many seconds that are not needed, if all fits."""
    at = w.counts[0] - 1 if measured(t, w, room) <= 0 else -1
    while at >= 0:
        slot = w.slot[at]
        step = w.step[at]
        if slot > step and t.seconds[step] >= least:
            remove(w, at)
            if measured(t, w, room) > 0:
                inserted(w, slot, step)
        at -= 1


@kernel
def taken(t: _Tables, w: _State) -> float:
    """Take a repetition away, or to another slot; return the change of seconds."""
    length = w.counts[0]
    at = below(w.random, length)
    while w.slot[at] == w.step[at]:
        at = at + 1 if at + 1 < length else 0
    step = w.step[at]
    slot = w.slot[at]
    remove(w, at)
    if below(w.random, 3) == 0:
        slot += 1 + below(w.random, 8) if below(w.random, 2) else -1 - below(w.random, 8)
        if step < slot <= t.last[step] and inserted(w, slot, step):
            return 0.0
    return -float(t.seconds[step])


@kernel
def remember(w: _State) -> None:
    """Make this order the best one."""
    w.counts[1] = w.counts[0]
    for i in range(w.counts[0]):
        w.best_slot[i] = w.slot[i]
        w.best_step[i] = w.step[i]


@kernel
def anneal(
    t: _Tables, w: _State, room: float, moves: int, hot: float, cold: float, price: float
) -> tuple[float, float]:
    """Anneal an order for a number of moves; return the seconds of the best within ``room``.

    What does not fit at first is dropped greedily; what that makes superfluous is not repeated.
    ``price`` is what a byte above ``room`` during a run counts, in seconds; that of the end is
    returned, too.
    """
    plain = len(t.last)
    greedy(t, w, room, price)
    prune(t, w, room, hot)
    prune(t, w, room, 0.0)
    excess = measured(t, w, room)
    seconds = 0.0
    for i in range(w.counts[0]):
        seconds += t.seconds[w.step[i]]
    best = seconds if excess <= 0 else math.inf
    remember(w)
    is_old = False
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
        if length > plain and (excess <= 0 or below(w.random, 4)):
            more += taken(t, w)
            now = measured(t, w, room)
            is_old = False
        for _turn in range(1 + below(w.random, 3)):
            if now <= 0:
                break
            if is_old:
                measured(t, w, room)
            is_old = False
            more += drop(t, w, room, price, True)
            now = measured(t, w, room)
        change = more + price * (now - excess)
        if change <= 0 or change < -heat * math.log((1 + below(w.random, PRIME - 2)) / PRIME):
            seconds += more
            excess = now
            if excess <= 0 and seconds < best - 1e-12:
                best = seconds
                remember(w)
        else:
            w.counts[0] = length
            for i in range(length):
                w.slot[i] = w.old_slot[i]
                w.step[i] = w.old_step[i]
            is_old = True
        price *= _RISE if excess > 0 else 1 / _RISE
    return best, price


def improved(
    steps: Sequence[Step],
    start: Sequence[tuple[int, int]],
    room: float,
    seconds: float | None,
) -> tuple[int, ...] | None:
    """Return the order of least time within ``room`` that is found, or None.

    ``start`` are slots and steps of repetitions to begin with. The search takes up to ``seconds``,
    or else as long for the same steps on every machine.
    """
    size = len(steps)
    moves = max(1000, min(_MOVES * size, int(_WORK / (3 * size)))) // _TURNS
    how = mode(3.0 * _TURNS * moves * size, anneal)
    tables = _Tables(
        how.floats([float(step.seconds) for step in steps]),
        how.floats([float(step.nbytes) for step in steps]),
        how.whole([step.last_repeat for step in steps]),
        how.whole(np.cumsum([0, *(len(step.reads) for step in steps)])),
        how.whole(
            [*chain(*(s.reads for s in steps)), *(i for i, s in enumerate(steps) if s.is_kept)]
        ),
    )
    longest = 8 * size + 2 * len(start) + 64
    counts, numbers = how.counts, how.numbers
    w = _State(
        counts(longest), counts(longest), counts(longest), numbers(longest), numbers(longest),
        counts(longest), counts(size), counts(longest), counts(longest), counts(longest),
        counts(longest), counts(2), counts(_TOGETHER), counts(_TOGETHER),
        counts(1, _SEED),
    )  # fmt: skip
    mean = math.fsum(step.seconds for step in steps) / size or 1e-9
    until = perf_counter() + (seconds or 0.0)
    least, found = math.inf, None
    price = 100 * mean / room  # at first high: all must fit, whatever it costs
    plain = [(i, i) for i in range(size)]
    for turn in count():
        if turn and perf_counter() > until if seconds is not None else turn >= _TURNS:
            break
        if runs := sorted({*plain, *start}) if turn == 1 and start else found if turn else plain:
            w.counts[0] = len(runs)
            for i, (slot, step) in enumerate(runs):
                w.slot[i], w.step[i] = slot, step
        heats = mean * 0.5 ** (turn % _TURNS), mean * 0.01
        took, price = how(anneal)(tables, w, room, moves, *heats, price)
        if took < least:
            least = took
            found = [(int(w.best_slot[i]), int(w.best_step[i])) for i in range(w.counts[1])]
    return tuple(step for _, step in found) if found else None
