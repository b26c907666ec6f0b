"""Compute ranks over flat arrays, compiled or not: see ``kernels``."""

from __future__ import annotations

import math
from typing import Any

from autosched._lib.jit import kernel
from autosched.problem import Tables

__all__ = ["longest", "optimistic"]


@kernel
def longest(
    t: Tables, weight: Any, kind: Any, kinds: int, latency: Any, per_byte: Any, rest: Any
) -> None:
    """Fill ``rest`` with the longest path from each task's end to the end of the graph.

    ``weight`` is the duration of each task. A datum that moves from a task of ``kind`` a to one of
    ``kind`` b takes ``latency[a, b] + nbytes * per_byte[a, b]``. ``rest`` must be zero everywhere.
    """
    for task in range(len(weight) - 1, -1, -1):
        here = rest[task] + weight[task]
        for i in range(t.before_at[task], t.before_at[task + 1]):
            rest[t.before[i]] = max(rest[t.before[i]], here)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker >= 0:
                away = here
                if t.group[maker] != t.group[task]:
                    ends = kind[maker] * kinds + kind[task]
                    away += latency[ends] + t.nbytes[t.reads[i]] * per_byte[ends]
                rest[maker] = max(rest[maker], away)


@kernel
def optimistic(t: Tables, latency: float, per_byte: float, table: Any, column: Any) -> None:
    """Fill ``table[task, device]`` with the optimistic cost, the least time after a task's end.

    A datum that changes device takes ``latency + nbytes * per_byte``. ``table`` must be zero
    everywhere; ``column`` has one element per device. Source: Arabnejad, Barbosa, IEEE TPDS 25(3),
    2014.
    """
    devices = len(t.streams)
    for task in range(len(t.group) - 1, -1, -1):
        least = math.inf
        for p in range(devices):
            column[p] = table[task * devices + p] + t.seconds[task * devices + p]
            least = min(least, column[p])
        for i in range(t.before_at[task], t.before_at[task + 1]):
            base = t.before[i] * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], least)
        for i in range(t.reads_at[task], t.reads_at[task + 1]):
            maker = t.maker[t.reads[i]]
            if maker < 0:
                continue
            far = least + (latency + t.nbytes[t.reads[i]] * per_byte)
            if t.group[maker] == t.group[task]:
                far = math.inf
            base = maker * devices
            for p in range(devices):
                table[base + p] = max(table[base + p], min(far, column[p]))
