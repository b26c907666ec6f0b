"""Improve a placement by simulated annealing.

Runs the kernels of ``annealing`` for a number of moves or seconds, and holds their working memory.
The result is never worse than the initial placement.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from autosched.policies.base.listing import Listed, Listing
from autosched.policies.local_search.annealing import State, anneal
from autosched.problem import Tables, grouped

__all__ = ["Annealer", "cool", "cool_until"]

Report = Callable[[float, float], None]  # called with the part that is done, and the best makespan

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
        self.mean = _scale(listing)
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
        w.order[:], w.device[:], w.start[:], w.finish[:] = (
            w.best_order,
            w.best_device,
            best.start,
            best.finish,
        )
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


def cool(annealer: Annealer, moves: int, report: Report) -> None:
    """Make a number of moves, in rounds that start from the best state and cool down."""
    for step in range(len(_ROUNDS) * _STEPS):
        turn, part = divmod(step, _STEPS)
        if annealer.done:
            return
        if step and not part:
            annealer.restore_best()
        hot, weight = _ROUNDS[turn]
        annealer.move(-(-moves // (len(_ROUNDS) * _STEPS)), _heat(hot, part / (_STEPS - 1)), weight)
        report(step / (len(_ROUNDS) * _STEPS), annealer.makespan)


def cool_until(annealer: Annealer, end: float, report: Report) -> None:
    """Anneal as ``cool`` does until a deadline of ``time.perf_counter``."""
    began = perf_counter()
    each = 200
    span = max(end - began, 0.0) / len(_ROUNDS)
    for turn, (hot, weight) in enumerate(_ROUNDS):
        if turn:
            annealer.restore_best()
        since = began + turn * span
        while not annealer.done and (passed := perf_counter() - since) < span:
            before = perf_counter()
            annealer.move(each, _heat(hot, passed / span), weight)
            each = max(
                20, min(int(each * min(4.0, 0.01 / max(perf_counter() - before, 1e-6))), 100_000)
            )
            report((turn + passed / span) / len(_ROUNDS), annealer.makespan)


def _heat(hot: float, part: float) -> float:
    """Return the temperature at a fraction of a round."""
    return hot * float((_COLD / hot) ** part)


def _scale(listing: Listing) -> float:
    seconds = listing.arrays.seconds
    finite = seconds[np.isfinite(seconds)]
    return float(finite.mean()) if len(finite) else 0.0


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
    ragged = {}
    for name, (offsets, items) in tables.items():
        ragged[f"{name}_at"] = mode.whole(offsets)
        ragged[name] = mode.whole(items)
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
