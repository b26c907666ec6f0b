"""Fix the devices of inputs and tasks in a copy of a graph that does not grow."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autosched.errors import GraphError, listed
from autosched.graph.recorder import check_runs
from autosched.graph.task import Task

if TYPE_CHECKING:
    from autosched.graph.graph import Graph


def pinned(graph: Graph, inputs: Mapping[str, str], place: Mapping[str, str]) -> Graph:
    """Implement ``Graph.pinned``."""
    twin = graph.snapshot()
    sources = {value.name: value for value in graph.sources}
    devices = by_pattern(inputs, sources, "inputs", "input", graph.input_names)
    for name, device in devices.items():
        moved = copy.copy(sources[name])
        moved.home = check_runs(device)
        twin.values[moved.index] = twin.names[name] = moved
    where = {pattern: check_runs(device) for pattern, device in place.items()}
    for pattern, device in where.items():
        found = [task for task in graph.tasks if fnmatch.filter(_names(task), pattern)]
        if not found:
            raise GraphError(f"pattern {pattern!r} in place= fits no task's name and no module")
        for task in found:
            if twin.tasks[task.index].device is None and not task.view:
                twin.tasks[task.index] = placed = dataclasses.replace(task, device=device)
                if twin.names[task.name] is task:
                    twin.names[task.name] = placed
    if where:
        release_gradients(twin, {task.name: task.device for task in twin.tasks if task.device})
    return twin


def release_gradients(graph: Graph, device: Mapping[str, str]) -> None:
    """Let gradients be apart from parameters and moments whose updates are bound elsewhere.

    By default an update runs where its gradient is computed, but it may also be on the host.
    ``device`` has that of bound tasks, by name.
    """
    bound: dict[tuple[int, ...], set[str | None]] = {}
    for task in graph.tasks if graph.kept_together else ():
        if task.name in device and task.origin.phase == "optimizer":
            for bond in graph.bonds(task):
                bound.setdefault(bond, set()).add(device[task.name])

    def is_apart(value: int, devices: set[str | None]) -> bool:
        maker = graph.values[graph.values[value].root].producer
        task = None if maker is None else graph.tasks[maker]
        is_gradient = task is not None and task.origin.phase == "backward"
        return is_gradient and devices != {device.get(task.name) if task else None}

    for bond, devices in bound.items():
        kept = tuple(index for index in bond if not is_apart(index, devices))
        graph.kept_together[graph.kept_together.index(bond)] = kept
        for index in bond:
            others = [other for other in graph.bonds_of[index] if other != bond]
            graph.bonds_of[index] = (*others, kept) if index in kept else tuple(others)


def _names(task: Task) -> Iterator[str]:
    """Yield the names that a pattern is matched with: the task's, its module's, and its parts'."""
    yield from filter(None, (task.name, task.origin.module))
    for part in task.parts:
        yield from _names(part)


def by_pattern(
    given: Mapping[str, Any],
    names: Collection[str],
    argument: str,
    what: str,
    shown: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return by name what is given by names or by shell patterns.

    A name precedes patterns, and earlier patterns precede later ones. Raises GraphError for a name
    or pattern without a match.

    >>> by_pattern({"w*": 0, "w2": 1}, ["x", "w1", "w2"], "inputs", "input")
    {'w2': 1, 'w1': 0}
    """
    found = {name: item for name, item in given.items() if name in names}
    for pattern, item in given.items():
        if pattern in names:
            continue
        matches = fnmatch.filter(names, pattern) if isinstance(pattern, str) else []
        if not matches:
            known = listed(names if shown is None else shown)
            raise GraphError(
                f"{argument}= names {pattern!r}, which is no {what}; {what}s are {known}"
            )
        for name in matches:
            found.setdefault(name, item)
    return found
