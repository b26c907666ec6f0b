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
from autosched.graph.graph import HOST, Graph, Here, Task

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
    plain = {name for name, item in (examples or {}).items() if not _holds_tensor(item)}
    for task in graph.tasks:
        if _is_free(task) and all(_is_plain(graph, use.value, plain) for use in task.reads):
            graph.tasks[task.index] = placed = dataclasses.replace(task, device=HOST)
            if graph.names[task.name] is task:
                graph.names[task.name] = placed


def _is_free(task: Task) -> bool:
    """Whether a task calls a function, and neither the task nor the user constrains its device."""
    given = list(flatten((task.args, task.kwargs)))
    said = (
        task.device is not None
        or task.seconds is not None
        or any(isinstance(leaf, Here) for leaf in given)
    )
    return not said and task.fn is not None and task.composite is None and not task.view


def _is_plain(graph: Graph, value: int, plain: set[str]) -> bool:
    """Whether a value is an input that is known to contain no tensor."""
    known = graph.values[value]
    return known.producer is None and known.tensor is None and known.name in plain


def _holds_tensor(item: Any) -> bool:
    return any(hasattr(leaf, "data_ptr") for leaf in flatten(item))
