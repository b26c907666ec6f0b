"""Declare devices and outputs in a graph, and bind what a run gives it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autosched._lib.allowed import is_name
from autosched.errors import GraphError, listed
from autosched.graph.value import Value

if TYPE_CHECKING:
    from autosched.graph.builder import GraphBuilder
    from autosched.graph.graph import Graph

__all__ = ["OnDevice", "bound", "declared"]


class OnDevice(contextlib.ContextDecorator):
    """Constrains what a ``with`` statement adds; without one it warns."""

    def __init__(self, builder: GraphBuilder, device: str):
        self._builder = builder
        self._device = device
        self._before: list[str | None] = []
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        self._before.append(self._builder.device)
        self._builder.device = self._device

    def __exit__(self, *_: object) -> None:
        self._builder.device = self._before.pop()

    def __del__(self) -> None:
        if not self._is_used:
            what = f"graph.on({self._device!r}) constrains nothing without with"
            warnings.warn(f"{what}; write: with graph.on({self._device!r}):", stacklevel=2)


def declared(graph: Graph, values: Iterable[Any], named: Mapping[str, Any]) -> dict[str, int]:
    """Return outputs to be added to a graph: the value (index) of each name."""
    found: dict[str, int] = {}
    for label, item in (*((None, value) for value in values), *named.items()):
        if not isinstance(item, Value):
            hint = "; write graph.output(*values)" if isinstance(item, (list, tuple)) else ""
            hint = "; write graph.output(**values)" if isinstance(item, dict) else hint
            what = f"an output must be a Value of graph {graph.name!r}, got {item!r}"
            raise GraphError(what + hint)
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
    what = [f"misses input {name!r}" for name in names if name not in inputs][:1]
    what += [f"was given {name!r}, which is no input" for name in inputs if name not in names][:1]
    if what:
        its = f"its inputs are {listed(names)}"
        raise GraphError(f"graph {graph.name!r} {' and '.join(what)}; {its}")
    given = {**inputs, **{name: inputs[source] for name, source in graph.kept.items()}}
    return {v.index: given.get(v.name, v.tensor) for v in graph.sources}
