"""Divide a pass into levels between which replicas exchange values.

Knows graphs, and which operators stand for an exchange. A backward pass delays tasks whose results
are needed only at a later level; otherwise their results would be held in memory for all levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from autosched import Graph
from autosched.parallel.sync_batch_norm import EXCHANGES

__all__ = ["Level", "level_of", "levels_of"]

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Level:
    """The tasks of a level, and the exchanges after them: for each operator, the argument of each result, by name."""

    tasks: tuple[str, ...]
    exchanges: Mapping[Operator, Mapping[str, str]]


def level_of(graph: Graph, late: Set[int] = frozenset()) -> list[int]:
    """Return, for each task, the number of successive exchanges before it.

    Those ``late`` tasks (by index) whose results are needed only at a later level are delayed until
    then, because the results take memory.
    """
    found: list[int] = []
    for task in graph.tasks:
        before = (found[d.task] + (graph.tasks[d.task].fn in EXCHANGES) for d in task.dependencies)
        found.append(max(before, default=0))
    for i in sorted(late, reverse=True):
        if graph.tasks[i].fn not in EXCHANGES:
            found[i] = min((found[user] for user in graph.users[i]), default=found[i])
    return found


def levels_of(graph: Graph) -> tuple[Level, ...]:
    """Return the levels of a graph."""
    number = level_of(graph)
    tasks: list[list[str]] = [[] for _ in range(max(number, default=0) + 1)]
    exchanges: list[dict[Operator, dict[str, str]]] = [{} for _ in tasks]
    for task, level in zip(graph.tasks, number, strict=True):
        if task.fn is not None and task.fn in EXCHANGES:
            ((given, _),), ((made, _),) = task.reads, task.outputs
            exchanges[level].setdefault(task.fn, {})[graph.values[made].name] = graph.values[
                given
            ].name
        else:
            tasks[level].append(task.name)
    return tuple(
        Level(tuple(names), {fn: dict(sorted(pairs.items())) for fn, pairs in found.items()})
        for names, found in zip(tasks, exchanges, strict=True)
    )
