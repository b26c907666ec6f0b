"""Group nodes of a DAG into boxes without creating cycles.

A key per node determines which nodes may share a box. Where sharing would create a cycle, the later
node begins another box: a picture of a DAG in which time runs both ways would be wrong. Knows
numbers and keys alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

__all__ = ["fold", "parts", "together"]

Keys = Sequence[Hashable]
Path = tuple[str, ...]


def parts(
    before: Sequence[Sequence[int]],
    keys: Keys,
    paths: Sequence[Path],
    sources: int,
    depth: int | None,
    most: float,
) -> list[int]:
    """Return the box of each node, numbered in topological order; a box has nodes of one key.

    ``before`` are the predecessors of each node, all of them earlier; the first ``sources`` nodes
    have none. ``depth`` is the number of parts of a path that are distinguished; if None, as many
    as give at most ``most`` boxes, as far as possible.
    """
    if depth is not None:
        return _fold(_by_path(keys, paths, depth), before, keys[:sources])
    alone = list(range(len(keys)))
    if len(keys) <= most:
        return alone
    best = alone
    for way in _ways(
        [[i for i in nodes if i >= sources] for nodes in before], keys, paths, int(most)
    ):
        if len(set(way[sources:])) <= most:
            found = _fold(way, before, keys[:sources])
            best = found if max(found) < max(best) else best
        if max(best) < most:
            break
    return best


def _ways(
    before: Sequence[Sequence[int]], keys: Keys, paths: Sequence[Path], most: int
) -> Iterator[Keys]:
    """Yield keys by which to fold, the finest first: by module or chain, then by neighbourhood."""
    levels = max(map(len, paths), default=0)
    for level in range(levels, 0, -1):
        yield _by_path(keys, paths, level)
    if not levels:
        yield _chains(keys, before)
    while most > 0:
        yield [(i * most // len(keys), key) for i, key in enumerate(keys)]
        most //= 2


def _by_path(keys: Keys, paths: Sequence[Path], depth: int) -> Keys:
    return [(key, path[:depth]) for key, path in zip(keys, paths, strict=True)]


def _chains(keys: Keys, before: Sequence[Sequence[int]]) -> Keys:
    """Return keys shared by nodes that form a chain of one key, entered and left at its ends."""
    users = [0] * len(keys)
    for nodes in before:
        for node in nodes:
            users[node] += 1
    first: list[int] = []
    for i, nodes in enumerate(before):
        joins = len(nodes) == 1 and users[nodes[0]] == 1 and keys[nodes[0]] == keys[i]
        first.append(first[nodes[0]] if joins else i)
    return first


def _fold(keys: Keys, before: Sequence[Sequence[int]], places: Keys) -> list[int]:
    """Fold nodes by their keys, and sources by their places and the box of their first reader."""
    sources = len(places)
    tasks = fold(
        keys[sources:], [[i - sources for i in nodes if i >= sources] for nodes in before[sources:]]
    )
    first: dict[int, int] = {}
    for box, nodes in zip(tasks, before[sources:], strict=True):
        for node in nodes:
            first.setdefault(node, box)
    boxes: dict[Hashable, int] = {}
    found = [boxes.setdefault((place, first.get(i)), len(boxes)) for i, place in enumerate(places)]
    return found + [len(boxes) + box for box in tasks]


def fold(keys: Keys, before: Sequence[Sequence[int]]) -> list[int]:
    """Return the box of each node 0, 1, ...; ``before`` has the earlier nodes it depends on.

    Boxes are numbered in topological order.

    >>> fold("aba", [[], [], [0]]), fold("aba", [[], [0], [1]])
    ([0, 1, 0], [0, 1, 2])
    """
    latest: dict[Hashable, int] = {}  # the last box of each key
    above: list[int] = []  # by box, its direct and indirect predecessors as a bit set
    found: list[int] = []
    for key, nodes in zip(keys, before, strict=True):
        others = dict.fromkeys(found[node] for node in nodes)
        box = latest.get(key, -1)
        if box < 0 or _above(others, above, box) >> box & 1:
            box = latest[key] = len(above)
            above.append(_above(others, above, box))
        else:
            _put_below(box, _above(others, above, box), above)
        found.append(box)
    # A predecessor of a box has fewer predecessors than the box: their number grows along
    # every edge.
    order = sorted(range(len(above)), key=lambda box: above[box].bit_count())
    number = {box: i for i, box in enumerate(order)}
    return [number[box] for box in found]


def _above(others: Iterable[int], above: Sequence[int], box: int) -> int:
    """Return the predecessors of a box as a bit set."""
    found = 0
    for other in others:
        if other != box:
            found |= above[other] | 1 << other
    return found


def _put_below(box: int, more: int, above: list[int]) -> None:
    if more & ~above[box]:
        for other, known in enumerate(above):
            if other == box or known >> box & 1:
                above[other] |= more


def together(part: Sequence[int]) -> list[list[int]]:
    """Return the nodes in each box.

    >>> together([0, 1, 0])
    [[0, 2], [1]]
    """
    members: list[list[int]] = [[] for _ in range(max(part, default=-1) + 1)]
    for node, box in enumerate(part):
        members[box].append(node)
    return members
