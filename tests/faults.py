"""Inject faults into a task of a graph, which raises, is late, or returns a wrong result.

Only its function is changed: the tasks and their placement remain the same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from autosched._lib.tree import transform
from autosched.graph.graph import Graph


def inject(
    graph: Graph,
    task: str,
    fault: str,
    *,
    seconds: float = 1.0,
    when: Callable[[], Any] = lambda: True,
) -> Graph:
    """Return a pinned copy of a graph in which a task has one of ``FAULTS``.

    It occurs whenever ``when()``, called at each call of the task, is true; a delay is of ``seconds``.
    """
    faulty = graph.snapshot()
    old = faulty.task(task)
    intact = old.fn
    assert intact is not None

    def fn(*args: Any, **kwargs: Any) -> Any:
        if not when():
            return intact(*args, **kwargs)
        return FAULTS[fault](lambda: intact(*args, **kwargs), seconds)

    faulty.tasks[old.index] = new = dataclasses.replace(old, fn=fn)
    if faulty.names.get(old.name) is old:
        faulty.names[old.name] = new
    return faulty


def _raise(call: Callable[[], Any], seconds: float) -> Any:
    raise RuntimeError("injected")


def _delay(call: Callable[[], Any], seconds: float) -> Any:
    time.sleep(seconds)
    return call()


def _out_of_memory(call: Callable[[], Any], seconds: float) -> Any:
    raise torch.OutOfMemoryError("injected")


def _shape(call: Callable[[], Any], seconds: float) -> Any:
    """Return tensors that are one longer in each dimension."""
    return transform(lambda leaf: leaf.new_zeros([size + 1 for size in leaf.shape]), call())


def _count(call: Callable[[], Any], seconds: float) -> Any:
    """Return one result too few."""
    result = call()
    return dict(list(result.items())[:-1]) if isinstance(result, dict) else list(result)[:-1]


FAULTS: dict[str, Callable[..., Any]] = {
    "raise": _raise,
    "delay": _delay,
    "out of memory": _out_of_memory,
    "shape": _shape,
    "count": _count,
}
