"""List the producers and consumers of a graph as arrays.

Values and tasks are numbers here. The module knows no device, no cost and no program.
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
    """Ragged tables by task, each a pair (CSR): the offsets of rows, and the entries of all rows.

    >>> graph = Graph()
    >>> graph.output(y=-graph.input("x").abs())
    >>> [column.tolist() for column in flow(graph)[:4]]
    [[0, 1, 2], [0, 1], [0, 1, 2], [1, 2]]
    """

    reads_at: Ints
    reads: Ints  # values
    makes_at: Ints
    makes: Ints  # values that are used
    after_at: Ints
    after: Ints  # tasks on which it depends by order alone
    depends_at: Ints
    depends: Ints  # all tasks on which it depends


def flow(graph: Graph) -> Flow:
    """Return the flow of a graph; it is cached, and computed again after the graph has grown."""
    size = len(graph.tasks), len(graph.outputs)
    if graph.cached_flow is None or graph.cached_flow[0] != size:
        graph.cached_flow = size, _flow(graph)
    return graph.cached_flow[1]


def _flow(graph: Graph) -> Flow:
    tasks = graph.tasks
    values = graph.values
    made = [v.index for v in values if v.producer is not None and graph.is_used(v.index)]
    makers = np.array([values[index].producer for index in made], np.int64)
    reads_at = offsets([len(task.reads) for task in tasks])
    reads = chain.from_iterable(chain.from_iterable([task.reads for task in tasks]))
    versioned = np.fromiter(reads, np.int64, 2 * reads_at[-1])  # value, version, value, ...
    depends_at = offsets([len(task.dependencies) for task in tasks])
    depends = list(chain.from_iterable(chain.from_iterable([task.dependencies for task in tasks])))
    before = np.array(depends[::2], np.int64)
    by_order = np.array([kind == "order" for kind in depends[1::2]], bool)
    return Flow(
        reads_at,
        versioned[::2].copy(),
        starts(makers, len(tasks)),
        np.array(made, np.int64),
        starts(rows_of(depends_at)[by_order], len(tasks)),
        before[by_order],
        depends_at,
        before,
    )


def offsets(lengths: Sequence[int] | Ints) -> Ints:
    """Return the offsets of rows, given their lengths."""
    at = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=at[1:])
    return at


def starts(rows: Ints, count: int) -> Ints:
    """Return the offsets of ``count`` rows, given the row number of each entry."""
    return offsets(np.bincount(rows, minlength=count))


def ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return the offsets of rows, and the entries of all rows."""
    at = offsets(list(map(len, rows)))
    return at, np.fromiter(chain.from_iterable(rows), np.int64, at[-1])


def grouped(key: Ints, item: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the items of each key below ``count`` as a ragged table."""
    return starts(key, count), item[np.argsort(key, kind="stable")]


def rows_of(at: Ints) -> Ints:
    """Return the row of each entry, given the offsets of rows."""
    return np.repeat(np.arange(len(at) - 1), np.diff(at))
