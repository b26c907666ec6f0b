"""Partition the nodes of a DAG into boxes that form a DAG again.

A key per node determines which nodes may share a box. Where sharing would create a cycle, the later
node begins another box: a picture of a DAG in which time runs both ways would be wrong. Knows
numbers and keys alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

__all__ = ["acyclic_partition", "members", "partition"]

Keys = Sequence[Hashable]
Path = tuple[str, ...]


def partition(
    predecessors: Sequence[Sequence[int]],
    keys: Keys,
    paths: Sequence[Path],
    sources: int,
    depth: int | None,
    most: float,
) -> list[int]:
    """Return the box of each node, numbered in topological order; a box has nodes of one key.

    ``predecessors`` of each node come before it; the first ``sources`` nodes have none. ``depth``
    is the number of parts of a path that are distinguished; if None, as many as give at most
    ``most`` boxes, as far as possible.
    """
    if depth is not None:
        return _with_sources(_by_path(keys, paths, depth), predecessors, keys[:sources])
    best = list(range(len(keys)))
    if len(keys) <= most:
        return best
    tasks = [[i for i in nodes if i >= sources] for nodes in predecessors]
    for candidate in _candidates(tasks, keys, paths, int(most)):
        if len(set(candidate[sources:])) <= most:
            found = _with_sources(candidate, predecessors, keys[:sources])
            best = found if max(found) < max(best) else best
        if max(best) < most:
            break
    return best


def _candidates(
    predecessors: Sequence[Sequence[int]], keys: Keys, paths: Sequence[Path], most: int
) -> Iterator[Keys]:
    """Yield keys to merge by, the finest first: by module or chain, then by neighbourhood."""
    levels = max(map(len, paths), default=0)
    for level in range(levels, 0, -1):
        yield _by_path(keys, paths, level)
    if not levels:
        yield _chains(keys, predecessors)
    while most > 0:
        yield [(i * most // len(keys), key) for i, key in enumerate(keys)]
        most //= 2


def _by_path(keys: Keys, paths: Sequence[Path], depth: int) -> Keys:
    return [(key, path[:depth]) for key, path in zip(keys, paths, strict=True)]


def _chains(keys: Keys, predecessors: Sequence[Sequence[int]]) -> Keys:
    """Return keys shared by nodes of a chain, which others enter and leave only at its ends."""
    successors = [0] * len(keys)
    for nodes in predecessors:
        for node in nodes:
            successors[node] += 1
    chain: list[int] = []
    for i, nodes in enumerate(predecessors):
        joins = len(nodes) == 1 and successors[nodes[0]] == 1 and keys[nodes[0]] == keys[i]
        chain.append(chain[nodes[0]] if joins else i)
    return chain


def _with_sources(keys: Keys, predecessors: Sequence[Sequence[int]], places: Keys) -> list[int]:
    """Partition tasks by keys, and sources by their places and the box of their first reader."""
    sources = len(places)
    before = [[i - sources for i in nodes if i >= sources] for nodes in predecessors[sources:]]
    tasks = acyclic_partition(keys[sources:], before)
    reader: dict[int, int] = {}
    for box, nodes in zip(tasks, predecessors[sources:], strict=True):
        for node in nodes:
            reader.setdefault(node, box)
    boxes: dict[Hashable, int] = {}
    found = [boxes.setdefault((place, reader.get(i)), len(boxes)) for i, place in enumerate(places)]
    return found + [len(boxes) + box for box in tasks]


def acyclic_partition(keys: Keys, predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Return the box of each node 0, 1, ..., whose predecessors have lower numbers.

    Boxes are numbered in topological order.

    >>> acyclic_partition("aba", [[], [], [0]]), acyclic_partition("aba", [[], [0], [1]])
    ([0, 1, 0], [0, 1, 2])
    """
    latest: dict[Hashable, int] = {}  # the last box of each key
    ancestors: list[int] = []  # of each box, as a bit set
    found: list[int] = []
    for key, nodes in zip(keys, predecessors, strict=True):
        others = dict.fromkeys(found[node] for node in nodes)
        box = latest.get(key, -1)
        mine = _ancestors(others, ancestors, box)
        if box < 0 or mine >> box & 1:
            box = latest[key] = len(ancestors)
            ancestors.append(_ancestors(others, ancestors, box))
        elif mine & ~ancestors[box]:
            for other, known in enumerate(ancestors):
                if other == box or known >> box & 1:
                    ancestors[other] |= mine
        found.append(box)
    # An ancestor of a box has fewer ancestors than the box, so that their number is a topological
    # order.
    order = sorted(range(len(ancestors)), key=lambda box: ancestors[box].bit_count())
    number = {box: i for i, box in enumerate(order)}
    return [number[box] for box in found]


def _ancestors(others: Iterable[int], ancestors: Sequence[int], box: int) -> int:
    found = 0
    for other in others:
        if other != box:
            found |= ancestors[other] | 1 << other
    return found


def members(part: Sequence[int]) -> list[list[int]]:
    """Return the nodes in each box.

    >>> members([0, 1, 0])
    [[0, 2], [1]]
    """
    nodes: list[list[int]] = [[] for _ in range(max(part, default=-1) + 1)]
    for node, box in enumerate(part):
        nodes[box].append(node)
    return nodes
