"""Divide stages into parts that wait for different stages.

Of two towers, the forward of the second needs nothing from the stage of the first; only the task
that joins them does. Such a stage is cut where both parts are long enough for tasks of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autosched import Graph

__all__ = ["branches"]

_MIN_SHARE = 0.1  # of a stage's forward or backward, for at least two parts


def branches(
    graph: Graph, stage: Mapping[str, int], backward: Set[int], seconds: Mapping[str, float]
) -> dict[str, int]:
    """Return the part, from 0, of its stage's forward or backward for each task, by name.

    Forward tasks are in one part if they wait for the same other stages; backward tasks, if the
    same stages wait for them. So parts depend on each other in their order, and never in a cycle.
    """
    linked = _linked_stages(graph, stage, backward)
    groups: dict[tuple[int, bool], dict[frozenset[int], list[str]]] = {}
    for task in graph.tasks:
        if task.name in stage:
            group = groups.setdefault((stage[task.name], task.index in backward), {})
            group.setdefault(linked[task.index], []).append(task.name)
    found: dict[str, int] = {}
    for (_, is_backward), parts in groups.items():
        sizes = sorted(sum(seconds[name] for name in names) for names in parts.values())
        is_cut = len(sizes) > 1 and sizes[-2] >= _MIN_SHARE * sum(sizes)
        ordered = sorted(parts, key=len, reverse=is_backward)
        for number, stages in enumerate(ordered):
            found.update((name, number if is_cut else 0) for name in parts[stages])
    return found


def _linked_stages(
    graph: Graph, stage: Mapping[str, int], backward: Set[int]
) -> list[frozenset[int]]:
    """Return the other stages that a forward task waits for, or that wait for a backward task."""
    found: list[set[int]] = [set() for _ in graph.tasks]
    own = [{stage[task.name]} if task.name in stage else set() for task in graph.tasks]
    for task in graph.tasks:
        if task.index not in backward:
            for dependency in task.dependencies:
                found[task.index] |= found[dependency.task] | own[dependency.task]
    for task in reversed(graph.tasks):
        if task.index in backward:
            for user in graph.users[task.index]:
                found[task.index] |= found[user] | own[user]
    return [frozenset(stages - one) for stages, one in zip(found, own, strict=True)]
