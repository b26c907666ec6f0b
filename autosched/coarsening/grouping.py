"""Choose groups of tasks to merge, by module or by mark.

Merging saves no calls: a thread runs the operators of a merged task one by one, as it does those of
tasks. The functions return names of groups; ``merge`` also applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from autosched.coarsening.merging import common_origin, merged
from autosched.errors import GraphError
from autosched.graph.graph import Graph
from autosched.graph.task import Task

Granularity = Literal["op", "module"]
G = TypeVar("G", bound=Graph)


def merge(
    graph: G, groups: Granularity | Mapping[str, str], bound: Mapping[str, str] | None = None
) -> G:
    """Return the graph with each group of tasks as one task, and the same results.

    ``groups`` has the name of the group for tasks, by name. Or it is ``"module"``: one task for
    each call of a module, forward and backward. A group is split where merging it would create a
    cycle, and where its tasks are pinned to different devices; ``bound`` has devices of tasks that
    are to be pinned. Raises GraphError for unknown tasks and for other words.

    >>> graph = Graph("step")
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=(x @ w).relu())
    >>> [task.name for task in merge(graph, {"matmul": "layer", "relu": "layer"}).tasks]
    ['layer']
    """
    if not isinstance(groups, str):
        return merged(graph, groups, bound=bound)
    check_granularity(groups)
    return graph if groups == "op" else merged(graph, by_module(graph), bound=bound)


def check_granularity(word: object) -> None:
    """Raise GraphError unless ``word`` is a granularity."""
    if word not in ("op", "module"):
        raise GraphError(f"granularity must be 'op' or 'module', got {word!r}")


def by_module(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a module, each backward, and each module's optimizer step.

    Tasks without a module form one group per phase.
    """
    found: dict[tuple[str, int], list[Task]] = {}
    for task in graph.tasks:
        origin = task.origin
        if origin.phase and not origin.whole and not task.view:
            label = ".".join(filter(None, (origin.module, origin.phase)))
            found.setdefault((label, origin.call), []).append(task)
    return named((label, tasks) for (label, _), tasks in found.items())


def by_mark(graph: Graph) -> dict[str, str]:
    """Return a group for each call of a marked function, and for its backward."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in graph.tasks:
        origin = task.origin
        if origin.whole and not task.view:
            phase = origin.phase if origin.phase != "forward" else ""
            found.setdefault(
                (".".join(filter(None, (origin.whole, phase))), origin.call), []
            ).append(task)
    return named((label, tasks) for (label, _), tasks in found.items())


def named(groups: Iterable[tuple[str, Sequence[Task]]]) -> dict[str, str]:
    """Return the group of each task by name; groups with the same label are numbered."""
    counts: dict[str, int] = {}
    found: dict[str, str] = {}
    for label, tasks in groups:
        count = counts[label] = counts.get(label, -1) + 1
        found.update((task.name, f"{label}_{count}" if count else label) for task in tasks)
    return found


def label_of(tasks: Sequence[Task]) -> str:
    """Return a name for a group: its common module and phase, or its first task and a count."""
    origin = common_origin(tasks)
    if origin.module:
        return ".".join(filter(None, (origin.module, origin.phase)))
    return f"{tasks[0].name}+{len(tasks) - 1}"
