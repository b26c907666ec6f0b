"""Annealer: a placement that gets better, for so many moves or so many seconds.

Joins the kernels of ``annealing``, the memory they work in, and the clock. What it holds is never worse than what it
was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.policies.annealing import anneal, decode
from autosched.policies.listing import Listing
from autosched.policies.tables import Tables

__all__ = ["Annealer", "cool", "cool_until"]

_STEPS = 50  # of temperature in a round
_COLD = 0.005  # the last temperature, in mean seconds of a task


class _State(NamedTuple):
    """What ``anneal`` works in: a state, its schedule, the best one, and who is next to whom."""

    order: Any
    position: Any
    device: Any
    start: Any
    finish: Any
    other_start: Any
    other_finish: Any
    best_order: Any
    best_device: Any
    best_start: Any
    tail: Any
    chain: Any
    moved: Any
    moved_from: Any
    seeds: Any
    near_at: Any
    near: Any
    above_at: Any
    above: Any
    under_at: Any
    under: Any
    members_at: Any
    members: Any


class Annealer:
    """A placement being improved. ``device`` and ``order`` are the best found, ``makespan`` is theirs."""

    def __init__(self, listing: Listing, device: Any, order: Any, makespan: float, seed: int = 0, bound: float = 0.0):
        self.listing, self.bound = listing, bound
        self.makespan = self._current = makespan
        self._state = _state(listing, device, order, seed)
        self._planning = listing.planning()
        self._keep = len(self._planning.begins) // len(self._planning.gaps)
        self.mean = float(_scale(listing))
        self._settle()

    @property
    def device(self) -> Any:
        """The device of each task in the best state."""
        return self._state.best_device

    @property
    def order(self) -> Any:
        """The tasks in the best state, by their start; where copies leave in order of issue, as they are issued."""
        w = self._state
        return w.best_order if self.listing.contention else self.listing.by_start(w.best_start)

    def _settle(self) -> None:
        """Time the state, and take it as the best if it is."""
        w, listing = self._state, self.listing
        if listing.contention:
            end, start, finish = listing.evaluate(w.device, w.order)
        else:
            start, finish = w.other_start, w.other_finish
            end = listing.mode(decode)(
                listing.tables, w.order, w.device, w.tail, start, finish, math.inf, self._planning, self._keep
            )
        w.start[:], w.finish[:] = start, finish
        self._current = end
        if end <= self.makespan or math.isnan(w.best_start[0]):
            self.makespan = end
            w.best_order[:], w.best_device[:], w.best_start[:] = w.order, w.device, start

    def again(self) -> None:
        """Go back to the best state, its tasks in the order of their starts."""
        w = self._state
        w.order[:], w.device[:] = self.listing.by_start(w.best_start), w.best_device
        self._settle()

    def move(self, moves: int, heat: float) -> None:
        """Make so many moves at one temperature, in mean seconds of a task."""
        listing = self.listing
        self._current, self.makespan = listing.mode(anneal)(
            listing.tables,
            self._state,
            self._planning,
            listing.timing,
            self._keep,
            listing.contention,
            moves,
            heat * self.mean,
            self._current,
            self.makespan,
            self.bound,
        )

    @property
    def done(self) -> bool:
        """Whether nothing can be better."""
        return self.makespan <= self.bound


def cool(
    annealer: Annealer, moves: int, report: Callable[[float, float], None], hot: float = 0.5, rounds: int = 3
) -> None:
    """Make so many moves in all, in rounds that cool down from ``hot`` mean seconds of a task, later ones from half."""
    for step in range(rounds * _STEPS):
        turn, part = divmod(step, _STEPS)
        if annealer.done:
            return
        if step and not part:
            annealer.again()
        annealer.move(-(-moves // (rounds * _STEPS)), _heat(hot if turn == 0 else hot / 2, part / (_STEPS - 1)))
        report(step / (rounds * _STEPS), annealer.makespan)


def cool_until(
    annealer: Annealer, end: float, report: Callable[[float, float], None], hot: float = 0.5, rounds: int = 3
) -> None:
    """Anneal until a moment of ``time.perf_counter``, in rounds that cool down, later ones from half of ``hot``."""
    began, each = perf_counter(), 200
    span = max(end - began, 0.0) / rounds
    for turn in range(rounds):
        if turn:
            annealer.again()
        since = began + turn * span
        while not annealer.done and (passed := perf_counter() - since) < span:
            before = perf_counter()
            annealer.move(each, _heat(hot if turn == 0 else hot / 2, passed / span))
            each = max(20, min(int(each * min(4.0, 0.01 / max(perf_counter() - before, 1e-6))), 100_000))
            report((turn + passed / span) / rounds, annealer.makespan)


def _heat(hot: float, part: float) -> float:
    """Return the temperature when so large a part of a round has passed."""
    return hot * float((_COLD / hot) ** part)


def _scale(listing: Listing) -> float:
    """Return the mean seconds of a task."""
    seconds = listing.shape.seconds
    finite = seconds[np.isfinite(seconds)]
    return float(finite.mean()) if len(finite) else 0.0


def _state(listing: Listing, device: Any, order: Any, seed: int) -> _State:
    mode, t, n = listing.mode, listing.shape, len(listing.shape.group)
    pairs = _pairs(t)
    above, under = _ragged(pairs[:, 1], pairs[:, 0], n), _ragged(pairs[:, 0], pairs[:, 1], n)
    near = _ragged(np.concatenate([pairs[:, 1], pairs[:, 0]]), np.concatenate([pairs[:, 0], pairs[:, 1]]), n)
    members = _ragged(t.group, np.arange(n), n)
    return _State(
        order=mode.whole(order),
        position=mode.counts(n),
        device=mode.whole(device),
        start=mode.numbers(n),
        finish=mode.numbers(n),
        other_start=mode.numbers(n),
        other_finish=mode.numbers(n),
        best_order=mode.whole(order),
        best_device=mode.whole(device),
        best_start=mode.numbers(n, math.nan),
        tail=listing.tail,
        chain=mode.counts(n),
        moved=mode.counts(n),
        moved_from=mode.counts(n),
        seeds=mode.whole([1 + seed * 7919 % 2147483000, 1 + seed * 104729 % 2147483000]),
        **{
            name: mode.whole(table)
            for name, table in zip(
                ("near_at", "near", "above_at", "above", "under_at", "under", "members_at", "members"),
                (*near, *above, *under, *members),
                strict=True,
            )
        },
    )


def _pairs(t: Tables) -> NDArray[np.int64]:
    """Return which task must come before which, each pair once."""
    n = len(t.group)
    reader = np.repeat(np.arange(n), np.diff(t.reads_at))
    maker = t.maker[t.reads]
    later = np.repeat(np.arange(n), np.diff(t.before_at))
    pairs = np.concatenate([np.stack([maker, reader], 1)[maker >= 0], np.stack([t.before, later], 1)])
    return np.unique(pairs, axis=0)


def _ragged(key: NDArray[np.int64], item: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    at = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=count), out=at[1:])
    return at, item[np.argsort(key, kind="stable")]
