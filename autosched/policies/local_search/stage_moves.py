"""Move units of a graph between the stages of a split, by simulated annealing.

A load is the seconds per run in which a resource is busy: the compute streams of a device, its
copies out, its copies in. A datum is copied once to each stage, other than its own, that reads it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel
from autosched.problem import Problem, grouped

__all__ = ["Moves", "State", "move_units", "shift"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_POWER = 8.0  # of loads in what is minimized: nearly the greatest, and still telling of the others
_HOT = 0.05  # the first temperature, as a part of what is minimized
_COLD = 1e-5


class Moves(NamedTuple):
    """Data and copies between the stages of a split, flat."""

    stages: int
    device: NDArray[np.int64]  # [stage]
    maker: NDArray[np.int64]  # [datum], a unit, or -1 - stage of a fixed place
    reads_at: NDArray[np.int64]
    reads: NDArray[np.int64]  # data by unit, once
    makes_at: NDArray[np.int64]
    makes: NDArray[np.int64]  # data by unit
    pinned: NDArray[np.int64]  # [datum, place], readers that stay where they are
    out: NDArray[np.float64]  # [datum, place, place], seconds of the source's copy-out stream
    into: NDArray[np.float64]  # [datum, place, place]

    @classmethod
    def of(
        cls,
        problem: Problem,
        unit: NDArray[np.int64],
        fixed: NDArray[np.int64],
        device: tuple[int, ...],
        contention: bool,
    ) -> Moves:
        """Tabulate; places are the stages, and behind them devices without a stage."""
        t = problem.lists
        count = len(problem.devices)
        places = [*device, *(p for p in range(count) if p not in device)]
        place = {p: i for i, p in enumerate(places)}
        data = len(t.maker)
        maker = np.empty(data, np.int64)
        pinned = np.zeros((data, count), np.int64)
        for datum, task in enumerate(t.maker):
            if task < 0:
                maker[datum] = -1 - place[t.home[datum]]
            else:
                maker[datum] = unit[task] if unit[task] >= 0 else -1 - place[int(fixed[task])]
        pairs: dict[tuple[int, int], None] = {}
        for task, row in enumerate(problem.reads):
            for datum in dict.fromkeys(row):
                if unit[task] < 0:
                    pinned[datum, place[int(fixed[task])]] += 1
                elif unit[task] != maker[datum]:
                    pairs[int(unit[task]), datum] = None
        for datum, home in problem.returns:
            pinned[datum, place[home]] += 1
        rows = np.array(places)
        seconds = np.zeros((data, count, count))
        if contention:
            table = problem.tables
            square = np.ix_(rows, rows)
            latency = np.where(np.isfinite(table.latency), table.latency, 0.0)
            for datum in range(data):
                slow = t.maker[datum] < 0 and t.row[datum] >= count
                part = slice(count * count * slow, count * count * (1 + slow))
                each = latency[part] + table.nbytes[datum] / table.rate[part]
                seconds[datum] = each.reshape(count, count)[square]
            seconds[:, np.arange(count), np.arange(count)] = 0.0
        holds = [
            h[: count * count].reshape(count, count)[np.ix_(rows, rows)].astype(float)
            for h in (problem.tables.holds_out, problem.tables.holds_in)
        ]
        units = int(unit.max(initial=-1)) + 1
        owner, read = np.array(list(pairs), np.int64).reshape(-1, 2).T
        reads_at, flat_reads = grouped(owner, read, units)
        made = np.flatnonzero(maker >= 0)
        makes_at, makes = grouped(maker[made], made, units)
        return cls(
            len(device),
            rows,
            maker,
            reads_at,
            flat_reads,
            makes_at,
            makes,
            pinned,
            seconds * holds[0],
            seconds * holds[1],
        )

    def readers(self, stage: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return by [datum, place] how many units, or tasks that stay, read it there."""
        found = self.pinned.copy()
        owner = np.repeat(np.arange(len(self.reads_at) - 1), np.diff(self.reads_at))
        np.add.at(found, (self.reads, stage[owner]), 1)
        return found

    def loads(self, stage: NDArray[np.int64], seconds: Any, streams: Any) -> NDArray[np.float64]:
        """Return by [place, resource] the loads: compute, copies out, copies in."""
        places = len(self.device)
        made = np.zeros((places, 3))
        units = np.arange(len(stage))
        device = self.device[stage]
        np.add.at(made[:, 0], stage, seconds[units, device] / streams[device])
        read = self.readers(stage) > 0
        for datum, maker in enumerate(self.maker.tolist()):
            at = int(stage[maker]) if maker >= 0 else -1 - maker
            for q in np.flatnonzero(read[datum]).tolist():
                if q != at:
                    made[at, 1] += self.out[datum, at, q]
                    made[q, 2] += self.into[datum, at, q]
        return made

    def load(self, stage: NDArray[np.int64], overlap: bool, seconds: Any, streams: Any) -> float:
        """Return the greatest load."""
        made = self.loads(stage, seconds, streams)
        return float((made if overlap else made.sum(axis=1)).max(initial=0.0))

    def improved(
        self,
        how: Mode,
        stage: NDArray[np.int64],
        overlap: bool,
        seconds: Any,
        streams: Any,
        pairs: NDArray[np.int64],
        moves: int,
        seed: int,
    ) -> NDArray[np.int64]:
        """Return the stages of units after moves, with the least greatest load that was met."""
        state = how.of(self.state(stage, seconds, streams, pairs, seed))
        how(move_units)(state, self.stages, len(self.device), moves, 1 if overlap else 0)
        return np.array(state.best, np.int64)

    def state(
        self,
        stage: NDArray[np.int64],
        seconds: Any,
        streams: Any,
        pairs: NDArray[np.int64],
        seed: int = 0,
    ) -> State:
        """Return what ``move_units`` begins with."""
        units = len(stage)
        loads = self.loads(stage, seconds, streams).ravel()
        cost = (seconds / streams)[:, self.device].ravel()
        return State(
            self.maker, self.reads_at, self.reads, self.makes_at, self.makes,
            *grouped(pairs[:, 1], pairs[:, 0], units),
            *grouped(pairs[:, 0], pairs[:, 1], units),
            self.out.ravel(), self.into.ravel(), cost,
            stage.copy(), stage.copy(), self.readers(stage).ravel(), loads, loads.copy(),
            np.array([1 + seed * 7919 % 2147483000]),
        )  # fmt: skip


