"""Compute a layered layout of a DAG in columns.

1. Rank: a node is placed below all nodes that it depends on (longest path); one that may float is
   placed just above its first user.
2. Order: a few sweeps move the nodes that share a rank and a column to the mean of their neighbours
   (barycentres).
3. Route: an edge over several ranks runs straight down where no node is in the way, else between
   the columns.

Input and output are numbers. Knows no tasks, no devices and no SVG.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Layout", "layout"]

GAP = 18.0  # between nodes side by side
GUTTER = 56.0  # between columns
LEAST = 90.0  # the width of a column, at least
CLEAR = 7.0  # between a node and an edge that passes it
ROOM = 830.0  # how wide a rank may be: in all columns, and in each at least
LEAST_ROOM = 380.0
FAR = 64  # ranks: longer edges run between the columns without search for a shorter route
SWEEPS = 6


@dataclass(frozen=True)
class Route:
    """The x where an edge leaves, where it passes ranks in between or None, and where it enters."""

    leaves: float
    passes: float | None
    enters: float


@dataclass(frozen=True)
class Layout:
    """The x (centre) and rank of each node, the edges of each column, and a route per edge."""

    x: Sequence[float]
    rank: Sequence[int]
    columns: Sequence[tuple[float, float]]
    routes: Sequence[Route]

    @property
    def width(self) -> float:
        """The total width of all columns, with the space around them."""
        return self.columns[-1][1] + GUTTER if self.columns else GUTTER


def layout(
    column: Sequence[int],
    width: Sequence[float],
    edges: Sequence[tuple[int, int]],
    floating: Collection[int] = (),
    band: Sequence[int] = (),
) -> Layout:
    """Lay out nodes 0, 1, ..., in topological order, by their column and width.

    ``edges`` are distinct. Nodes of one ``band`` are consecutive and share a column, in which no
    other node has a rank between theirs.

    >>> found = layout([0, 0, 1], [50.0, 50.0, 50.0], [(0, 1), (0, 2), (1, 2)])
    >>> found.rank, found.columns
    ([0, 1, 2], [(56.0, 146.0), (202.0, 292.0)])
    """
    before: list[list[int]] = [[] for _ in column]
    after: list[list[int]] = [[] for _ in column]
    for a, b in edges:
        before[b].append(a)
        after[a].append(b)
    rank = _ranks(column, width, before, after, floating, band)
    cells: dict[tuple[int, int], list[int]] = {}
    for node in sorted(range(len(column)), key=lambda node: rank[node]):
        cells.setdefault((rank[node], column[node]), []).append(node)
    columns = _columns(max(column, default=-1) + 1, cells, width)
    x = _order(cells, columns, width, before, after)
    return Layout(x, rank, columns, _routes(edges, x, rank, column, columns, width))


def _ranks(
    column: Sequence[int],
    width: Sequence[float],
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
    floating: Collection[int],
    band: Sequence[int],
) -> list[int]:
    """Return the rank of each node; if a column is full at a rank, nodes use the next free rank."""
    room = max(ROOM / (max(column, default=0) + 1), LEAST_ROOM)
    rank = [0] * len(column)
    filled: dict[tuple[int, int], float] = {}

    def is_full(r: int, node: int) -> bool:
        return bool(taken := filled.get((r, column[node]), 0.0)) and taken + width[node] > room

    def fill(r: int, node: int) -> None:
        filled[r, column[node]] = filled.get((r, column[node]), 0.0) + width[node] + GAP

    of = band or [0] * len(column)
    first: dict[int, int] = {}  # by band, its first possible rank
    last: dict[int, int] = {}  # the lowest rank of each band
    below = [0] * (max(column, default=0) + 1)  # by column, the first free rank
    for node in range(len(column)):
        floor = first.setdefault(of[node], below[column[node]] if band else 0)
        rank[node] = max([floor, *(rank[other] + 1 for other in before[node])])
        if node not in floating:
            while is_full(rank[node], node):
                rank[node] += 1
            fill(rank[node], node)
        last[of[node]] = max(last.get(of[node], 0), rank[node])
        below[column[node]] = max(below[column[node]], rank[node] + 1)
    for node in sorted(floating, reverse=True):
        least = rank[node] if before[node] or band else -len(column)
        wanted = max(least, min((rank[other] for other in after[node]), default=0) - 1)
        wanted = min(wanted, last[of[node]]) if band else wanted
        while wanted > least and is_full(wanted, node):
            wanted -= 1
        fill(wanted, node)
        rank[node] = wanted
    place = {r: i for i, r in enumerate(sorted(set(rank)))}
    return [place[r] for r in rank]


def _columns(
    count: int, cells: dict[tuple[int, int], list[int]], width: Sequence[float]
) -> list[tuple[float, float]]:
    wide = [LEAST] * count
    for (_, column), nodes in cells.items():
        wide[column] = max(wide[column], sum(width[node] + GAP for node in nodes) + GAP)
    edges = []
    left = GUTTER
    for w in wide:
        edges.append((left, left + w))
        left += w + GUTTER
    return edges


def _order(
    cells: dict[tuple[int, int], list[int]],
    columns: Sequence[tuple[float, float]],
    width: Sequence[float],
    before: Sequence[Sequence[int]],
    after: Sequence[Sequence[int]],
) -> list[float]:
    """Return the x of each node, after sweeps down and up that sort the nodes of each cell."""
    x = [0.0] * len(width)

    def spread(column: int, nodes: Iterable[int]) -> None:
        nodes = list(nodes)
        left = (sum(columns[column]) - sum(width[node] + GAP for node in nodes) + GAP) / 2
        for node in nodes:
            x[node] = left + width[node] / 2
            left += width[node] + GAP

    for (_, column), nodes in cells.items():
        spread(column, nodes)
    for sweep in range(SWEEPS):
        near = after if sweep % 2 else before
        for (_, column), nodes in reversed(cells.items()) if sweep % 2 else cells.items():
            if len(nodes) > 1:
                mean = {
                    n: sum(x[o] for o in near[n]) / len(near[n]) if near[n] else x[n] for n in nodes
                }
                nodes.sort(key=mean.__getitem__)
                spread(column, nodes)
    return x


def _routes(
    edges: Sequence[tuple[int, int]],
    x: Sequence[float],
    rank: Sequence[int],
    column: Sequence[int],
    columns: Sequence[tuple[float, float]],
    width: Sequence[float],
) -> list[Route]:
    taken: list[list[tuple[float, float]]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for node in sorted(range(len(x)), key=lambda node: x[node]):
        taken[rank[node]].append(
            (x[node] - width[node] / 2 - CLEAR, x[node] + width[node] / 2 + CLEAR)
        )

    def free(at: float, ranks: range) -> bool:
        for r in ranks:
            i = bisect_left(taken[r], (at, at))
            if i and taken[r][i - 1][1] > at:
                return False
        return True

    passes: list[float | None] = []
    trunks: dict[tuple[float, int], list[int]] = {}  # gutter and source -> edges
    gutters = [GUTTER / 2] + [right + GUTTER / 2 for _, right in columns]
    for i, (a, b) in enumerate(edges):
        between = range(rank[a] + 1, rank[b])
        straight = [
            at for at in (x[a], x[b]) if between and len(between) < FAR and free(at, between)
        ]
        passes.append(straight[0] if straight else None)
        if between and not straight:
            ways = [gutters[column[end] + side] for end in (a, b) for side in (0, 1)]
            nearest = min(ways, key=lambda at: abs(x[a] - at) + abs(x[b] - at))
            trunks.setdefault((nearest, a), []).append(i)
    for trunk, at in _lanes(trunks, edges, rank).items():
        for i in trunks[trunk]:
            passes[i] = at
    leaves = _ports(edges, 0, x, width, passes)
    enters = _ports(edges, 1, x, width, passes)
    return [Route(*ends) for ends in zip(leaves, passes, enters, strict=True)]


def _lanes(
    trunks: dict[tuple[float, int], list[int]],
    edges: Sequence[tuple[int, int]],
    rank: Sequence[int],
) -> dict[tuple[float, int], float]:
    """Give the edges of one source that share a gutter one x there, without overlapping others."""
    lane: dict[tuple[float, int], int] = {}
    ended: dict[float, list[tuple[int, int]]] = {}  # gutter -> (last rank, lane)
    for trunk in sorted(trunks, key=lambda trunk: (rank[trunk[1]], trunk)):
        gutter, source = trunk
        heap = ended.setdefault(gutter, [])
        reused = heap and heap[0][0] <= rank[source]
        lane[trunk] = heapq.heappop(heap)[1] if reused else len(heap)
        heapq.heappush(heap, (max(rank[edges[i][1]] for i in trunks[trunk]), lane[trunk]))
    spacing = {gutter: min(8.0, (GUTTER - 2 * CLEAR) / len(heap)) for gutter, heap in ended.items()}
    # Lanes fill a gutter from its middle: 0, 1, -1, 2, -2, ...
    return {
        trunk: trunk[0] + (i + 1) // 2 * (1 if i % 2 else -1) * spacing[trunk[0]]
        for trunk, i in lane.items()
    }


def _ports(
    edges: Sequence[tuple[int, int]],
    end: int,
    x: Sequence[float],
    width: Sequence[float],
    passes: Sequence[float | None],
) -> list[float]:
    """Distribute the edges that leave (end 0) or enter (end 1) each node over its width.

    They are sorted by the position of their other end.
    """
    meeting: dict[int, list[int]] = {}
    for i, edge in enumerate(edges):
        meeting.setdefault(edge[end], []).append(i)
    found = [0.0] * len(edges)
    for node, mine in meeting.items():
        step = min(14.0, (width[node] - 12) / len(mine))
        towards = {i: passes[i] if passes[i] is not None else x[edges[i][1 - end]] for i in mine}
        for place, i in enumerate(sorted(mine, key=lambda i: (towards[i], i))):
            found[i] = x[node] + (place - (len(mine) - 1) / 2) * step
    return found
