"""Laws of plans: what more devices, an exact search, and advice may promise."""

from __future__ import annotations

import random
import sys
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES, search
from autosched.policies.candidates import of_problem

SECONDS = st.sampled_from([0.0, 1e-3, 4e-3, 8e-3])
NBYTES = st.sampled_from([0.0, 1e3, 1e6, 1e8])


@st.composite
def plain_graphs(draw: st.DrawFn, devices: tuple[str, ...] = ()) -> asc.Graph:
    """Draw a graph of tasks that read inputs and results, write inputs, and are bound to ``devices``, or not."""
    graph = asc.Graph()
    values = [graph.input(name, nbytes=draw(NBYTES)) for name in ("x", "y")]
    for i in range(draw(st.integers(1, 8))):
        read, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        facts: dict[str, Any] = {"seconds": draw(SECONDS), "name": f"t{i}"}
        if devices and draw(st.booleans()):
            facts["on"] = draw(st.sampled_from(devices))
        if draw(st.integers(0, 3)):
            values.append(graph.add(max, read, other, nbytes=draw(NBYTES), **facts))
        else:
            written = draw(st.sampled_from(values[:2]))
            graph.add(max, written, read, writes=[written], outputs=(), **facts)
    graph.output(*draw(st.lists(st.sampled_from(values[2:] or values), max_size=2, unique_by=id)))
    return graph


def tangled(seed: int, kinds: bool) -> asc.Graph:
    """Return 60 tasks that read what a few before them make; some CPUs are slow, or all tasks take as long there."""
    source = random.Random(seed)
    dag = nx.DiGraph()
    for i in range(60):
        seconds = source.choice([1, 2, 5, 9]) * 1e-4
        on_cpu = {"cpu": seconds * source.choice([0.5, 1, 4, 10])} if kinds else {}
        each = dict.fromkeys(("cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"), seconds)
        dag.add_node(i, seconds=each | on_cpu, nbytes=source.choice([1e5, 1e6, 1e7]))
        for _ in range(source.choice([1, 2, 3])):
            if (before := i - 1 - source.randrange(4)) >= 0:
                dag.add_edge(before, i)
    return asc.Graph.from_networkx(dag)


@pytest.mark.parametrize("large", [2_000, 0])  # from so many tasks on, graphs are large
@pytest.mark.parametrize(
    ("seed", "kinds", "nbytes"), [(2, False, 1e12), (3, True, 1e12), (9, True, 3e7)]
)
def test_more_devices_are_never_slower(monkeypatch, large, seed, kinds, nbytes):
    for module in ("candidates", "local_search.search", "local_search.portfolio"):
        monkeypatch.setattr(sys.modules[f"autosched.policies.{module}"], "LARGE", large)
    graph = tangled(seed, kinds)
    two, four = (
        asc.schedule(graph, asc.Machine.emulated(gpus=gpus, nbytes=nbytes)) for gpus in (2, 4)
    )
    assert four.makespan <= two.makespan


def test_what_bounds_plans_for_fewer_devices_does_not_bound_others():
    graph = asc.Graph()
    for _ in range(6):
        graph.add(abs, 1, seconds=1.0)
    policy = search(moves=1)
    one, two = (asc.Problem(graph, asc.Machine.emulated(gpus)) for gpus in (1, 2))
    (elsewhere,) = of_problem(one, [policy])
    assert policy(one).bound > max(asc.bounds(two).values())
    assert elsewhere(two).bound == 0


@settings(max_examples=10)
@given(plain_graphs(("cpu", "cuda:0")), st.sampled_from([None, "cpu", "cuda:1"]))
def test_no_policy_is_better_than_exact(graph: asc.Graph, wanted: str | None) -> None:
    pytest.importorskip("ortools")
    machine = asc.Machine.emulated(gpus=2)
    exact = asc.schedule(graph, machine, policy="exact", outputs=wanted)
    for policy in ("auto", *POLICIES):
        other = asc.schedule(graph, machine, policy=policy, outputs=wanted)
        assert exact.makespan <= other.makespan * (1 + 1e-9), policy
        assert exact.lower_bound <= other.makespan * (1 + 1e-9), policy
