"""Inject faults into a task of a graph.

The task raises, is late, runs out of memory, or returns a wrong result, on any backend. Only its
function is changed: the tasks and their placement remain the same.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from autosched._lib.tree import flatten, transform
from autosched.errors import GraphError, listed
from autosched.graph.graph import Graph, Task, Value

__all__ = ["FAULTS", "inject"]


def inject(
    graph: Graph,
    task: str | int,
    fault: str,
    *,
    seconds: float = 1.0,
    when: Callable[[], Any] = lambda: True,
) -> Graph:
    """Return a pinned copy of a graph in which a task (its name or index) has a fault.

    ``"raise"`` and ``"out of memory"`` raise instead of the task's work, ``"delay"`` sleeps
    ``seconds`` before it; ``"shape"`` returns tensors one longer in each dimension, ``"count"`` one
    result too few. The fault occurs whenever ``when()``, called at each call of the task, is true.
    Raises GraphError for an unknown task or fault.

    >>> graph = Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="a"))
    >>> inject(graph, "a", "raise").run_serial(x=-1)
    Traceback (most recent call last):
    RuntimeError: injected
    in task 'a', added at ...
    """
    if fault not in FAULTS:
        raise GraphError(f"unknown fault {fault!r}; known are {listed(FAULTS)}")
    faulty = graph.pinned()
    old = _task(faulty, task)
    if old.fn is None:
        raise GraphError(f"task {old.name!r} has no function that could fail")
    if fault == "count" and (isinstance(old.result, Value) or len(old.result) == 0):
        raise GraphError(
            f"task {old.name!r} does not return several results, of which one could miss"
        )
    intact = old.fn
    broken = functools.partial(FAULTS[fault], intact, seconds)

    def fn(*args: Any, **kwargs: Any) -> Any:
        return broken(*args, **kwargs) if when() else intact(*args, **kwargs)

    faulty.tasks[old.index] = new = dataclasses.replace(old, fn=fn)
    if faulty.names.get(old.name) is old:
        faulty.names[old.name] = new
    return faulty


def _task(graph: Graph, task: str | int) -> Task:
    if isinstance(task, str):
        return graph.task(task)
    if not 0 <= task < len(graph.tasks):
        raise GraphError(f"graph {graph.name!r} has no task {task}; it has {len(graph.tasks)}")
    return graph.tasks[task]


def _raise(fn: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def _delay(fn: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    time.sleep(seconds)
    return fn(*args, **kwargs)


def _out_of_memory(fn: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("injected")


def _shape(fn: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    if not any(hasattr(leaf, "new_zeros") for leaf in flatten(result)):
        raise TypeError(f"a {type(result).__name__} has no shape that could be wrong")

    def longer(leaf: Any) -> Any:
        if not hasattr(leaf, "new_zeros"):
            return leaf
        return leaf.new_zeros([size + 1 for size in leaf.shape])

    return transform(longer, result)


def _count(fn: Callable[..., Any], seconds: float, /, *args: Any, **kwargs: Any) -> Any:
    result = fn(*args, **kwargs)
    return dict(list(result.items())[:-1]) if isinstance(result, dict) else list(result)[:-1]


FAULTS: dict[str, Callable[..., Any]] = {
    "raise": _raise,
    "delay": _delay,
    "out of memory": _out_of_memory,
    "shape": _shape,
    "count": _count,
}
