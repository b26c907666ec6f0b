"""Divide a pass into levels between its collectives.

A collective of a level needs all those of earlier levels. Backward tasks are delayed to the level
that needs their results, which would otherwise be held in memory for all levels between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from autosched import Graph
from autosched.parallel.sync_batch_norm import COLLECTIVES

__all__ = ["Level", "level_of", "levels_of"]

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Level:
    """The tasks of a level, and the collectives after them.

    ``collectives`` has for each operator the argument of each result, by name.
    """

    tasks: tuple[str, ...]
    collectives: Mapping[Operator, Mapping[str, str]]


def level_of(graph: Graph, delayed: Set[int] = frozenset()) -> list[int]:
    """Return, for each task, the number of successive collectives before it.

    Tasks in ``delayed`` (by index) get the level of their first successor.
    """
    found: list[int] = []
    for task in graph.tasks:
        before = (d.task for d in task.dependencies)
        levels = (found[i] + (graph.tasks[i].fn in COLLECTIVES) for i in before)
        found.append(max(levels, default=0))
    for i in sorted(delayed, reverse=True):
        if graph.tasks[i].fn not in COLLECTIVES:
            found[i] = min((found[user] for user in graph.users[i]), default=found[i])
    return found


def levels_of(graph: Graph) -> tuple[Level, ...]:
    """Return the levels of a graph."""
    number = level_of(graph)
    tasks: list[list[str]] = [[] for _ in range(max(number, default=0) + 1)]
    collectives: list[dict[Operator, dict[str, str]]] = [{} for _ in tasks]
    for task, level in zip(graph.tasks, number, strict=True):
        if task.fn is not None and task.fn in COLLECTIVES:
            ((argument, _),), ((result, _),) = task.reads, task.outputs
            names = collectives[level].setdefault(task.fn, {})
            names[graph.values[result].name] = graph.values[argument].name
        else:
            tasks[level].append(task.name)
    ordered = [{fn: dict(sorted(n.items())) for fn, n in of.items()} for of in collectives]
    return tuple(Level(tuple(names), of) for names, of in zip(tasks, ordered, strict=True))
