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
    sources = graph.sources
    names = {v.name for v in sources if v.tensor is None}
    if names != inputs.keys():
        name = min(names ^ inputs.keys(), key=str)
        what = f"misses input {name!r}"
        if name not in names:
            what = f"was given {name!r}, which is no input"
        known = listed(graph.input_names)
        raise GraphError(f"graph {graph.name!r} {what}; its inputs are {known}")
    return {v.index: inputs[v.name] if v.tensor is None else v.tensor for v in sources}
