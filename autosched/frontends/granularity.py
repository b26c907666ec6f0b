"""Choose how many operators of a captured step become one task.

``"op"``: one operator. ``"module"``: a call of a module (its forward or its backward), or what an
optimizer does to it. ``"auto"``: a chain of operators, or small independent ones. A call of a
marked function is one task in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from autosched.coarsening.grouping import Granularity, by_mark, merge
from autosched.coarsening.merging import merged
from autosched.costs.costs import Costs
from autosched.costs.estimate import estimate
from autosched.graph.graph import Graph
from autosched.machine.machine import Device

__all__ = ["coarse"]

G = TypeVar("G", bound=Graph)


def coarse(
    graph: G,
    granularity: Granularity,
    examples: Mapping[str, Any],
    costs: Costs | None = None,
    device: Device | None = None,
) -> G:
    """Return a graph of operators at a granularity.

    Costs are estimated from ``examples`` where they are not given.
    """
    marks = by_mark(graph)
    graph = merged(graph, marks) if marks else graph
    if granularity == "auto" and costs is None:
        costs = estimate(graph, examples).costs
    return merge(graph, granularity, costs=costs, device=device)
