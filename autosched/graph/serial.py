"""Run the tasks of a graph one by one: the reference for schedules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autosched._lib.tree import transform
from autosched.errors import GraphError
from autosched.graph.task import Here, Task
from autosched.graph.value import Value

if TYPE_CHECKING:
    from autosched.graph.graph import Graph

__all__ = ["called_with", "no_grad", "run_serial"]


Around = Callable[[Task], contextlib.AbstractContextManager[Any]]


def run_serial(
    graph: Graph, args: Sequence[Any], inputs: dict[str, Any], around: Around | None = None
) -> dict[str, Any]:
    """Implement ``Graph.run_serial``; each task is called within ``around(task)``."""
    inputs, finish = graph.completed(args, inputs)
    data = graph.bind(inputs)
    with no_grad():
        for task in graph.tasks:
            if task.fn is None:
                raise GraphError(f"task {task.name!r} has no function: it can be planned, not run")
            positional, named = called_with(task, data)
            try:
                with contextlib.nullcontext() if around is None else around(task):
                    data.update(task.results(task.fn(*positional, **named)))
            except Exception as error:
                error.add_note(f"in task {task.name!r}, added at {task.source}")
                raise
    outputs = {label: data[index] for label, index in graph.outputs.items()}
    if "torch" in sys.modules:
        from autosched.graph.gradients import guarded

        outputs = guarded(graph, inputs, outputs)
    if finish is not None:
        finish(outputs)
    return outputs


def called_with(task: Task, data: Mapping[int, Any], device: Any = None) -> tuple[Any, Any]:
    """Return the arguments of a task, with ``data`` for values, by index.

    ``device`` replaces ``Here``, the placeholder for the device on which the task runs.
    """

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return data[leaf.index]
        return leaf if type(leaf) is not Here else leaf.usual if device is None else device

    args, kwargs = transform(change, (task.args, task.kwargs))
    return args, kwargs


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Disable autograd if torch is imported."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()
