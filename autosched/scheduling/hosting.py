"""Bind tasks without tensor arguments to the host by default.

A function that reads a list, a text or a file gains nothing on an accelerator. A task that creates
tensors on its own device is marked by ``Here`` and is not bound, and neither is a task for which
the user gave costs. Knows no machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autosched._lib.tree import flatten
from autosched.graph.graph import HOST, Graph, Here, Task, Value

__all__ = ["put_on_host"]


def put_on_host(graph: Graph, examples: Mapping[str, Any] | None) -> None:
    """Bind tasks without tensor arguments to the host, unless they are constrained already.

    ``examples`` are known inputs by name; an input that is not among them counts as a tensor. The
    graph must be the schedule's own.

    >>> graph = Graph()
    >>> words, x = graph.inputs("words", "x")
    >>> graph.output(graph.add(" ".join, words, name="join"), graph.add(abs, x, name="abs"))
    >>> pinned = graph.pinned()
    >>> put_on_host(pinned, {"words": ["a", "b"]})
    >>> pinned.task("join").device, pinned.task("abs").device
    ('host', None)
    """
    no_tensors = {name for name, item in (examples or {}).items() if not _has_tensor(item)}
    for task in graph.tasks:
        sources = (graph.values[use.value] for use in task.reads)
        if _is_unconstrained(task) and all(_is_among(value, no_tensors) for value in sources):
            bound = dataclasses.replace(task, device=HOST)
            graph.tasks[task.index] = bound
            if graph.names[task.name] is task:
                graph.names[task.name] = bound


def _is_unconstrained(task: Task) -> bool:
    """Whether a task calls a function, and neither the task nor the user constrains its device."""
    if task.fn is None or task.composite is not None or task.view:
        return False
    if task.device is not None or task.seconds is not None:
        return False
    return not any(isinstance(leaf, Here) for leaf in flatten((task.args, task.kwargs)))


def _is_among(value: Value, names: set[str]) -> bool:
    """Whether a value is an input with one of these names."""
    return value.producer is None and value.tensor is None and value.name in names


def _has_tensor(item: Any) -> bool:
    return any(hasattr(leaf, "data_ptr") for leaf in flatten(item))
