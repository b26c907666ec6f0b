"""Levels: how far replicas can go through a pass before they must exchange something, and what.

Knows graphs, and which operators stand for an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autosched import Graph
from autosched.parallel.norms import EXCHANGES

__all__ = ["Level", "level_of", "levels_of"]

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Level:
    """The tasks of a level, and the exchanges behind them by operator: the names of (what is given, what returned)."""

    tasks: tuple[str, ...]
    exchanges: Mapping[Operator, tuple[tuple[str, str], ...]]

    @property
    def exchanged(self) -> dict[Operator, int]:
        """How many exchanges there are by operator."""
        return {operator: len(pairs) for operator, pairs in self.exchanges.items()}


def level_of(graph: Graph) -> list[int]:
    """Return by task how many exchanges lie before it, one behind the other."""
    found: list[int] = []
    for task in graph.tasks:
        before = (found[d.task] + (graph.tasks[d.task].fn in EXCHANGES) for d in task.dependencies)
        found.append(max(before, default=0))
    return found


def levels_of(graph: Graph) -> tuple[Level, ...]:
    """Return the levels of a graph."""
    number = level_of(graph)
    tasks: list[list[str]] = [[] for _ in range(max(number, default=0) + 1)]
    exchanges: list[dict[Operator, list[tuple[str, str]]]] = [{} for _ in tasks]
    for task, level in zip(graph.tasks, number, strict=True):
        if task.fn is not None and task.fn in EXCHANGES:
            ((given, _),), ((made, _),) = task.reads, task.outputs
            names = graph.values[given].name, graph.values[made].name
            exchanges[level].setdefault(task.fn, []).append(names)
        else:
            tasks[level].append(task.name)
    return tuple(
        Level(tuple(names), {fn: tuple(pairs) for fn, pairs in found.items()})
        for names, found in zip(tasks, exchanges, strict=True)
    )
