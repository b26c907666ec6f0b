"""Rebuild a graph without functions from a saved schedule.

Such a graph can be inspected, and cannot run. The module parses the lines that ``saved.describe``
writes, and accepts the graph only if it is described by the same lines. The descriptions do not
contain which part of a tensor a view sees, so a graph whose hazards depend on that is refused:
loading its schedule requires the original graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autosched.costs.costs import Costs
from autosched.errors import GraphError, ScheduleError
from autosched.graph.graph import Graph
from autosched.graph.task import Origin
from autosched.graph.value import Value
from autosched.scheduling.saved import Facts, Saved, describe

__all__ = ["rebuilt"]


def rebuilt(saved: Saved) -> tuple[Saved, Graph]:
    """Return what was saved, and a graph that ``describe`` describes by the same lines.

    The costs are those of the graph's own tasks: for tasks that were merged, the sums. Raises
    ScheduleError where the description does not suffice.
    """
    if saved.facts is None:
        raise ScheduleError(
            f"it was saved by an older autosched, without what its graph costs; {_GIVE}"
        )
    try:
        graph = _graph(saved.graph, saved.facts)
    except (GraphError, LookupError, ValueError) as error:
        raise ScheduleError(
            f"its graph cannot be built of its description ({error}); {_GIVE}"
        ) from error
    if describe(graph) != saved.graph:
        raise ScheduleError(
            f"its tasks share memory in parts that its description does not tell; {_GIVE}"
        )
    return dataclasses.replace(saved, costs=_own(saved, graph)), graph


_GIVE = "give the graph too, as in load(path, graph) or --graph module:function"


def _graph(lines: Sequence[str], facts: Facts) -> Graph:
    """Build a graph from the lines of its description."""
    graph = Graph(facts.name)
    for line in lines:
        kind, *names = line.partition("  ")[0].split(" ")
        if kind == "input":
            graph.input(*names)
        elif kind == "constant":
            graph.constant(_Absent(), *names)
        elif kind == "task":
            _add(graph, line, facts)
        elif kind == "together":
            graph.together(*map(graph.value, names))
        elif kind == "output":
            value, _, label = names
            graph.output(**{label: graph.value(value)})
        else:
            raise ScheduleError(f"{line!r} describes nothing")
    for name, nbytes in facts.nbytes.items():
        graph.value(name).nbytes = nbytes  # type: ignore[assignment]
    return graph


class _Absent:
    """Placeholder for the tensor of a constant."""


def _add(graph: Graph, line: str, facts: Facts) -> None:
    words = [words.split(" ") for words in line.split("  ")]
    fields: Mapping[str, Sequence[str]] = {field: names for field, *names in words}
    (name,) = fields["task"]
    reads = [graph.value(item.partition("@")[0]) for item in fields.get("reads", ())]
    makes = tuple(fields.get("makes", ()))
    graph.builder.add_task(
        None,
        tuple(reads),
        {},
        name=name,
        writes=[graph.value(item) for item in fields.get("writes", ())],
        aliases=_base(graph, reads, fields.get("sharing", ())),
        outputs=makes[0] if len(makes) == 1 else makes,
        after=fields.get("order", ()),
        on=facts.devices.get(name),
        seconds=facts.seconds.get(name),
        view="view" in fields,
        origin=Origin(("unknown", 0)),  # not the code that loads it
    )


def _base(graph: Graph, reads: Sequence[Value], sharing: Sequence[str]) -> Value | None:
    """Return the argument that a task's results share memory with, given the value at the root."""
    roots = [graph.value(name).root for name in sharing]
    return next((value for value in reads if value.root in roots), None)


def _own(saved: Saved, graph: Graph) -> Costs:
    """Return the costs without those of parts of merged tasks."""
    tasks = {task.name for task in graph.tasks}
    values = {value.name for value in graph.values}

    def kept(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        return {name: cost for name, cost in table.items() if name in names}

    costs = saved.costs
    return dataclasses.replace(
        costs,
        seconds=kept(costs.seconds, tasks),
        nbytes=kept(costs.nbytes, values),
        work=kept(costs.work, tasks),
    )
