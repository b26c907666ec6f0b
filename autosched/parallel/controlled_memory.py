"""Orders that repeat a pattern, chosen for the memory that it needs.

Qi et al., "Pipeline parallelism with controllable memory", arXiv 2405.15362: V-Half and V-Min. The
two stages of a device are those of a V. All actions take one unit of time, and copies none:

1. A pattern says when F and I of the first micro-batch begin; the others follow every six units.
   W come where a device is idle.
2. Before the first I of the first stage, and after its last F, actions are taken to earlier idle
   units, where memory allows that; and all begin as early as their order on a device allows.
3. The same with the last ones alone, whose W may come later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from autosched.parallel.orders import Action, Kind, Rows

Pattern = Callable[[int, int], Sequence[int]]
_TURNS: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))  # kinds and laps
_W = len(_TURNS)
_Key = tuple[int, int, int]  # device, number in ``_TURNS``, micro-batch; of W, number of I before
_Units = dict[_Key, int]


def half(rank: int, devices: int) -> Sequence[int]:
    """Return the pattern of V-Half, which holds about half of what 1F1B does."""
    shift = 0 if devices % 2 else 3
    back = 3 * devices - rank - 2
    return 2 * rank, back, 3 * devices + shift + 2 * rank - 1, 3 * devices + shift + back


def least(rank: int, devices: int) -> Sequence[int]:
    """Return the pattern of V-Min, which holds about a third of what 1F1B does."""
    shift = 0 if devices % 3 else 2
    back = 2 * devices - rank - 1
    return rank, back, 2 * devices + shift + rank, 2 * devices + shift + back


def repeated(pattern: Pattern, devices: int, chunks: int, memory: int) -> Rows:
    """Return the rows of a pattern; ``memory`` is that of a device, in activations of stages."""
    units = {
        (rank, turn, chunk): start + 6 * chunk
        for rank in range(devices)
        for turn, start in enumerate(pattern(rank, devices))
        for chunk in range(chunks)
    }
    for has_weights in (True, False):
        units = _with_weights(units, devices) if has_weights else units
        units = _earlier(units, devices, chunks, memory, has_weights)
        units = units if has_weights else _with_weights(units, devices)
        units = _eager(units, devices)
        units = {key: unit for key, unit in units.items() if key[1] != _W}
    units = _with_weights(units, devices)
    rows: list[list[Action]] = [[] for _ in range(devices)]
    gradients: list[list[Action]] = [[] for _ in range(devices)]
    for _, (rank, turn, number) in sorted((unit, key) for key, unit in units.items()):
        if turn == _W:
            rows[rank].append(gradients[rank][number]._replace(kind="W"))
            continue
        kind, lap = _TURNS[turn]
        rows[rank].append(Action(2 * devices - 1 - rank if lap else rank, kind, number))
        if kind == "I":
            gradients[rank].append(rows[rank][-1])
    return tuple(map(tuple, rows))


def _by_device(units: _Units, devices: int) -> list[dict[int, int]]:
    """Return what each device does, by unit."""
    found: list[dict[int, int]] = [{} for _ in range(devices)]
    for (rank, turn, _), unit in units.items():
        found[rank][unit] = turn
    return found


def _with_weights(units: _Units, devices: int) -> _Units:
    """Add each W in the first idle unit after its I."""
    found = dict(units)
    for rank, turns in enumerate(_by_device(units, devices)):
        done = waiting = unit = 0
        last = max(turns)
        while unit <= last or waiting:
            if unit in turns:
                waiting += _TURNS[turns[unit]][0] == "I"
            elif waiting:
                found[rank, _W, done] = unit
                done, waiting = done + 1, waiting - 1
            unit += 1
    return found


def _before(key: _Key, devices: int) -> list[_Key]:
    """Return what an F or I needs."""
    rank, turn, chunk = key
    other = rank - 1 if turn in (0, 2) else rank + 1
    found = [(other, turn, chunk)] if 0 <= other < devices else []
    return [*found, (rank, turn - 1, chunk)] if turn else found


def _earlier(units: _Units, devices: int, chunks: int, memory: int, has_weights: bool) -> _Units:
    """Take actions to earlier units; without W, only the last ones."""
    found: _Units = {}
    turns = _by_device(units, devices)
    gradients: list[list[int]] = [[] for _ in range(devices)]
    free = has_weights
    for unit, key in sorted((unit, key) for key, unit in units.items()):
        rank, turn, chunk = key
        free = free and key != (0, _W - 1, 0)
        place = unit
        if free:
            before = [found[other] for other in _before(key, devices)] if turn < _W else []
            before += [gradients[rank][chunk]] if turn == _W else []
            before += [found[rank, turn, chunk - 1]] if chunk else []
            first = max(before, default=-1) + 1
            for place in range(first, unit):
                if place not in turns[rank]:
                    turns[rank][place] = turns[rank].pop(unit)
                    if _peak(turns[rank], has_weights) <= memory:
                        break
                    turns[rank][unit] = turns[rank].pop(place)
            else:
                place = unit
        free = free or key == (0, 0, chunks - 1)
        found[key] = place
        if 2 <= turn < _W:
            insort(gradients[rank], place)
    return found


def _peak(turns: dict[int, int], has_weights: bool) -> int:
    """Return what a device holds at most; W are in idle units unless they have their own."""
    held = most = waiting = 0
    for unit in range(max(turns) + 1):
        turn = turns.get(unit)
        if turn is None:
            held -= waiting > 0
            waiting -= waiting > 0
        elif turn == _W:
            held -= 1
        elif turn < 2:
            held += 1
            most = max(most, held)
        elif not has_weights:
            waiting += 1
    return most


def _eager(units: _Units, devices: int) -> _Units:
    """Let all begin as early as possible, in the same order on each device."""
    found: _Units = {}
    free = [0] * devices
    for _, key in sorted((unit, key) for key, unit in units.items()):
        rank, turn, _ = key
        before = _before(key, devices) if turn < _W else []
        found[key] = max([free[rank], *(found[other] + 1 for other in before)])
        free[rank] = found[key] + 1
    return found
