"""Constraints on devices that name inputs and tasks of a graph by patterns, and those by default.

Also what a graph keeps together, as far as such constraints leave it. No graph is changed, and no
machine is known here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from autosched._lib.tree import flatten
from autosched.errors import GraphError, listed
from autosched.graph.graph import Graph
from autosched.graph.recorder import check_runs
from autosched.graph.task import HOST, Here, Task

Bond = tuple[int, ...]  # values (indices) that are kept together


def homes_of(graph: Graph, inputs: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the devices of inputs, given by patterns of names, or as one for all. Raises GraphError."""
    if isinstance(inputs, str):
        inputs = dict.fromkeys(graph.input_names, inputs)
    sources = [value.name for value in graph.sources]
    found = by_pattern(inputs or {}, sources, "inputs", "input", graph.input_names)
    return {name: check_runs(device) for name, device in found.items()}


def placed(graph: Graph, place: Mapping[str, str]) -> dict[str, str]:
    """Return the devices of tasks, given by patterns for the names of tasks or modules.

    The first pattern that matches counts. Tasks that the graph binds, and views, are left out.
    Raises GraphError for patterns without a match, and for names that are no device's.
    """
    found: dict[str, str] = {}
    for pattern, device in {pattern: check_runs(at) for pattern, at in place.items()}.items():
        tasks = [task for task in graph.tasks if isinstance(pattern, str) and _fits(task, pattern)]
        if not tasks:
            raise GraphError(f"pattern {pattern!r} in place= fits no task's name and no module")
        for task in tasks:
            if task.device is None and not task.view:
                found.setdefault(task.name, device)
    return found


def by_value(kept: Iterable[Bond]) -> dict[int, list[Bond]]:
    """Return the sets of values kept together that each value is in."""
    found: dict[int, list[Bond]] = {}
    for bond in kept:
        for index in bond:
            found.setdefault(index, []).append(bond)
    return found


def bonds(task: Task, kept: Mapping[int, Sequence[Bond]]) -> list[Bond]:
    """Return the sets of values kept together of which a task makes or writes a member.

    None for what it reads from a file: that is copied to where it is needed.
    """
    if task.reads_file or not kept:
        return []
    own = (kept.get(use.value, ()) for use in (*task.changes, *task.outputs))
    return list(dict.fromkeys(chain.from_iterable(own)))


def released(graph: Graph, place: Mapping[str, str | None]) -> list[Bond]:
    """Return what is kept together, but gradients whose updates ``place`` binds elsewhere.

    By default an update runs where its gradient is computed, but it may also be on the host.
    """
    device = {task.name: place.get(task.name, task.device) for task in graph.tasks}
    kept = by_value(graph.kept_together)
    bound: dict[Bond, set[str | None]] = {}
    for task in graph.tasks if kept else ():
        if device[task.name] and task.origin.phase == "optimizer":
            for bond in bonds(task, kept):
                bound.setdefault(bond, set()).add(device[task.name])

    def is_apart(value: int, devices: set[str | None]) -> bool:
        maker = graph.values[graph.values[value].root].producer
        task = None if maker is None else graph.tasks[maker]
        is_gradient = task is not None and task.origin.phase == "backward"
        return is_gradient and devices != {device[task.name] if task else None}

    return [
        tuple(v for v in bond if bond not in bound or not is_apart(v, bound[bond]))
        for bond in graph.kept_together
    ]


def _fits(task: Task, pattern: str) -> bool:
    """Whether a pattern is or matches the name of a task, of its module, or of one of its parts."""
    names = chain(*((part.name, part.origin.module) for part in task.with_parts()))
    return any(name == pattern or (name and fnmatch.fnmatch(name, pattern)) for name in names)


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


def hosted(
    graph: Graph, placed: Container[str], examples: Mapping[str, Any] | None
) -> dict[str, str]:
    """Return the tasks without tensor arguments, to be bound to the host, if they are not placed.

    ``examples`` are known inputs by name; an input that is not among them counts as a tensor.

    >>> graph = Graph()
    >>> words, x = graph.inputs("words", "x")
    >>> graph.output(graph.add(" ".join, words, name="join"), graph.add(abs, x, name="abs"))
    >>> hosted(graph, {}, {"words": ["a", "b"]})
    {'join': 'host'}
    """
    no_tensors = {
        name
        for name, item in (examples or {}).items()
        if not any(hasattr(leaf, "data_ptr") for leaf in flatten(item))
    }
    found = {}
    for task in graph.tasks:
        if task.name in placed or not _is_unconstrained(task):
            continue
        values = [graph.values[use.value] for use in task.reads]
        are_inputs = all(v.producer is None and v.tensor is None for v in values)
        if are_inputs and no_tensors.issuperset(v.name for v in values):
            found[task.name] = HOST
    return found


def _is_unconstrained(task: Task) -> bool:
    """Whether a task calls a function, and neither the task nor the user constrains its device."""
    if task.fn is None or task.composite is not None or task.view:
        return False
    if task.device is not None or task.seconds is not None:
        return False
    return not any(isinstance(leaf, Here) for leaf in flatten((task.args, task.kwargs)))
