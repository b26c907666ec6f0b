"""Including: the tasks of one graph written into another, as often as they are needed there.

What was an input becomes a value of the other graph; names get a prefix. Knows no device but as a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autosched.effects import MOVE, RESHAPE, effects_of
from autosched.errors import GraphError, listed
from autosched.parts import Looks, Part
from autosched.task import HOST, Seconds, Task
from autosched.tree import flatten, transform
from autosched.value import Value

if TYPE_CHECKING:
    from autosched.graph import Graph

__all__ = ["include", "repeat"]


def include(
    graph: Graph,
    other: Graph,
    inputs: Mapping[str, Value],
    prefix: str,
    on: str | Mapping[str, str] | None,
    seconds: Mapping[str, Seconds],
    nbytes: Mapping[str, int],
) -> dict[str, Value]:
    """Do what ``Graph.include`` says."""
    values = _sources(graph, other, inputs)
    _check_names(graph, other, prefix)
    parts = _Parts(graph._looks, other, values)
    for task in other.tasks:
        device = on.get(task.name) if isinstance(on, Mapping) else on
        made = [other.values[use.value] for use in task.outputs]
        results = repeat(
            graph, other, task, values, prefix + task.name,
            outputs=transform(lambda leaf: prefix + leaf.name, task.result),
            part=None if task.part is None or task.view else (task.part[0], parts.now(task.part[1], task.part[0])),
            parts=[parts.now(value.part, value.index) for value in made] if _aliases(made) else (),
            on=HOST if task.device == HOST else device or task.device,
            after=[prefix + other.tasks[d.task].name for d in task.dependencies if d.kind == "order"],
            seconds=seconds.get(task.name, task.seconds),
        )  # fmt: skip
        for value, twin in zip(made, flatten(results), strict=True):
            twin.nbytes = nbytes.get(value.name, value.nbytes)
            values[value.index] = twin
        _reshape(graph, task, values)
    if not isinstance(on, str):
        for bond in other.kept_together:
            graph.together(*[values[index] for index in bond])
    return {name: values[index] for name, index in other.outputs.items()}


def repeat(
    graph: Graph,
    old: Graph,
    task: Task,
    values: Mapping[int, Value],
    name: str,
    *,
    outputs: Any,
    part: tuple[int, Part] | None,
    parts: Iterable[Part],
    on: str | None,
    after: Iterable[str],
    seconds: Seconds | None,
) -> Any:
    """Add a task of an old graph to a graph, ``values`` for those of the old one; return its results."""
    args, kwargs = transform(
        lambda leaf: values[leaf.index] if isinstance(leaf, Value) else leaf, (task.args, task.kwargs)
    )
    return graph._add(
        task.fn, args, kwargs, name=name, outputs=outputs, writes=[values[use.value] for use in task.writes],
        aliases=_base(old, task, values), view=task.view, random=task.random,
        part=None if part is None else (values[part[0]].index, part[1]), parts=list(parts), on=on, seconds=seconds,
        after=after, origin=task.origin, composite=task.composite,
    )  # fmt: skip


def _base(old: Graph, task: Task, values: Mapping[int, Value]) -> Value | None:
    """Return the argument whose memory a result of a task shares, if one does."""
    made = [old.values[use.value] for use in task.outputs]
    if not _aliases(made):
        return None
    if task.view and task.part:
        return values[task.part[0]]
    roots = {value.root for value in made}
    return values[next(use.value for use in task.reads if old.values[use.value].root in roots)]


def _aliases(made: Iterable[Value]) -> bool:
    return any(value.root != value.index for value in made)


def _sources(graph: Graph, other: Graph, inputs: Mapping[str, Value]) -> dict[int, Value]:
    """Return what stands for each input and constant, by its index in the other graph."""
    names = other.input_names
    for name in dict.fromkeys([*names, *inputs]):
        if name not in names or name not in inputs:
            what = f"gives {name!r}, which is no input" if name in inputs else f"misses input {name!r}"
            raise GraphError(f"inputs= of include {what}; inputs of graph {other.name!r} are {listed(names)}")
        if not isinstance(inputs[name], Value):
            raise GraphError(f"input {name!r} must be given a Value of graph {graph.name!r}, got {inputs[name]!r}")
        graph._own(inputs[name])
    return {
        value.index: inputs[value.name] if value.tensor is None else graph.constant(value.tensor)
        for value in other.sources
    }


def _check_names(graph: Graph, other: Graph, prefix: str) -> None:
    """Raise GraphError for a name that is taken before anything is added."""
    for task in other.tasks:
        for name in dict.fromkeys([task.name, *(other.values[use.value].name for use in task.outputs)]):
            if prefix + name in graph.names:
                raise GraphError(
                    f"name {prefix + name!r} is already taken in graph {graph.name!r}; give another prefix"
                )


def _reshape(graph: Graph, task: Task, values: Mapping[int, Value]) -> None:
    """Forget how a value counts its elements where a task gives it another shape in place."""
    if task.fn is None or not task.writes or task.composite is not None:
        return
    name = effects_of(task.fn, task.args, task.kwargs).name
    written = values[task.writes[0].value]
    if name in MOVE:
        graph._check_moves(name, written)
    if name in RESHAPE:
        for member in graph.members(written.index):
            graph.values[member].part = graph._looks.anew(graph.values[member].part)


class _Parts:
    """Says which part of memory a value sees in its new graph, which has looks of its own."""

    def __init__(self, looks: Looks, other: Graph, values: Mapping[int, Value]):
        self.looks, self.other, self.values = looks, other, values
        self.known: dict[int, int] = {-1: -1}
        self.token = object()

    def now(self, part: Part, value: int) -> Part:
        """Return what a part of the memory behind a value (an index) is in the new graph."""
        root = self.other.values[self.other.values[value].root]
        base = self.values[root.index].part if root.index in self.values else None
        if base is None:
            return self.looks.root()
        if base.bounds or base.lead or base.tail != (base.look, 0):  # it is a part itself there
            return self.looks.opaque(base)
        if root.part.look >= 0:
            self.known[root.part.look] = base.look
        return part.counted(self._look)

    def _look(self, look: int) -> int:
        if look not in self.known:
            self.known[look] = self.looks.twin(self.token, look)
        return self.known[look]
