"""Declare outputs of a graph, and bind what a run gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autosched._lib.allowed import is_name
from autosched.errors import GraphError, listed
from autosched.graph.value import Value

if TYPE_CHECKING:
    from autosched.graph.graph import Graph

__all__ = ["bound", "declared"]


def declared(graph: Graph, values: Iterable[Any], named: Mapping[str, Any]) -> dict[str, int]:
    """Return outputs to be added to a graph: the value (index) of each name."""
    found: dict[str, int] = {}
    for label, item in (*((None, value) for value in values), *named.items()):
        if not isinstance(item, Value):
            raise GraphError(f"an output must be a Value of graph {graph.name!r}, got {item!r}")
        name = item.name if label is None else label
        if not is_name(name):
            raise GraphError(
                f"the name of an output must be a string without spaces and '@', got {name!r}"
            )
        if name in graph.outputs or name in found:
            so_far = listed([*graph.outputs, *found])
            raise GraphError(f"output {name!r} is declared twice; outputs so far: {so_far}")
        found[name] = graph.builder.check_own(item).index
    return found


def bound(graph: Graph, inputs: Mapping[str, Any]) -> dict[int, Any]:
    """Implement ``Graph.bind``."""
    names = graph.input_names
    if (name := min({*names} ^ inputs.keys(), key=str, default=None)) is not None:
        what = "misses input {!r}" if name in names else "was given {!r}, which is no input"
        what = f"{what.format(name)}; its inputs are {listed(names)}"
        raise GraphError(f"graph {graph.name!r} {what}")
    given = {**inputs, **{name: inputs[source] for name, source in graph.kept.items()}}
    return {v.index: given.get(v.name, v.tensor) for v in graph.sources}