class State(NamedTuple):
    """Tables of ``move_units``, and what it changes; all flat. See ``Moves``."""

    maker: Any
    reads_at: Any
    reads: Any
    makes_at: Any
    makes: Any
    before_at: Any
    before: Any  # predecessors by unit
    after_at: Any
    after: Any
    out: Any
    into: Any
    cost: Any  # [unit, place], seconds of the device
    # what changes
    stage: Any
    best: Any
    readers: Any  # [datum, place]
    loads: Any  # [place, resource]
    kept: Any  # the loads before a move
    seeds: Any


@kernel
def draw(seeds: Any) -> float:
    """Return a random number in (0, 1): Park and Miller's generator."""
    seeds[0] = seeds[0] * 48271 % 2147483647
    return float(seeds[0]) / 2147483647.0


@kernel
def measured(loads: Any, places: int, overlap: int) -> float:
    """Return the norm of loads, which is nearly the greatest."""
    most = greatest(loads, places, overlap)
    if most <= 0.0:
        return 0.0
    total = 0.0
    for p in range(places):
        if overlap:
            for r in range(3):
                total += (loads[3 * p + r] / most) ** _POWER
        else:
            total += ((loads[3 * p] + loads[3 * p + 1] + loads[3 * p + 2]) / most) ** _POWER
    return most * float(total ** (1.0 / _POWER))


@kernel
def greatest(loads: Any, places: int, overlap: int) -> float:
    """Return the greatest load."""
    most = 0.0
    for p in range(places):
        if overlap:
            most = max(most, loads[3 * p], loads[3 * p + 1], loads[3 * p + 2])
        else:
            most = max(most, loads[3 * p] + loads[3 * p + 1] + loads[3 * p + 2])
    return most


@kernel
def shift(s: State, u: int, a: int, b: int, places: int) -> None:
    """Move unit ``u`` from stage ``a`` to stage ``b``."""
    readers = s.readers
    loads = s.loads
    loads[3 * a] -= s.cost[u * places + a]
    loads[3 * b] += s.cost[u * places + b]
    for k in range(s.reads_at[u], s.reads_at[u + 1]):
        d = s.reads[k]
        m = s.maker[d]
        at = s.stage[m] if m >= 0 else -1 - m
        readers[d * places + a] -= 1
        readers[d * places + b] += 1
        if readers[d * places + a] == 0 and a != at:
            path = (d * places + at) * places + a
            loads[3 * at + 1] -= s.out[path]
            loads[3 * a + 2] -= s.into[path]
        if readers[d * places + b] == 1 and b != at:
            path = (d * places + at) * places + b
            loads[3 * at + 1] += s.out[path]
            loads[3 * b + 2] += s.into[path]
    for k in range(s.makes_at[u], s.makes_at[u + 1]):
        d = s.makes[k]
        for q in range(places):
            if readers[d * places + q] > 0:
                if q != a:
                    path = (d * places + a) * places + q
                    loads[3 * a + 1] -= s.out[path]
                    loads[3 * q + 2] -= s.into[path]
                if q != b:
                    path = (d * places + b) * places + q
                    loads[3 * b + 1] += s.out[path]
                    loads[3 * q + 2] += s.into[path]
    s.stage[u] = b


@kernel
def move_units(s: State, stages: int, places: int, moves: int, overlap: int) -> None:
    """Anneal: move random units to stages between those of their predecessors and successors."""
    units = len(s.stage)
    now = measured(s.loads, places, overlap)
    least = greatest(s.loads, places, overlap)
    heat = _HOT * now
    cooling = (_COLD / _HOT) ** (1.0 / max(moves, 1))
    for _ in range(moves):
        heat *= cooling
        u = int(draw(s.seeds) * units)
        a = s.stage[u]
        low = 0
        for k in range(s.before_at[u], s.before_at[u + 1]):
            low = max(low, s.stage[s.before[k]])
        high = stages - 1
        for k in range(s.after_at[u], s.after_at[u + 1]):
            high = min(high, s.stage[s.after[k]])
        if low >= high:
            continue
        b = low + int(draw(s.seeds) * (high - low))
        if b >= a:
            b += 1
        if s.cost[u * places + b] == math.inf:
            continue
        for k in range(3 * places):
            s.kept[k] = s.loads[k]
        shift(s, u, a, b, places)
        then = measured(s.loads, places, overlap)
        if then <= now - heat * math.log(draw(s.seeds)):
            now = then
            most = greatest(s.loads, places, overlap)
            if most < least:
                least = most
                for k in range(units):
                    s.best[k] = s.stage[k]
        else:
            shift(s, u, b, a, places)
            for k in range(3 * places):
                s.loads[k] = s.kept[k]
