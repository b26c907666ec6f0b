"""Bounds: what each sees, by hand; that none is above what the best of all placements reaches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given

from autosched.bounds import bounds
from autosched.errors import ScheduleError
from autosched.graph import Graph
from autosched.machine import Device, Link, Machine
from autosched.placement import Placement, check
from autosched.policies import POLICIES
from tests.test_policies import ARABNEJAD, COSTS, TOPCUOGLU, breaks_a_rule, cases, makespan, processors


@pytest.mark.parametrize(
    ("graph", "critical_path", "work"),
    [(TOPCUOGLU, 54, 91 / 3), (ARABNEJAD, 86, 172 / 3)],
    ids=["Topcuoglu", "Arabnejad"],
)
def test_bounds_of_published_examples(graph, critical_path, work):
    assert bounds(graph, processors(3), COSTS) == {"critical_path": critical_path, "work": work, "copies": 0.0}


def test_the_critical_path_stays_on_a_device_where_copies_cost_more():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 4}, nbytes=2)
    graph.add(int, a, name="b", seconds={"p1": 6, "p2": 1})
    assert bounds(graph, processors(2), COSTS)["critical_path"] == 1 + 2 + 1
    assert bounds(graph, processors(2), COSTS.override(nbytes={"a": 9}))["critical_path"] == 4 + 1


def test_the_critical_path_has_copies_of_inputs_and_of_what_is_written_in_place():
    graph = Graph()
    w = graph.input("w")
    graph.add(int, w, name="write", writes=[w], outputs=(), seconds=1, on="p2")
    graph.add(int, w, name="look", seconds=1, on="p3")
    assert bounds(graph, processors(3), COSTS.override(nbytes={"w": 5}))["critical_path"] == 5 + 1 + 5 + 1


def test_a_write_in_place_need_not_wait_for_readers_of_a_copy():
    graph = Graph()
    w = graph.input("w")
    graph.add(int, w, name="read", seconds=7, on="p2")
    graph.add(int, w, name="write", writes=[w], outputs=(), seconds=6, on="p1")
    assert bounds(graph, processors(2), COSTS.override(nbytes={"w": 1}))["critical_path"] == 1 + 7


def test_no_copy_within_a_group_or_for_order_alone():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 2}, nbytes=50)
    graph.add(int, a[1:], name="b", writes=[graph.value("getitem")], outputs=(), seconds={"p1": 9, "p2": 3})
    graph.add(int, name="c", seconds=1, after=["b"])
    assert bounds(graph, processors(2), COSTS)["critical_path"] == 2 + 3 + 1


def test_the_critical_path_goes_by_way_of_a_device_where_no_link_is():
    machine = Machine([Device("p1"), Device("p2"), Device("p3")], [Link("p1", "p2", 1), Link("p2", "p3", 1)])
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=5, on="p1")
    graph.add(int, a, name="b", seconds=1, on="p3")
    assert bounds(graph, machine, COSTS) == {"critical_path": 1 + 5 + 5 + 1, "work": 1, "copies": 0}


def test_work_counts_streams_and_sees_what_a_set_of_devices_must_do_alone():
    machine = Machine([Device("p1", streams=2), Device("p2"), Device("p3")])
    graph = Graph()
    for i in range(4):
        graph.add(int, name=f"any{i}", seconds=1)
    assert bounds(graph, machine, COSTS)["work"] == 4 / 4
    graph.add(int, name="two", seconds={"p1": 4, "p2": 7})
    graph.add(int, name="one", seconds=2, on="p1")
    assert bounds(graph, machine, COSTS)["work"] == 10 / 4
    graph.add(int, name="more", seconds={"p1": 9, "p2": 8})
    assert bounds(graph, machine, COSTS)["work"] == (4 + 2 + 8) / 3


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("cpu", "cuda:0", "cuda:1"), 7), (("cpu", "cpu:1", "cpu:2"), 9), (("cuda:0", "cuda:1", "cuda:2"), 9)],
)
def test_copies_that_constraints_force_follow_one_another(names, expected):
    """The first device sends 3, 4 and 2 bytes; the second gets 3 + 4 of them."""
    graph = Graph()
    for nbytes, reader in ((3, 1), (4, 1), (2, 2)):
        a = graph.add(int, name=f"a{nbytes}", seconds=0, nbytes=nbytes, on=names[0])
        graph.add(int, a, name=f"b{nbytes}", seconds=0, on=names[reader])
        graph.add(int, a, name=f"again{nbytes}", seconds=0, on=names[reader])
    links = [Link(a, b, 1) for a, b in itertools.combinations(names, 2)]
    devices = [Device(name) for name in names]
    assert bounds(graph, Machine(devices, links), COSTS)["copies"] == expected
    assert bounds(graph, Machine(devices, links, contention=False), COSTS)["copies"] == 0


def test_a_task_that_can_run_nowhere_takes_forever():
    graph = Graph()
    graph.add(int, name="a", seconds={"p1": 1}, on="p2")
    assert bounds(graph, processors(2), COSTS)["critical_path"] == float("inf")
    assert bounds(graph, processors(2), COSTS)["work"] == float("inf")


def test_an_empty_graph_takes_no_time():
    assert bounds(Graph(), processors(2), COSTS) == {"critical_path": 0, "work": 0, "copies": 0}


@pytest.mark.parametrize("name", POLICIES)
@given(case=cases())
def test_no_policy_is_faster_than_a_bound(name, case):
    graph, machine = case
    try:
        placement = POLICIES[name](graph, machine, COSTS)
    except ScheduleError:
        return
    reached = makespan(graph, machine, placement)
    for bound, seconds in bounds(graph, machine, COSTS).items():
        assert seconds <= reached * (1 + 1e-9), f"{bound} of\n{graph}"


@given(case=cases(devices=3, tasks=5))
def test_no_placement_in_insertion_order_is_faster_than_a_bound(case):
    graph, machine = case
    names = [task.name for task in graph.tasks]
    for devices in itertools.product(machine.names, repeat=len(names)):
        placement = Placement(dict(zip(names, devices, strict=True)), tuple(names))
        try:
            check(placement, graph, machine)
        except ScheduleError:
            continue
        if not breaks_a_rule(graph, machine, dict(placement.device)):
            reached = makespan(graph, machine, placement)
            assert max(bounds(graph, machine, COSTS).values()) <= reached * (1 + 1e-9)
