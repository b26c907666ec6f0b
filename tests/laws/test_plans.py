"""Laws of plans: what more devices, an exact search, and advice may promise."""

from __future__ import annotations

import random
import sys

import networkx as nx
import pytest

import autosched as asc


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
    monkeypatch.setattr(sys.modules["autosched.policies.candidates"], "_SMALL", large)
    graph = tangled(seed, kinds)
    two, four = (
        asc.schedule(graph, asc.Machine.emulated(gpus=gpus, nbytes=nbytes)).makespan
        for gpus in (2, 4)
    )
    assert four <= two
