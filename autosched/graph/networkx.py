"""Convert graphs to and from networkx.

This module knows the attributes of nodes and edges, and nothing of devices or costs.
"""

from __future__ import annotations

import warnings
from typing import Any

import networkx

from autosched._lib.gc_pause import without_collecting
from autosched.errors import GraphError, listed
from autosched.graph.builder import check_costs
from autosched.graph.graph import Graph, Value

__all__ = ["from_networkx", "to_networkx"]


def to_networkx(graph: Graph) -> networkx.DiGraph[Any]:
    """Implement ``Graph.to_networkx``."""
    dag: networkx.DiGraph[Any] = networkx.DiGraph(name=graph.name)
    for task in graph.tasks:
        nbytes = graph.values[task.outputs[0].value].nbytes if task.outputs else None
        known = {"seconds": task.seconds, "nbytes": nbytes, "fn": task.fn, "device": task.device}
        dag.add_node(task.name, **{key: item for key, item in known.items() if item is not None})
        for dependency in task.dependencies:
            dag.add_edge(graph.tasks[dependency.task].name, task.name, kind=dependency.kind)
        for value in (graph.values[use.value] for use in task.reads):
            if value.producer is None:
                continue
            producer = graph.tasks[value.producer]
            if producer.fn is None and value.index != producer.outputs[0].value:
                dag.edges[producer.name, task.name]["nbytes"] = value.nbytes
    return dag


@without_collecting()
def from_networkx(dag: networkx.DiGraph[Any], name: str | None = None) -> Graph:
    """Implement ``Graph.from_networkx``."""
    if (
        not isinstance(dag, networkx.DiGraph)
        or dag.is_multigraph()
        or not networkx.is_directed_acyclic_graph(dag)
    ):
        raise GraphError(f"from_networkx needs a DiGraph without cycles, got {dag}")
    _warn_of_ignored(dag)
    graph = Graph(name or str(dag.name or "graph"))
    position = {node: i for i, node in enumerate(dag)}
    sent: dict[tuple[Any, Any], Value] = {}  # the value of an edge
    # Ties are broken by insertion order.
    for node in networkx.lexicographical_topological_sort(dag, key=position.__getitem__):
        _add_node(graph, dag, node, sent)
    return graph


def _warn_of_ignored(dag: networkx.DiGraph[Any]) -> None:
    for kind, items, known in (
        ("nodes", dag.nodes, ("seconds", "nbytes", "fn", "device")),
        ("edges", dag.edges, ("nbytes", "kind")),
    ):
        names = dict.fromkeys(str(name) for *_, facts in items.data() for name in facts)
        if others := [name for name in names if name not in known]:
            warnings.warn(
                f"from_networkx ignores {listed(others)} of {kind}; it knows {listed(known)}",
                stacklevel=5,
            )


def _add_node(
    graph: Graph, dag: networkx.DiGraph[Any], node: Any, sent: dict[tuple[Any, Any], Value]
) -> None:
    facts = dag.nodes[node]
    label = graph.fresh("".join(str(node).split()).replace("@", "_") or "task")
    parts = [n for n in dag.successors(node) if dag.edges[node, n].get("nbytes") is not None]
    if parts and facts.get("fn") is not None:
        raise GraphError(
            f"node {node!r} has a fn, so its edges cannot have nbytes of their own: a run copies "
            "all of it"
        )
    names = [
        label,
        *(graph.fresh("".join(f"{label}>{n}".split()).replace("@", "_")) for n in parts),
    ]
    data = {n: dag.edges[n, node].get("kind", "data") == "data" for n in dag.predecessors(node)}
    result = graph.builder.add_task(
        facts.get("fn"),
        tuple(sent[n, node] for n, is_data in data.items() if is_data),
        {},
        name=label,
        after=[sent[n, node] for n, is_data in data.items() if not is_data],
        on=facts.get("device"),
        outputs=tuple(names) if parts else None,
        seconds=facts.get("seconds"),
        nbytes=facts.get("nbytes"),
    )
    whole, *pieces = result if parts else (result,)
    sent.update({(node, n): whole for n in dag.successors(node)})
    for n, piece in zip(parts, pieces, strict=True):
        sent[node, n] = piece
        piece.nbytes = dag.edges[node, n]["nbytes"]
        check_costs(f"{node}->{n}", None, piece.nbytes)
    if dag.out_degree(node) == 0:
        graph.output(whole)
