"""Orders of least memory: compared with all orders of small graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import networkx as nx
import pytest

import autosched as asc
from autosched.policies import heft, least_memory, single


def random_graph(seed: int, count: int) -> nx.DiGraph:
    source = random.Random(seed)
    dag = nx.DiGraph()
    for i in range(count):
        dag.add_node(i, nbytes=source.choice([1, 2, 5, 8, 9]), seconds=1e-3)
        dag.add_edges_from((j, i) for j in range(i) if source.random() < 2 / count)
    return dag


def peak_of(dag: nx.DiGraph, order: Sequence[int]) -> int:
    """Return the most that is held at once: a result until its last reader has ended, or for good."""
    held, most, done = set[int](), 0, set[int]()
    for node in order:
        held.add(node)
        done.add(node)
        most = max(most, sum(dag.nodes[other]["nbytes"] for other in held))
        held = {n for n in held if not dag.out_degree(n) or not set(dag.successors(n)) <= done}
    return most


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_a_small_graph_needs_less(seed: int) -> None:
    dag = random_graph(seed, 8)
    least = min(peak_of(dag, order) for order in nx.all_topological_sorts(dag))
    graph = asc.Graph.from_networkx(dag)
    machine = asc.Machine([asc.Device("cuda:0")])
    assert asc.schedule(graph, machine, policy=least_memory).peak_bytes["cuda:0"] == least
    # Where no more fits, this order is found.
    machine = asc.Machine([asc.Device("cuda:0", nbytes=least)])
    assert asc.schedule(graph, machine).peak_bytes["cuda:0"] <= least


def test_a_large_graph_needs_no_more_than_in_its_own_order() -> None:
    dag = random_graph(0, 400)
    graph, machine = asc.Graph.from_networkx(dag), asc.Machine([asc.Device("cuda:0")])
    peaks = [
        asc.schedule(graph, machine, policy=policy).peak_bytes["cuda:0"]
        for policy in (least_memory, single, heft)
    ]
    assert peaks[0] == min(peaks)


def test_inputs_are_held_from_their_first_reader_to_their_last() -> None:
    graph = asc.Graph()
    large, small = (graph.input(name, nbytes=nbytes) for name, nbytes in (("l", 9), ("s", 1)))
    first = graph.add(max, large, small, name="first", nbytes=1)
    graph.add(abs, small, name="second", nbytes=5)
    last = graph.add(max, large, first, name="last", nbytes=1)
    graph.output(last, graph.value("second"))
    machine = asc.Machine.emulated(gpus=1)
    cuda = dict.fromkeys(("first", "second", "last"), "cuda:0")
    plan = asc.schedule(graph, machine, policy=least_memory, place=cuda)
    assert plan.placement.order == ("first", "last", "second")


def test_an_empty_graph_has_an_empty_order() -> None:
    assert least_memory(asc.Problem(asc.Graph(), asc.Machine.emulated(gpus=1))).order == ()
