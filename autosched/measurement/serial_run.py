"""Run a graph serially with its tasks on one device.

The caller decides how tasks are called. A task that must run on another device does so, on copies,
and what it writes is copied back. Inputs and constants are copied when they are first needed, so
the caller's remain unchanged. Values are dropped after their last use, so little memory is held.
Knows no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autosched._lib.tree import flatten, transform
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph, Task, Value, called_with
from autosched.graph.serial import no_grad
from autosched.runtime.backends.host import as_parameter, copy_in_host_memory

__all__ = ["Call", "run_serially"]

Place = Callable[[Task], torch.device]
Call = Callable[[Task, Any, Any, torch.device], Any]  # task, args, kwargs, device -> result


def run_serially(
    graph: Graph, inputs: Mapping[str, Any], device: torch.device, place: Place, call: Call
) -> dict[str, float]:
    """Run the tasks one by one, and return the bytes of values.

    Values are on ``device``, and tasks run where ``place`` says. Raises GraphError for missing or
    unknown inputs, ScheduleError for a task without a function, and what a task raises, with a note
    that names it.
    """
    data = graph.bind(inputs)
    given = set(data)
    last = _last_uses(graph)
    nbytes: dict[str, float] = {}
    with no_grad():
        for task in graph.tasks:
            for value in _arguments(task):
                if value in given:
                    given.remove(value)
                    data[value] = transform(lambda leaf: _copied(leaf, device), data[value])
                    _add_nbytes(graph.values[value], data[value], nbytes)
            results = _run(task, data, device if task.view else place(task), call)
            data.update(results)
            for value, made in results.items():
                _add_nbytes(graph.values[value], made, nbytes)
            for value in last.get(task.index, ()):
                data.pop(value, None)
    return nbytes


def _run(task: Task, data: Mapping[int, Any], where: torch.device, call: Call) -> dict[int, Any]:
    """Run a task; return its results by the index of their value."""
    if task.fn is None:
        raise ScheduleError(f"task {task.name!r} has no function: it can be planned, not measured")
    moved: list[tuple[Any, Any]] = []

    def bring(leaf: Any) -> Any:
        if task.view or not isinstance(leaf, torch.Tensor) or leaf.device == where:
            return leaf
        moved.append((leaf, as_parameter(leaf.detach().to(where), leaf)))
        return moved[-1][1]

    try:
        args, kwargs = transform(bring, called_with(task, data, where))
        returned = call(task, args, kwargs, where)
        results = dict(task.results(returned))
    except Exception as error:
        error.add_note(f"in task {task.name!r}, added at {task.source}")
        raise
    for here, there in moved if task.writes else ():
        here.copy_(there)
    # A task that returns its argument returns the original.
    own = {id(there): here for here, there in moved}
    return {
        index: transform(lambda leaf: own.get(id(leaf), leaf), result)
        for index, result in results.items()
    }


def _copied(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device == device == torch.device("cpu"):
        return copy_in_host_memory(leaf, None)
    return as_parameter(leaf.detach().to(device, copy=True), leaf)


def _arguments(task: Task) -> list[int]:
    """Return the values with whose data a task is called."""
    return [leaf.index for leaf in flatten((task.args, task.kwargs)) if isinstance(leaf, Value)]


def _last_uses(graph: Graph) -> dict[int, list[int]]:
    """Return for each task the values that no later task is called with."""
    last: dict[int, int] = {}
    for task in graph.tasks:
        results = (use.value for use in task.outputs)
        last |= dict.fromkeys((*results, *_arguments(task)), task.index)
    by_task: dict[int, list[int]] = {}
    for value, index in last.items():
        by_task.setdefault(index, []).append(value)
    return by_task


def _add_nbytes(value: Value, made: Any, nbytes: dict[str, float]) -> None:
    tensors = [leaf for leaf in flatten(made) if isinstance(leaf, torch.Tensor)]
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    if strided:
        nbytes[value.name] = float(sum(tensor.nbytes for tensor in strided))
