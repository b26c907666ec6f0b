"""Shapes of task graphs: who reads whose result, nothing of costs. Edges lead from smaller numbers to larger."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

Shape = tuple[int, list[tuple[int, int]]]  # tasks; edges


def layered(tasks: int, rng: random.Random, width: int | None = None) -> Shape:
    """Return layers of about ``width`` tasks (default: as many as there are layers), 1 to 5 parents for each task.

    Four parents in five are of the layer before.
    """
    width = width or max(1, round(math.sqrt(tasks)))
    edges = []
    first, before = 0, 0  # of this layer, of the one before
    while first < tasks:
        end = min(
            tasks,
            first + rng.randint(max(1, width // 2), width + width // 2) if first else first + width,
        )
        for task in range(first, end) if first else ():
            parents = {
                rng.randrange(before, first) if rng.random() < 0.8 else rng.randrange(first)
                for _ in range(rng.randint(1, 5))
            }
            edges += [(parent, task) for parent in sorted(parents)]
        before, first = first, end
    return tasks, edges


def random_pairs(tasks: int, rng: random.Random, share: float = 0.1) -> Shape:
    """Return a graph in which each pair is an edge with the same probability, as in many sets of the literature."""
    return tasks, [(u, v) for v in range(tasks) for u in range(v) if rng.random() < share]


def fork_join(tasks: int, rng: random.Random) -> Shape:
    """Return forks of 2 to 10 branches, each of 1 to 3 tasks, that join before the next fork."""
    edges: list[tuple[int, int]] = []
    last, count = 0, 1
    while count < tasks - 3:
        ends = []
        for _ in range(rng.randint(2, 10)):
            before = last
            for _ in range(rng.randint(1, 3)):
                edges.append((before, count))
                before, count = count, count + 1
            ends.append(before)
        edges += [(end, count) for end in ends]
        last, count = count, count + 1
    return count, edges


def tree(tasks: int, rng: random.Random, inward: bool = False) -> Shape:
    """Return a random tree of few children each, from its root or to it."""
    edges = [(rng.randrange(max(0, (v - 2) // 3), (v + 1) // 2), v) for v in range(1, tasks)]
    return (
        (tasks, sorted((tasks - 1 - v, tasks - 1 - u) for u, v in edges))
        if inward
        else (tasks, edges)
    )


def gauss(tasks: int, _rng: random.Random) -> Shape:
    """Return Gaussian elimination: a pivot per column, then an update of each column right of it."""
    size = max(2, round(math.sqrt(2 * tasks)))
    edges: list[tuple[int, int]] = []
    count, before = 0, {}  # column -> the task that touched it last
    for k in range(size - 1):
        pivot, count = count, count + 1
        edges += [(before[k], pivot)] if k in before else []
        for column in range(k + 1, size):
            edges += [(pivot, count)] + ([(before[column], count)] if column in before else [])
            before[column], count = count, count + 1
    return count, edges


def fft(tasks: int, _rng: random.Random) -> Shape:
    """Return the butterflies of a fast Fourier transform."""
    stages = 2
    while (stages + 2) * 2 ** (stages + 1) <= tasks:
        stages += 1
    points = 2**stages
    return points * (stages + 1), sorted(
        (k * points + source, (k + 1) * points + i)
        for k in range(stages)
        for i in range(points)
        for source in (i, i ^ (1 << k))
    )


def cholesky(tasks: int, _rng: random.Random) -> Shape:
    """Return the factorization of a matrix of tiles: potrf, trsm, syrk and gemm."""
    size = max(2, round((6 * tasks) ** (1 / 3)))
    while size > 2 and size * (size + 1) * (size + 2) // 6 > tasks:
        size -= 1
    edges: list[tuple[int, int]] = []
    count, last = 0, {}  # tile -> the task that wrote it last

    def add(tile: tuple[int, int], *reads: tuple[int, int]) -> None:
        nonlocal count
        edges.extend(
            (source, count)
            for source in dict.fromkeys(last[t] for t in (tile, *reads) if t in last)
        )
        last[tile], count = count, count + 1

    for k in range(size):
        add((k, k))
        for i in range(k + 1, size):
            add((i, k), (k, k))
        for i in range(k + 1, size):
            for j in range(k + 1, i + 1):
                add((i, j), (i, k), (j, k))
    return count, edges


def in_tree(tasks: int, rng: random.Random) -> Shape:
    """Return a tree to its root: a reduction."""
    return tree(tasks, rng, inward=True)


SHAPES: Mapping[str, Callable[[int, random.Random], Shape]] = {
    "layered": layered,
    "pairs": random_pairs,
    "fork-join": fork_join,
    "out-tree": tree,
    "in-tree": in_tree,
    "gauss": gauss,
    "fft": fft,
    "cholesky": cholesky,
}
