"""Sort the nodes of a DAG topologically."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any


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
