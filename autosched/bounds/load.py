"""Lower bounds from the total work of devices or copy streams.

Each piece of work may be done by one of several devices or streams. Knows pieces, durations and
streams; no order, and no edge between pieces.

The bounds use prices of devices, which are the dual variables of distributing the work. They are
found without an LP solver. Any prices give a valid bound, so approximate prices are still correct.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched.bounds.relaxation import Array

__all__ = ["gathered", "prices", "shared"]

_ENOUGH = 1e-6  # relative tolerance
_ROUNDS = 40  # for each device, at most
_SAMPLE = 10_000
_NOTHING = 1e-300  # a price of practically 0, whose product with infinity is infinite


def gathered(seconds: Array, group: NDArray[np.int64]) -> Array:
    """Return the total duration of each group on each device, a row per group."""
    groups, row = np.unique(group, return_inverse=True)
    if len(groups) == len(group):
        return seconds
    together = np.zeros((len(groups), seconds.shape[1]))
    np.add.at(together, row, seconds)
    return together


def shared(pieces: Array, streams: NDArray[Any]) -> float:
    """Return the time that the streams of all devices need for all pieces, which may be split.

    ``pieces[piece, device]`` are durations, infinite where a piece cannot run.
    """
    return float(np.min(pieces * prices(pieces, streams), axis=1, initial=math.inf).sum())


def prices(pieces: Array, streams: NDArray[Any]) -> Array:
    """Return the prices of devices, per second of a stream, that maximize the cost of all pieces.

    The prices of all streams sum to 1. In T seconds the streams then cost at most T, so no schedule
    is shorter than the cost of the pieces, each where it is cheapest, at any prices. The prices are
    the dual solution of the linear relaxation, exact up to rounding; for very many pieces, of a
    sample. Devices that are equal for all pieces count as one.
    """
    every = max(1, len(pieces) // _SAMPLE)
    columns = np.ascontiguousarray(pieces[::every].T)
    models: list[int] = []
    kind = []
    for p, column in enumerate(columns):
        alike = (k for k, model in enumerate(models) if np.array_equal(columns[model], column))
        kind.append(next(alike, len(models)))
        models += [p] if kind[-1] == len(models) else []
    found = _simplex(columns[models], np.bincount(kind, weights=streams).astype(float))
    return found[kind]


def _simplex(seconds: Array, streams: NDArray[Any]) -> Array:
    """Mix loads of devices so that the largest load is least, by column generation.

    Each round adds the cheapest load at the current prices. The linear program maximizes sum(x)
    subject to loads @ x <= 1. Source: Dantzig, Wolfe, Operations Research 8(1), 1960.
    """
    devices = len(streams)
    best = price = np.full(devices, 1 / streams.sum())
    most = scale = float(np.min(seconds * price[:, None], axis=0, initial=math.inf).sum())
    if devices == 1 or not 0 < scale < math.inf:
        return best
    inverse = np.eye(devices)  # of the initial basis, in which all devices are idle
    mix = np.ones(devices)
    worth = np.zeros(devices)
    pieces = np.arange(seconds.shape[1])
    for _ in range(_ROUNDS * devices):
        cost = seconds * price[:, None]
        where = cost.argmin(axis=0)
        total = float(cost[where, pieces].sum())
        if total > most:
            most = total
            best = price
        load = np.bincount(where, weights=seconds[where, pieces], minlength=devices) / (
            streams * scale
        )
        column = inverse @ load
        if 1.0 - worth @ column <= _ENOUGH:
            break
        ratio = np.divide(mix, column, out=np.full(devices, math.inf), where=column > 1e-12)
        row = int(ratio.argmin())
        if math.isinf(ratio[row]):
            break
        pivot = inverse[row] / column[row]
        share = ratio[row]
        inverse = inverse - np.outer(column, pivot)
        mix = mix - column * share
        inverse[row] = pivot
        mix[row] = share
        worth[row] = 1.0
        duals = np.maximum(worth @ inverse, 0.0)
        price = np.maximum(duals / (duals.sum() * streams), _NOTHING)
    return best
