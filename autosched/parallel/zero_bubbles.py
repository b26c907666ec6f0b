"""Orders that fill bubbles with gradients by weights, made by simulation.

Qi et al., "Zero bubble (almost) pipeline parallelism", arXiv 2401.10241. Forwards (F) and gradients
by inputs (I) have an order; gradients by weights (W) are put between them:

1. where a device would wait at least as long as one takes;
2. before an F or I that would make this device the one that takes longest in the end;
3. where memory has to be released.

Rule 2 needs to know how long others will take: the simulation is repeated with what the one before
found, as long as that gets better.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from autosched.parallel.orders import HELD, Action, Kind, Rows, Table

_Early = frozenset[tuple[Kind, int]]  # before which kinds of which laps rule 2 applies
_EARLY: tuple[_Early, ...] = (
    frozenset({("F", 0), ("F", 1), ("I", 0)}),
    frozenset({("F", 0), ("F", 1), ("I", 0), ("I", 1)}),
    frozenset({("I", 0)}),
    frozenset(),
)


def filled(
    plan: Callable[[Filling], bool],
    devices: Sequence[int],
    chunks: int,
    table: Table,
    copy: float,
    memory: float,
) -> Rows | None:
    """Return the best order of a plan, or None where it needs more ``memory``.

    ``plan`` puts F and I into a ``Filling``. ``devices`` has the device of each stage; ``memory`` is
    the number of micro-batches whose activations a device may hold.
    """
    best: tuple[float, Rows] | None = None
    for early in _EARLY:
        late = [0.0] * (1 + max(devices))
        last = math.inf
        while True:
            found = Filling(devices, chunks, table, copy, memory, early, late)
            if not plan(found):
                break
            found.finish()
            if max(found.late) >= last:
                break
            last, late = max(found.late), found.late
            if best is None or last < best[0]:
                best = last, tuple(map(tuple, found.rows))
    return None if best is None else best[1]


class Filling:
    """A simulation in which F and I are put one after another, and W between them."""

    def __init__(
        self,
        devices: Sequence[int],
        chunks: int,
        table: Table,
        copy: float,
        memory: float,
        early: _Early,
        before: Sequence[float],
    ):
        self.devices = devices
        self.chunks = chunks
        self.count = 1 + max(devices)
        self.laps = len(devices) // self.count
        self.limit = math.floor(2 * self.laps * memory + 1e-9)
        self.rows: list[list[Action]] = [[] for _ in range(self.count)]
        self.free = [0.0] * self.count
        self.held = [0] * self.count
        # How much longer each takes, so far, than the work of the busiest one.
        work = [chunks * sum(c[s] for c in table for s in self.own(r)) for r in range(self.count)]
        self.late = [seconds - max(work) for seconds in work]
        self._seconds = dict(zip(("F", "I", "W"), table, strict=True))
        self._copy = copy
        self._early = early
        self._allowed = [max(before) - seconds for seconds in before]
        self._most = 0.0
        self._done = {kind: [0] * len(devices) for kind in ("F", "I")}
        self._ends: dict[Action, float] = {}
        self._weights: list[deque[Action]] = [deque() for _ in range(self.count)]

    def own(self, rank: int) -> list[int]:
        """Return the stages of a device."""
        return [stage for stage, device in enumerate(self.devices) if device == rank]

    def stage(self, rank: int, lap: int) -> int:
        """Return the stage of a device on the way there (0) or back (1)."""
        return rank if lap == 0 else 2 * self.count - 1 - rank

    def done(self, kind: Kind, rank: int, lap: int = 0) -> int:
        """Return how many micro-batches have been put."""
        return self._done[kind][self.stage(rank, lap)]

    def arrival(self, kind: Kind, rank: int, lap: int = 0) -> float | None:
        """Return when the next F or I could begin if its device were free; None if not known."""
        stage = self.stage(rank, lap)
        chunk = self._done[kind][stage]
        if kind == "F" and not stage:
            return 0.0
        before = stage - 1 if kind == "F" else stage + 1
        if before == len(self.devices):
            return self._ends.get(Action(stage, "F", chunk))
        end = self._ends.get(Action(before, kind, chunk))
        far = self.devices[before] != rank
        return end if end is None or not far else end + self._copy

    def put(self, kind: Kind, rank: int, lap: int = 0) -> bool:
        """Put the next F or I of a stage, and W before it; return whether it can run."""
        stage = self.stage(rank, lap)
        arrival = self.arrival(kind, rank, lap)
        if self._done[kind][stage] == self.chunks or arrival is None:
            return False
        if kind == "I" and self._done["F"][stage] == self._done["I"][stage]:
            return False
        weights = self._weights[rank]
        while self.held[rank] + HELD[kind] > self.limit:
            if not weights:
                return False
            self._run(weights.popleft(), rank, 0.0)
        while weights and self.free[rank] + self._seconds["W"][weights[0].stage] <= arrival:
            self._run(weights.popleft(), rank, 0.0)
        if weights and (kind, lap) in self._early:
            allowed = max(self._most, self._allowed[rank])
            if self.late[rank] + arrival - self.free[rank] > allowed:
                self._run(weights.popleft(), rank, 0.0)
        action = Action(stage, kind, self._done[kind][stage])
        self._run(action, rank, arrival)
        self._done[kind][stage] += 1
        if kind == "I":
            weights.append(action._replace(kind="W"))
        return True

    def finish(self) -> None:
        """Put each W that is left."""
        for rank, weights in enumerate(self._weights):
            while weights:
                self._run(weights.popleft(), rank, 0.0)

    def _run(self, action: Action, rank: int, arrival: float) -> None:
        start = max(self.free[rank], arrival)
        if self.rows[rank]:
            self.late[rank] += start - self.free[rank]
            self._most = max(self._most, self.late[rank])
        self.free[rank] = self._ends[action] = start + self._seconds[action.kind][action.stage]
        self.held[rank] += HELD[action.kind]
        self.rows[rank].append(action)


# ---- plans


def line(run: Filling) -> bool:
    """Put one stage per device: as many F as begin before the first I, then I and F in turn."""
    last = run.count - 1
    for rank in range(run.count):
        run.put("F", rank)
    for rank in reversed(range(run.count)):
        arrival = run.arrival("I", rank)
        while rank < last and _fits(run, rank, arrival, 1) and _put_until(run, rank):
            pass
        run.put("I", rank)
    while any(run.done("I", rank) < run.chunks for rank in range(run.count)):
        put = [run.put("F", rank) for rank in range(run.count)]
        put += [run.put("I", rank) for rank in reversed(range(run.count))]
        if not any(put):
            return False
    return True


def _fits(run: Filling, rank: int, arrival: float | None, each: int) -> bool:
    """Return whether an F ends until then, and all devices before can hold ``each`` of their own."""
    end = run.free[rank] + run._seconds["F"][rank]
    room = 2 * each * (rank + 1)
    return arrival is not None and end <= arrival and run.held[rank] + room <= run.limit


def _put_until(run: Filling, rank: int) -> bool:
    """Put an F of each device up to this one, which then has one; return whether it has."""
    return [run.put("F", earlier) for earlier in range(rank + 1)][-1]


def v_shape(run: Filling) -> bool:
    """Put two stages per device, on the way there and back, as ZB-V does: I and F in turn."""
    count, chunks = run.count, run.chunks
    # 1. F on the way there fill the time until the first F on the way back.
    for rank in range(count):
        run.put("F", rank)
    for rank in reversed(range(count)):
        arrival = run.arrival("F", rank, 1)
        while rank < count - 1 and _fits(run, rank, arrival, 2) and _put_until(run, rank):
            pass
        run.put("F", rank, 1)
    # 2. Each device has as many F as the one before, so that no I has to wait.
    lap = 0
    for rank in range(1, count):
        put = [True]
        while _is_behind(run, rank) and any(put):
            put = [run.put("F", other, lap) for other in reversed(range(rank, count))]
            lap = 1 - lap
    # 3. I and F in turn.
    while any(run.done("I", rank) < chunks for rank in range(count)):
        there = [rank for rank in range(count) if _gradient_goes_on(run, rank)]
        back = [rank for rank in range(count) if rank not in there]
        put = [run.put("I", rank, 0) for rank in reversed(there)]
        put += [run.put("I", rank, 1) for rank in back]
        put += [run.put("F", rank, _next_forward(run, rank)) for rank in range(count)]
        if not any(put):
            return False
    return True


def _is_behind(run: Filling, rank: int) -> bool:
    own, before = ([run.done("F", r, lap) for lap in (0, 1)] for r in (rank, rank - 1))
    return sum(own) < sum(before) or own[1] <= before[1] < run.chunks


def _gradient_goes_on(run: Filling, rank: int) -> bool:
    """Return whether the next I of a device is that of its first stage."""
    first, second = (run.done("I", rank, lap) for lap in (0, 1))
    is_there = rank == run.count - 1 or run.arrival("I", rank, 0) is not None
    return first < second and (second == run.chunks or is_there)


def _next_forward(run: Filling, rank: int) -> int:
    """Return the lap of the next F: the second if its input is there."""
    first, second = (run.done("F", rank, lap) for lap in (0, 1))
    if second == first or (rank < run.count - 1 and run.arrival("F", rank, 1) is None):
        return 0
    return 1
