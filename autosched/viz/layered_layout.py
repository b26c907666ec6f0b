"""Compute a layered layout of a DAG in columns (Sugiyama's method).

1. Rank: a node is below all its predecessors (longest path); one that floats is directly above its
   first successor. Or ranks are given, and edges may join nodes of one rank.
2. Order: a few sweeps move the nodes that share a rank and a column to the mean of their neighbours
   (barycentres).
3. Route: an edge over several ranks runs straight down where no node is in the way, else in the
   gutters between the columns.

Input and output are numbers. Knows no tasks, no devices and no SVG.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

GAP = 18.0  # between nodes side by side
GUTTER = 56.0  # the most between columns; less if few edges run there
LANE = 8.0  # between edges in a gutter
LEAST = 90.0  # the least width of a column
CLEAR = 7.0  # between a node and an edge that passes it
ROOM = 830.0  # the greatest width of a rank, over all columns
LEAST_ROOM = 380.0  # the same for one column, if there are many
DISTANT = 64  # ranks: longer edges run in the gutters without search for a shorter route
SWEEPS = 6

Edge = tuple[int, int]
Trunk = tuple[int, int]  # a gutter, and the source of the edges that run in it


class Route(NamedTuple):
    """The x where an edge leaves, where it passes ranks in between or None, and where it enters.

    An edge within a rank leaves and enters below the nodes if it leads to the right, else above.
    """

    leaves: float
    passes: float | None
    enters: float


@dataclass(frozen=True)
class Layout:
    """The x (centre) and rank of each node, the sides of each column, and a route per edge."""

    x: Sequence[float]
    rank: Sequence[int]
    columns: Sequence[tuple[float, float]]
    routes: Sequence[Route]
    width: float


def layout(
    column: Sequence[int],
    width: Sequence[float],
    edges: Sequence[Edge],
    floating: Collection[int] = (),
    rank: Sequence[int] | None = None,
) -> Layout:
    """Lay out nodes 0, 1, ..., in topological order, by their column and width.

    ``edges`` are distinct. ``rank`` is that of each node, if it is given.

    >>> found = layout([0, 0, 1], [50.0, 50.0, 50.0], [(0, 1), (0, 2), (1, 2)])
    >>> found.rank, found.columns
    ([0, 1, 2], [(22.0, 112.0), (134.0, 224.0)])
    """
    return _Sheet(column, width, edges).laid_out(floating, rank)


@dataclass
class _Sheet:
    """Nodes and edges, and where they are so far."""

    column: Sequence[int]
    width: Sequence[float]
    edges: Sequence[Edge]

    def __post_init__(self) -> None:
        self.predecessors: list[list[int]] = [[] for _ in self.column]
        self.successors: list[list[int]] = [[] for _ in self.column]
        for a, b in self.edges:
            self.predecessors[b].append(a)
            self.successors[a].append(b)

    def laid_out(self, floating: Collection[int], rank: Sequence[int] | None) -> Layout:
        rank = self.ranks(floating) if rank is None else rank
        number = {r: i for i, r in enumerate(sorted(set(rank)))}
        self.rank = [number[r] for r in rank]
        self.cells: dict[tuple[int, int], list[int]] = {}
        for node in sorted(range(len(rank)), key=self.rank.__getitem__):
            self.cells.setdefault((self.rank[node], self.column[node]), []).append(node)
        gutters = [GUTTER] * (max(self.column, default=-1) + 2)
        for _ in range(2):  # again with gutters as wide as their edges need
            columns = self.columns(gutters)
            self.x = self.positions(columns)
            routes, lanes = self.routes(columns, gutters)
            total = (columns[-1][1] if columns else 0.0) + gutters[-1]
            wanted = (2 * CLEAR + LANE * max(lanes.get(i, 0), 1) for i in range(len(gutters)))
            gutters = [min(gutter, GUTTER) for gutter in wanted]
        return Layout(self.x, self.rank, columns, routes, total)

    def ranks(self, floating: Collection[int]) -> list[int]:
        """Return ranks; if a column is full at one, nodes use the next free one."""
        column, width = self.column, self.width
        room = max(ROOM / (max(column, default=0) + 1), LEAST_ROOM)
        rank = [0] * len(column)
        filled: defaultdict[tuple[int, int], float] = defaultdict(float)

        def place(node: int, wanted: int, step: int, last: float) -> None:
            while wanted != last and 0.0 < filled[wanted, column[node]] > room - width[node]:
                wanted += step
            rank[node] = wanted
            filled[wanted, column[node]] += width[node] + GAP

        for node, before in enumerate(self.predecessors):
            rank[node] = max((rank[other] + 1 for other in before), default=0)
            if node not in floating:
                place(node, rank[node], 1, inf)
        for node in sorted(floating, reverse=True):
            least = rank[node] if self.predecessors[node] else -len(column)
            first = min((rank[other] for other in self.successors[node]), default=0)
            place(node, max(least, first - 1), -1, least)
        return rank

    def columns(self, gutters: Sequence[float]) -> list[tuple[float, float]]:
        """Return the left and right side of each column, which is as wide as its widest rank."""
        widths = [LEAST] * (len(gutters) - 1)
        for (_, column), nodes in self.cells.items():
            wide = sum(self.width[node] + GAP for node in nodes) + GAP
            widths[column] = max(widths[column], wide)
        sides = []
        left = 0.0
        for gutter, wide in zip(gutters, widths, strict=False):
            left += gutter
            sides.append((left, left + wide))
            left += wide
        return sides

    def positions(self, columns: Sequence[tuple[float, float]]) -> list[float]:
        """Return the x of each node, after sweeps down and up that sort the nodes of each cell."""
        x = [0.0] * len(self.width)

        def spread(column: int, nodes: Sequence[int]) -> None:
            wide = sum(self.width[node] + GAP for node in nodes) - GAP
            left = (sum(columns[column]) - wide) / 2
            for node in nodes:
                x[node] = left + self.width[node] / 2
                left += self.width[node] + GAP

        for (_, column), nodes in self.cells.items():
            spread(column, nodes)
        for sweep in range(SWEEPS):
            goes_up = sweep % 2 == 1
            neighbours = self.successors if goes_up else self.predecessors
            cells = reversed(self.cells.items()) if goes_up else self.cells.items()
            for (_, column), nodes in cells:
                if len(nodes) > 1:
                    near = {node: [x[other] for other in neighbours[node]] for node in nodes}
                    mean = {node: sum(xs) / len(xs) if xs else x[node] for node, xs in near.items()}
                    nodes.sort(key=mean.__getitem__)
                    spread(column, nodes)
        return x

    def routes(
        self, columns: Sequence[tuple[float, float]], gutters: Sequence[float]
    ) -> tuple[list[Route], dict[int, int]]:
        """Return the route of each edge, and the number of lanes in each gutter that has any."""
        x, rank, column, width = self.x, self.rank, self.column, self.width
        taken: list[list[tuple[float, float]]] = [[] for _ in range(max(rank, default=-1) + 1)]
        for node in sorted(range(len(x)), key=x.__getitem__):
            half = width[node] / 2 + CLEAR
            taken[rank[node]].append((x[node] - half, x[node] + half))

        def is_free(at: float, ranks: range) -> bool:
            for r in ranks:
                i = bisect_left(taken[r], (at, at))
                if i and taken[r][i - 1][1] > at:
                    return False
            return True

        passes: list[float | None] = [None] * len(self.edges)
        trunks: dict[Trunk, list[int]] = {}
        sides = [0.0, *(right for _, right in columns)]
        middles = [side + gutter / 2 for side, gutter in zip(sides, gutters, strict=True)]
        for i, (a, b) in enumerate(self.edges):
            between = range(rank[a] + 1, rank[b])
            if not between:
                continue
            tried = (x[a], x[b]) if len(between) < DISTANT else ()
            passes[i] = next((at for at in tried if is_free(at, between)), None)
            if passes[i] is None:
                near = [column[end] + side for end in (a, b) for side in (0, 1)]
                nearest = min(near, key=lambda i: abs(x[a] - middles[i]) + abs(x[b] - middles[i]))
                trunks.setdefault((nearest, a), []).append(i)
        lane = self.lanes(trunks)
        lanes: dict[int, int] = {}
        for (gutter, _), number in lane.items():
            lanes[gutter] = max(lanes.get(gutter, 0), number + 1)
        for (gutter, source), number in lane.items():
            # Lanes fill a gutter from its middle: 0, 1, -1, 2, -2, ...
            offset = (number + 1) // 2 * (1 if number % 2 else -1)
            spacing = min(LANE, (gutters[gutter] - 2 * CLEAR) / lanes[gutter])
            for i in trunks[gutter, source]:
                passes[i] = middles[gutter] + offset * spacing
        leaves, enters = (self.ports(end, passes) for end in (0, 1))
        for i, (a, b) in enumerate(self.edges):
            if rank[a] == rank[b]:
                side = 0.25 if x[a] < x[b] else -0.25
                leaves[i], enters[i] = x[a] + side * width[a], x[b] - side * width[b]
        return [Route(*ends) for ends in zip(leaves, passes, enters, strict=True)], lanes

    def lanes(self, trunks: Mapping[Trunk, Sequence[int]]) -> dict[Trunk, int]:
        """Give the edges of one source that share a gutter one lane, without overlapping others."""
        lane: dict[Trunk, int] = {}
        ends: dict[int, list[int]] = {}  # by gutter, the last rank of each lane
        for trunk in sorted(trunks, key=lambda trunk: (self.rank[trunk[1]], trunk)):
            gutter, source = trunk
            mine = ends.setdefault(gutter, [])
            free = (k for k, last in enumerate(mine) if last <= self.rank[source])
            lane[trunk] = k = next(free, len(mine))
            mine[k : k + 1] = [max(self.rank[self.edges[i][1]] for i in trunks[trunk])]
        return lane

    def ports(self, end: int, passes: Sequence[float | None]) -> list[float]:
        """Spread the edges that leave (0) or enter (1) a node over its width, by other ends."""
        by_node: dict[int, list[tuple[float, int]]] = {}
        for i, (edge, passing) in enumerate(zip(self.edges, passes, strict=True)):
            target = self.x[edge[1 - end]] if passing is None else passing
            by_node.setdefault(edge[end], []).append((target, i))
        ports = [0.0] * len(self.edges)
        for node, mine in by_node.items():
            step = min(14.0, (self.width[node] - 12) / len(mine))
            for place, (_, i) in enumerate(sorted(mine)):
                ports[i] = self.x[node] + (place - (len(mine) - 1) / 2) * step
        return ports
