"""Start a graph of the same class as another, without its tasks and values."""

from __future__ import annotations

import copy

from autosched.graph.graph import Graph

__all__ = ["emptied"]


def emptied(graph: Graph) -> Graph:
    """Return a graph of the same class without tasks and values, with the same frames."""
    new = copy.copy(graph)
    Graph.__init__(new, graph.name, generators=graph.builder.generators)
    new.builder.storages.frames = graph.builder.storages.frames
    return new
