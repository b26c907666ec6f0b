"""Transfer the numbers that the host computes for an update as one list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autosched import Graph, Task, Value

__all__ = ["packed"]


def packed(graph: Graph, tensors: Collection[str]) -> Graph:
    """Return an update's graph with one list of numbers; separately, each would take a copy.

    Changes a graph of one task on the host and one on the device, which reads numbers, and no
    tensors, of the first; ``tensors`` are the names of values that are tensors.
    """
    # 1. Find the numbers that are sent to the device, and the host's other results.
    pair = {task.device == "host": task for task in graph.tasks}
    if len(graph.tasks) != 2 or len(pair) != 2:
        return graph
    host, device = pair[True], pair[False]
    results = [use.value for use in host.outputs]
    read = {use.value for use in device.reads}
    sent = [value for value in results if value in read]
    others = [value for value in results if value not in read]
    has_tensors = any(graph.values[value].name in tensors for value in sent)
    if len(sent) < 2 or has_tensors or device.kwargs or host.fn is None or device.fn is None:
        return graph
    new = Graph(graph.name)
    values = {
        v.index: new.input(v.name) if v.tensor is None else new.constant(v.tensor)
        for v in graph.sources
    }
    # 2. The host returns the numbers as a list, followed by its other results.
    positions = [results.index(value) for value in sent]
    rest = [results.index(value) for value in others]
    numbers, *made = new.record(
        _packing(host.fn, positions, rest), _mapped(host, values), host.kwargs, name=host.name,
        outputs=["numbers", *(graph.values[value].name for value in others)], on="host",
        writes=[values[use.value] for use in host.writes], origin=host.origin,
    )  # fmt: skip
    values.update(zip(others, made, strict=True))
    # 3. The device takes numbers from the list, and other arguments as before.
    where = [
        sent.index(arg.index) if isinstance(arg, Value) and arg.index in sent else None
        for arg in device.args
    ]
    made = new.record(
        _unpacking(device.fn, where), [numbers, *_mapped(device, values, sent)], {},
        name=device.name, outputs=[graph.values[use.value].name for use in device.outputs],
        writes=[values[use.value] for use in device.writes], origin=device.origin,
    )  # fmt: skip
    values.update(zip((use.value for use in device.outputs), made, strict=True))
    new.output(**{name: values[index] for name, index in graph.outputs.items()})
    return new


def _mapped(task: Task, values: Mapping[int, Value], omitted: Sequence[int] = ()) -> list[Any]:
    return [
        values[arg.index] if isinstance(arg, Value) else arg
        for arg in task.args
        if not isinstance(arg, Value) or arg.index not in omitted
    ]


def _packing(
    fn: Callable[..., Any], positions: Sequence[int], rest: Sequence[int]
) -> Callable[..., list[Any]]:
    """Return a function that returns some results of ``fn`` as a list, then the others."""

    def call(*args: Any) -> list[Any]:
        found = fn(*args)
        return [[found[i] for i in positions], *(found[i] for i in rest)]

    return call


def _unpacking(fn: Callable[..., Any], where: Sequence[int | None]) -> Callable[..., Any]:
    """Return a function that takes some arguments of ``fn`` from a list, its first argument."""

    def call(numbers: Sequence[Any], *args: Any) -> Any:
        rest = iter(args)
        found = fn(*(next(rest) if i is None else numbers[i] for i in where))
        return found if isinstance(found, tuple) else ([] if found is None else [found])

    return call
