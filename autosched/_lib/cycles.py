"""Find the cycle of greatest ratio of seconds to distance in a graph.

Nodes take seconds. An edge of distance d says that a node begins, in run r, after another has ended
in run r - d. So the steady-state seconds per run of such a system are the maximum over all cycles
of the seconds of its nodes, divided by its distance: Baccelli, Cohen, Olsder, Quadrat,
"Synchronization and linearity", Wiley, 1992. This module knows no program.

Newton's method: assume a ratio, subtract it from each unit of distance, and compute longest paths.
If they converge, no cycle has a greater ratio. Otherwise the predecessors form a cycle whose ratio
is greater; assume that one. As there are finitely many cycles, this ends, with a result that is
exact up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from autosched._lib.jit import kernel, mode

Edge = tuple[int, int, int]
"""(node, later node, distance). Edges of distance 0 lead to nodes of greater numbers."""

_EXACT = 1e-12  # of the seconds of all nodes: paths that are longer by less are equally long


def maximum_cycle_ratio(seconds: Sequence[float], edges: Iterable[Edge]) -> float:
    """Return the greatest ratio; 0.0 without cycles.

    >>> maximum_cycle_ratio([1.0, 3.0], [(0, 1, 0), (1, 0, 2), (0, 0, 1)])
    2.0
    """
    sorted_edges = sorted(edges, key=lambda edge: edge[1])
    count = len(seconds)
    tail, head, distance = zip(*sorted_edges, strict=True) if sorted_edges else ((), (), ())
    at = np.searchsorted(np.array(head, np.int64), np.arange(count + 1))
    how = mode(20.0 * (count + len(sorted_edges)), converge)
    tables = how.whole(at), how.whole(tail), how.whole(distance)
    scale = _EXACT * float(sum(seconds))
    ratio = 0.0
    while True:
        parent = how.counts(count, -1)
        scratch = how.numbers(count), parent, how.counts(count)
        first = how(converge)(how.floats(seconds), *tables, ratio, scale, *scratch)
        if first < 0:
            return ratio
        found = _cycle(int(first), parent, tail, distance)
        total = sum(seconds[node] for node, _ in found)
        better = total / sum(apart for _, apart in found)
        if better <= ratio:  # but for rounding, it was greater
            return ratio
        ratio = better


def _cycle(
    first: int, parent: Sequence[int], tail: Sequence[int], distance: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the cycle of predecessors through a node, which comes last."""
    found: list[tuple[int, int]] = []
    node = first
    while not found or node != first:
        edge = int(parent[node])
        node = tail[edge]
        found.append((node, distance[edge]))
    return found[::-1]


@kernel
def converge(
    seconds: Any,
    at: Any,
    tail: Any,
    distance: Any,
    ratio: float,
    least: float,
    start: Any,
    parent: Any,
    seen: Any,
) -> int:
    """Compute longest paths; return a node of a cycle of predecessors, or -1 if there is none.

    The edges to node v are ``at[v]`` to ``at[v + 1]``. The last three are scratch arrays: zeros,
    -1, and zeros.
    """
    count = len(seconds)
    stamp = 0
    changed = True
    while changed:
        changed = False
        for node in range(count):
            for edge in range(at[node], at[node + 1]):
                before = tail[edge]
                since = start[before] + seconds[before] - ratio * distance[edge]
                if since > start[node] + least:
                    start[node] = since
                    parent[node] = edge
                    changed = True
        base = stamp
        for first in range(count if changed else 0):
            stamp += 1
            node = first
            while seen[node] <= base and parent[node] >= 0:
                seen[node] = stamp
                node = tail[parent[node]]
            if seen[node] == stamp:
                return node
    return -1
