"""What the benchmark of planning takes for granted: its check refuses what breaks a rule, its graphs are as told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import autosched as asc

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planning"


@pytest.fixture(scope="module")
def bench():
    """The modules, by the names that they call each other by."""
    sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
    try:
        import _graphs
        import _instances
        import _shapes
        import peers
        import throughput
    finally:
        del sys.path[:2]
    return SimpleNamespace(
        graphs=_graphs, instances=_instances, shapes=_shapes, peers=peers, throughput=throughput
    )


@pytest.fixture
def chain(bench):
    """Two tasks, one behind the other; a copy takes 3 seconds."""
    return bench.instances.Instance("chain", [[1.0, 2.0], [2.0, 1.0]], [(0, 1, 3.0)])


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ((1, 3.9, 4.9), "comes at"),  # before its copy is there
        ((0, 0.5, 2.5), "comes at"),  # before what it reads is made
        ((1, 4.0, 4.5), "takes"),  # too short
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(bench, chain, second, why):
    placed = bench.instances.Placed
    with pytest.raises(ValueError, match=why):
        bench.instances.checked(chain, [placed(0, 0.0, 1.0), placed(*second)])


def test_a_planted_plan_is_optimal(bench):
    """Its makespan is a bound: no device is ever idle, and each task is where it is cheapest."""
    made = bench.graphs.planted(60, 4, 0.5, 0)
    work = sum(map(min, made.seconds)) / made.devices
    assert bench.instances.checked(made, made.plan) == made.best == pytest.approx(work)


def test_the_textbook_in_networkx_gives_what_papers_print(bench):
    plans = [(one, bench.peers.textbook_heft(one)) for one in bench.graphs.examples()]
    assert [bench.instances.checked(one, plan) for one, plan in plans] == [80.0, 133.0]


def test_our_schedules_keep_the_rules_of_the_classic_model(bench):
    """Different links, tasks that must share a device, and edges of different sizes from one task."""
    for one in (
        bench.graphs.related("gauss", 20, 3, 1.0, 0, even=False),
        bench.graphs.random_layered(30, 3, 1.0, 0),
    ):
        instance = bench.instances.Instance(
            one.name, one.seconds, one.edges, pace=one.pace, together=[(0, 3, 5)]
        )
        schedule = asc.schedule(instance.graph(), instance.machine(), policy="heft")
        plan = bench.instances.placed(instance, schedule)
        assert bench.instances.checked(instance, plan) == pytest.approx(schedule.makespan)


def test_the_load_of_a_split_counts_a_copy_to_the_host_once_and_from_there_to_each_device(bench):
    seconds = [[9.0, 1.0, 1.0], [9.0, 2.0, 2.0], [4.0, 9.0, 9.0], [9.0, 3.0, 3.0]]
    edges = [(0, 1, 10.0), (0, 2, 10.0), (0, 3, 10.0)]
    names = ["cpu", "cuda:0", "cuda:1"]
    fork = bench.instances.Instance("fork", seconds, edges, names=names)
    device = dict(
        zip(["t0", "t1", "t2", "t3"], [names[1], names[2], names[0], names[2]], strict=True)
    )
    assert bench.throughput.load(fork, asc.Placement(device, tuple(device))) == 2 + 3 + 10
