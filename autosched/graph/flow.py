"""List the dependencies of a graph as arrays, and ragged tables of numbers.

Tasks are numbers here. A ragged table is a pair of arrays (CSR): the offsets of rows, and the entries
of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched.graph.graph import Graph

Ints = NDArray[np.int64]


class Flow(NamedTuple):
    """All dependencies: a task, one before it, and whether it depends on that by order alone.

    >>> graph = Graph()
    >>> graph.output(y=-graph.input("x").abs())
    >>> [column.tolist() for column in flow(graph)]
    [[1], [0], [False]]
    """

    task: Ints
    before: Ints
    by_order: NDArray[np.bool_]


def flow(graph: Graph) -> Flow:
    """Return the flow of a graph; it is cached, and computed again after the graph has grown."""
    size = len(graph.tasks)
    if graph.cached_flow is None or graph.cached_flow[0] != size:
        found = [task.dependencies for task in graph.tasks]
        pairs = list(chain.from_iterable(chain.from_iterable(found)))  # task, kind, task, ...
        task = rows_of(offsets(list(map(len, found))))
        by_order = np.array([kind == "order" for kind in pairs[1::2]], bool)
        graph.cached_flow = size, Flow(task, np.array(pairs[::2], np.int64), by_order)
    return graph.cached_flow[1]


def offsets(lengths: Sequence[int] | Ints) -> Ints:
    """Return the offsets of rows, given their lengths."""
    at = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=at[1:])
    return at


def ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the offset of each row, and all numbers in one array."""
    at = offsets(list(map(len, rows)))
    return at, np.fromiter(chain.from_iterable(rows), np.int64, at[-1])


def starts(rows: Ints, count: int) -> Ints:
    """Return the offsets of ``count`` rows, given the sorted row number of each entry."""
    return offsets(np.bincount(rows, minlength=count))


def rows_of(at: Ints) -> Ints:
    """Return the row of each entry, given the offsets of rows."""
    return np.repeat(np.arange(len(at) - 1), np.diff(at))
