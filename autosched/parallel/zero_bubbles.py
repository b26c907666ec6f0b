"""Orders that fill bubbles with gradients by weights, made by simulation.

Qi et al., "Zero bubble (almost) pipeline parallelism", arXiv 2401.10241. A plan puts forwards (F)
and gradients by inputs (I) one after another; gradients by weights (W) are put between them:

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

from autosched.parallel.orders import HELD, KINDS, Action, Kind, Rows, Simulation, Table

_Early = frozenset[tuple[Kind, int]]  # before which kinds of which laps rule 2 applies
_EARLY: tuple[_Early, ...] = (
    frozenset({("F", 0), ("F", 1), ("I", 0)}),
    frozenset({("F", 0), ("F", 1), ("I", 0), ("I", 1)}),
    frozenset({("I", 0)}),
    frozenset(),
)


def filled(
    plan: Plan, devices: Sequence[int], chunks: int, table: Table, copy: float, memory: float
) -> Rows | None:
    """Return the best order of a plan, or None where it needs more ``memory``.

    ``devices`` has the device of each stage; ``memory`` is the number of micro-batches whose
    activations a device may hold.
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


class Filling(Simulation):
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
        super().__init__(devices, table, copy)
        self.chunks = chunks
        self.count = len(self.free)
        self.limit = math.floor(2 * len(devices) // self.count * memory + 1e-9)
        self.rows: list[list[Action]] = [[] for _ in self.free]
        self.held = [0] * self.count
        # How much longer each takes, so far, than the work of the busiest one.
        work = [0.0] * self.count
        for stage, rank in enumerate(devices):
            work[rank] += chunks * sum(column[stage] for column in table)
        self.late = [seconds - max(work) for seconds in work]
        self._early = early
        self._allowed = [max(before) - seconds for seconds in before]
        self._most = 0.0
        self._done = {kind: [0] * len(devices) for kind in KINDS}
        self._weights: list[deque[Action]] = [deque() for _ in self.free]

    def next(self, kind: Kind, rank: int, lap: int = 0) -> Action:
        """Return the next F or I of a device's stage on the way there (0) or back (1)."""
        stage = rank if lap == 0 else 2 * self.count - 1 - rank
        return Action(stage, kind, self._done[kind][stage])

    def put(self, kind: Kind, rank: int, lap: int = 0) -> bool:
        """Put the next F or I of a stage, and W before it; return whether it can run."""
        action = self.next(kind, rank, lap)
        arrival = self.arrival(action)
        if action.chunk == self.chunks or arrival is None:
            return False
        weights = self._weights[rank]
        while self.held[rank] + HELD[kind] > self.limit:
            if not weights:
                return False
            self.run(weights.popleft(), 0.0)
        while weights and self.free[rank] + self.table[2][weights[0].stage] <= arrival:
            self.run(weights.popleft(), 0.0)
        if weights and (kind, lap) in self._early:
            allowed = max(self._most, self._allowed[rank])
            if self.late[rank] + arrival - self.free[rank] > allowed:
                self.run(weights.popleft(), 0.0)
        self.run(action, arrival)
        if kind == "I":
            weights.append(action._replace(kind="W"))
        return True

    def finish(self) -> None:
        """Put each W that is left."""
        for weights in self._weights:
            while weights:
                self.run(weights.popleft(), 0.0)

    def run(self, action: Action, arrival: float) -> None:
        """Run an action."""
        rank = self.devices[action.stage]
        free = self.free[rank]
        super().run(action, arrival)
        if self.rows[rank]:
            self.late[rank] += self.starts[action] - free
            self._most = max(self._most, self.late[rank])
        self._done[action.kind][action.stage] += 1
        self.held[rank] += HELD[action.kind]
        self.rows[rank].append(action)


Plan = Callable[[Filling], bool]  # puts F and I; returns whether all could run

# ---- plans


def line(run: Filling) -> bool:
    """Put one stage per device: as many F as begin before the first I, then I and F in turn."""
    for rank in range(run.count):
        run.put("F", rank)
    for rank in reversed(range(run.count)):
        _put_until(run, rank, "I", 0)
    while any(run.next("I", rank).chunk < run.chunks for rank in range(run.count)):
        put = [run.put("F", rank) for rank in range(run.count)]
        put += [run.put("I", rank) for rank in reversed(range(run.count))]
        if not any(put):
            return False
    return True


def _put_until(run: Filling, rank: int, kind: Kind, lap: int) -> None:
    """Put F on the way there of a device and all before, which end before an action can start."""
    arrival = run.arrival(run.next(kind, rank, lap))
    room = 2 * (lap + 1) * (rank + 1)  # all devices before can hold as many
    put = rank < run.count - 1 and arrival is not None
    while put and run.held[rank] + room <= run.limit:
        assert arrival is not None
        put = run.free[rank] + run.table[0][rank] <= arrival
        put = put and [run.put("F", earlier) for earlier in range(rank + 1)][-1]
    run.put(kind, rank, lap)


def v_shape(run: Filling) -> bool:
    """Put two stages per device, on the way there and back, as ZB-V does: I and F in turn."""
    count, chunks = run.count, run.chunks
    # 1. F on the way there fill the time until the first F on the way back.
    for rank in range(count):
        run.put("F", rank)
    for rank in reversed(range(count)):
        _put_until(run, rank, "F", 1)
    # 2. Each device has as many F as the one before, so that no I has to wait.
    lap = 0
    for rank in range(1, count):
        put = [True]
        while _is_behind(run, rank) and any(put):
            put = [run.put("F", other, lap) for other in reversed(range(rank, count))]
            lap = 1 - lap
    # 3. I and F in turn.
    while any(run.next("I", rank).chunk < chunks for rank in range(count)):
        there = [rank for rank in range(count) if _gradient_goes_on(run, rank)]
        back = [rank for rank in range(count) if rank not in there]
        put = [run.put("I", rank, 0) for rank in reversed(there)]
        put += [run.put("I", rank, 1) for rank in back]
        put += [run.put("F", rank, _next_forward(run, rank)) for rank in range(count)]
        if not any(put):
            return False
    return True


def _is_behind(run: Filling, rank: int) -> bool:
    own, before = ([run.next("F", r, lap).chunk for lap in (0, 1)] for r in (rank, rank - 1))
    return sum(own) < sum(before) or own[1] <= before[1] < run.chunks


def _gradient_goes_on(run: Filling, rank: int) -> bool:
    """Return whether the next I of a device is that of its first stage."""
    first, second = (run.next("I", rank, lap) for lap in (0, 1))
    is_there = rank == run.count - 1 or run.arrival(first) is not None
    return first.chunk < second.chunk and (second.chunk == run.chunks or is_there)


def _next_forward(run: Filling, rank: int) -> int:
    """Return the lap of the next F: the second if its input is there."""
    first, second = (run.next("F", rank, lap) for lap in (0, 1))
    is_there = rank == run.count - 1 or run.arrival(second) is not None
    return int(second.chunk < first.chunk and is_there)
