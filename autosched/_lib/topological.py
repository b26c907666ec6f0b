"""Sort the nodes of a DAG topologically, and search the order that serves best."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count, cycle
from typing import Any, TypeVar

import numpy as np

_Made = TypeVar("_Made")
_NOISE = (0.02, 0.05, 0.15, 0.5)  # on positions, of those of a whole order


def topological_order(before: Sequence[Iterable[int]], key: Sequence[Any]) -> list[int]:
    """Return nodes 0, 1, ... in topological order: of those that may come next the least key first.

    ``before`` are the predecessors of each node. Ties go to the lower number.

    >>> topological_order([[], [0], []], key=[2, 0, 1])
    [2, 0, 1]
    """
    after: list[list[int]] = [[] for _ in before]
    waits = [0] * len(after)
    for node, others in enumerate(before):
        for other in others:
            after[other].append(node)
            waits[node] += 1
    ready = [(key[node], node) for node, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (key[other], other))
    return order


def best_order(
    before: Sequence[Sequence[int]],
    weight: Sequence[float],
    make: Callable[[list[int]], _Made | None],
    load: Callable[[_Made], Any],
    going_on: Callable[[int, Any], bool],
    seed: int = 0,
) -> _Made | None:
    """Return the best of what ``make`` makes of topological orders, that of least ``load``, if any.

    Tried are the order by number, by the weights of what follows, and depth first; then orders that
    resemble the best one so far, while ``going_on`` with their number and the least load.

    >>> best_order([[], [], [0]], [1, 1, 1], lambda order: order, lambda o: o.index(1), lambda *_: False)
    [1, 0, 2]
    """
    nodes = range(len(before))
    after: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        for other in before[node]:
            after[other].append(node)
    rank = list(weight)
    for node in reversed(topological_order(before, nodes)):
        rank[node] += max((rank[other] for other in after[node]), default=0.0)
    fallen = [-number for number in rank]
    orders = [topological_order(before, nodes), topological_order(before, fallen)]
    orders += [_depth_first(before, after, key) for key in (fallen, rank)]
    best: tuple[_Made, list[int]] | None = None
    seen = set[tuple[int, ...]]()
    for order in orders:
        made = None if tuple(order) in seen else make(order)
        seen.add(tuple(order))
        if made is not None and (best is None or load(made) < load(best[0])):
            best = made, order
    random = np.random.default_rng(seed)
    for number, noise in zip(count(), cycle(_NOISE)):
        if best is None or not going_on(number, load(best[0])):
            break
        key = np.argsort(best[1]) + random.normal(0.0, noise * len(nodes), len(nodes))
        order = topological_order(before, key.tolist())
        made = None if tuple(order) in seen else make(order)
        seen.add(tuple(order))
        if made is not None and load(made) <= load(best[0]):
            best = made, order
    return None if best is None else best[0]


def _depth_first(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], key: Sequence[float]
) -> list[int]:
    """Return an order that follows a chain as far as possible before it begins another."""
    missing = [len(others) for others in before]
    stack = sorted((n for n, waits in enumerate(missing) if not waits), key=lambda n: -key[n])
    order = []
    while stack:
        order.append(stack.pop())
        freed = []
        for other in after[order[-1]]:
            missing[other] -= 1
            if not missing[other]:
                freed.append(other)
        stack += sorted(freed, key=lambda n: -key[n])
    return order
