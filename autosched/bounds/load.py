"""Lower bounds from the total work of devices or copy streams.

Each piece of work may be done by one of several devices or streams. Knows pieces, durations and
streams; no order, and no edge between pieces.

The bounds use prices of devices, which are the dual variables of distributing the work. They are
found without an LP solver. Any prices give a valid bound, so approximate prices are still correct.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autosched.bounds.tables import Array

__all__ = ["gathered", "prices", "shared"]

_ENOUGH = 1e-6  # relative: what is left to gain
_ROUNDS = 40  # for each device, at most
_SAMPLE = 10_000
_NOTHING = 1e-300  # a price that costs nothing, but keeps infinity what it is


def gathered(seconds: Array, group: NDArray[np.int64]) -> Array:
    """Return the seconds of whole groups on each device, a row for each."""
    groups, row = np.unique(group, return_inverse=True)
    if len(groups) == len(group):
        return seconds
    together = np.zeros((len(groups), seconds.shape[1]))
    np.add.at(together, row, seconds)
    return together


def shared(pieces: Array, streams: Array) -> float:
    """Return the seconds that so many streams of each device need for all pieces, which may be cut at will.

    ``pieces[piece, device]`` are seconds, infinite where it cannot be done.
    """
    return float(np.min(pieces * prices(pieces, streams), axis=1, initial=math.inf).sum())


def prices(pieces: Array, streams: Array) -> Array:
    """Return what a second of one stream of each device shall cost for pieces to cost the most; all at once cost 1.

    In T seconds all streams can be paid T at the most, so no schedule is shorter than what pieces
    cost where each is cheapest, at any prices. These are the dual of the linear relaxation, exact
    up to rounding; of very many pieces, of a sample. Devices that are equal for all pieces count as
    one.
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


def _simplex(seconds: Array, streams: Array) -> Array:
    """Mix loads of devices so that the fullest has the least; a round adds the cheapest load at the prices so far.

    The linear program is: most sum of x where loads @ x <= 1. Source: Dantzig, Wolfe, Operations
    Research 8(1), 1960.
    """
    devices = len(streams)
    best = price = np.full(devices, 1 / streams.sum())
    most = scale = float(np.min(seconds * price[:, None], axis=0, initial=math.inf).sum())
    if devices == 1 or not 0 < scale < math.inf:
        return best
    inverse = np.eye(devices)  # of the basis: all idle
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
        leaves = int(ratio.argmin())
        if math.isinf(ratio[leaves]):
            break
        pivot = inverse[leaves] / column[leaves]
        share = ratio[leaves]
        inverse = inverse - np.outer(column, pivot)
        mix = mix - column * share
        inverse[leaves] = pivot
        mix[leaves] = share
        worth[leaves] = 1.0
        duals = np.maximum(worth @ inverse, 0.0)
        price = np.maximum(duals / (duals.sum() * streams), _NOTHING)
    return best
