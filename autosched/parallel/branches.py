"""Find tasks of a stage that are independent of other stages.

Stages follow each other, but their tasks form a graph: of two towers, the forward of the second
needs nothing from the stage of the first, and only the task that joins them does. Such a stage is
cut into parts, where each part is long enough for a task of its own. Knows stages and seconds, no
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autosched import Graph

__all__ = ["branches"]

_WORTH = 0.1  # least share of a stage's forward or backward for each of two parts


def branches(
    graph: Graph, stage: Mapping[str, int], backward: Set[int], seconds: Mapping[str, float]
) -> dict[str, int]:
    """Return the part of its stage, forward or backward, of each task that is not a view.

    By name, from 0.

    Forward tasks are in one part if they wait for the same other stages; backward tasks, if the
    same stages wait for them. So parts depend on each other in their order, and never in a cycle.
    """
    waits = _reached(graph, stage, backward)
    groups: dict[tuple[int, bool], dict[frozenset[int], list[int]]] = {}
    for task in graph.tasks:
        if task.name in stage:
            late = task.index in backward
            group = groups.setdefault((stage[task.name], late), {})
            group.setdefault(waits[task.index], []).append(task.index)
    found: dict[str, int] = {}
    for (_, late), parts in groups.items():
        sizes = sorted(sum(seconds[graph.tasks[i].name] for i in tasks) for tasks in parts.values())
        worth = len(sizes) > 1 and sizes[-2] >= _WORTH * sum(sizes)
        ordered = sorted(parts, key=lambda stages: -len(stages) if late else len(stages))
        for number, stages in enumerate(ordered):
            found.update((graph.tasks[i].name, number if worth else 0) for i in parts[stages])
    return found


def _reached(graph: Graph, stage: Mapping[str, int], backward: Set[int]) -> list[frozenset[int]]:
    """Return the other stages that each task waits for.

    For a backward task, those that wait for it.
    """
    found: list[set[int]] = [set() for _ in graph.tasks]
    own: list[set[int]] = [
        {stage[task.name]} if task.name in stage else set() for task in graph.tasks
    ]
    for task in graph.tasks:
        if task.index not in backward:
            for dependency in task.dependencies:
                found[task.index] |= found[dependency.task] | own[dependency.task]
    for task in reversed(graph.tasks):
        if task.index in backward:
            for user in graph.users[task.index]:
                found[task.index] |= found[user] | own[user]
    return [frozenset(stages - one) for stages, one in zip(found, own, strict=True)]
