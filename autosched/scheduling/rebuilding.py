"""Rebuild a graph without functions from a saved schedule.

Such a graph can be inspected, and cannot run. The module parses the lines that ``saved.describe``
writes, and accepts the graph only if it is described by the same lines. The descriptions do not
contain which part of a tensor a view sees, so a graph whose hazards depend on that is refused:
loading its schedule requires the original graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
            f"it was saved by an older autosched, without the costs of its graph; {_HINT}"
        )
    try:
        graph = _graph(saved.graph, saved.facts)
    except (GraphError, LookupError, ValueError) as error:
        what = f"its graph cannot be built from its description ({error})"
        raise ScheduleError(f"{what}; {_HINT}") from error
    if describe(graph) != saved.graph:
        what = "its tasks share parts of memory that its description does not contain"
        raise ScheduleError(f"{what}; {_HINT}")
    return replace(saved, costs=_own_costs(saved.costs, graph)), graph


_HINT = "give the graph too, as in load(path, graph) or --graph module:function"


def _graph(lines: Sequence[str], facts: Facts) -> Graph:
    """Build a graph from the lines of its description."""
    graph = Graph(facts.name)
    for line in lines:
        kind, *names = line.partition("  ")[0].split(" ")
        if kind == "input":
            graph.input(*names)
        elif kind == "constant":
            graph.constant(_AbsentTensor(), *names)
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


class _AbsentTensor:
    """Placeholder for the tensor of a constant."""


def _add(graph: Graph, line: str, facts: Facts) -> None:
    parts = (part.split(" ") for part in line.split("  "))
    fields: Mapping[str, Sequence[str]] = {field: names for field, *names in parts}
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
    """Return the argument that a task's results share memory with."""
    roots = [graph.value(name).root for name in sharing]
    return next((value for value in reads if value.root in roots), None)


def _own_costs(costs: Costs, graph: Graph) -> Costs:
    """Return costs without those of parts of merged tasks."""
    tasks = {task.name for task in graph.tasks}
    values = {value.name for value in graph.values}
    return replace(
        costs,
        seconds={name: cost for name, cost in costs.seconds.items() if name in tasks},
        nbytes={name: cost for name, cost in costs.nbytes.items() if name in values},
        work={name: cost for name, cost in costs.work.items() if name in tasks},
    )
