"""Bounds: what each sees, by hand; that none is above what the best of all placements reaches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given

from autosched._lib.jit import Mode
from autosched.bounds import bounds, chains
from autosched.bounds.load import shared
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.lowering import lower
from autosched.machine.machine import Device, Link, Machine
from autosched.placement import Placement, check
from autosched.policies import POLICIES
from autosched.problem import Problem
from autosched.simulation.simulate import durations, makespan
from tests.policies.test_policies import (
    ARABNEJAD,
    COSTS,
    TOPCUOGLU,
    breaks_a_rule,
    cases,
    linked,
    processors,
)


def bound(
    name: str, graph: Graph, machine: Machine, costs: Costs = COSTS, **nbytes: float
) -> float:
    """Return one of the bounds, where values have these bytes."""
    return bounds(Problem(graph, machine, costs.override(nbytes=nbytes)))[name]


@pytest.mark.parametrize(
    ("graph", "critical_path", "work"),
    [(TOPCUOGLU, 63, 31), (ARABNEJAD, 98, 61)],
    ids=["Topcuoglu, optimum 73", "Arabnejad, optimum 113"],
)
def test_bounds_of_published_examples(graph, critical_path, work):
    found = bounds(Problem(graph, processors(3), COSTS))
    assert (found["critical_path"], found["work"], found["interval"]) == (
        critical_path,
        work,
        critical_path,
    )


def test_the_critical_path_stays_on_a_device_where_copies_cost_more():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 4}, nbytes=2)
    graph.add(int, a, name="b", seconds={"p1": 6, "p2": 1})
    assert bound("critical_path", graph, processors(2)) == 1 + 2 + 1
    assert bound("critical_path", graph, processors(2), a=9) == 4 + 1


def test_the_critical_path_has_copies_of_inputs_and_of_what_is_written_in_place():
    graph = Graph()
    w = graph.input("w")
    graph.add(int, w, name="write", writes=[w], outputs=(), seconds=1, on="p2")
    graph.add(int, w, name="look", seconds=1, on="p3")
    assert bound("critical_path", graph, processors(3), w=5) == 5 + 1 + 5 + 1


def test_a_write_in_place_need_not_wait_for_readers_of_a_copy():
    graph = Graph()
    w = graph.input("w")
    graph.add(int, w, name="read", seconds=7, on="p2")
    graph.add(int, w, name="write", writes=[w], outputs=(), seconds=6, on="p1")
    assert bound("critical_path", graph, processors(2), w=1) == 1 + 7


def test_no_copy_within_a_group_or_for_order_alone():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 2}, nbytes=50)
    graph.add(
        int,
        a[1:],
        name="b",
        writes=[graph.value("getitem")],
        outputs=(),
        seconds={"p1": 9, "p2": 3},
    )
    graph.add(int, name="c", seconds=1, after=["b"])
    assert bound("critical_path", graph, processors(2)) == 2 + 3 + 1


def test_the_critical_path_goes_by_way_of_a_device_where_no_link_is():
    machine = Machine(
        [Device("p1"), Device("p2"), Device("p3")], [Link("p1", "p2", 1), Link("p2", "p3", 1)]
    )
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=5, on="p1")
    graph.add(int, a, name="b", seconds=1, on="p3")
    assert bound("critical_path", graph, machine) == 1 + 5 + 5 + 1


def test_two_parents_that_copies_would_delay_run_one_after_the_other():
    graph = Graph()
    a, b = (graph.add(int, name=name, seconds=2, nbytes=9) for name in "ab")
    graph.add(int, a, b, name="c", seconds=1)
    two = Machine([Device("p1", streams=2), Device("p2")], [Link("p1", "p2", 1)])
    assert bound("critical_path", graph, processors(2)) == 2 + 2 + 1
    assert bound("critical_path", graph, processors(2), a=1) == 2 + 1 + 1
    assert bound("critical_path", graph, two) == 2 + 1


def test_two_children_that_copies_would_delay_run_one_after_the_other():
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=9)
    for name in "bc":
        graph.add(int, a, name=name, seconds=2)
    assert bound("critical_path", graph, processors(2)) == 1 + 2 + 2


def test_the_critical_path_counts_what_is_written_back():
    graph = Graph()
    x = graph.input("x")
    graph.add(int, x, name="write", writes=[x], outputs=(), seconds=1, on="p2")
    assert bound("critical_path", graph, processors(2), x=5) == 5 + 1 + 5


def test_pageable_memory_is_as_slow_as_it_is():
    machine = Machine(
        [Device("cpu"), Device("cuda:0")], [Link("cpu", "cuda:0", 4, pageable_bytes_per_second=1)]
    )
    graph = Graph()
    graph.add(int, graph.input("x"), name="a", seconds=1, on="cuda:0")
    costs = Costs(nbytes={"x": 8})
    assert bounds(Problem(graph, machine, costs))["critical_path"] == 2 + 1
    assert bounds(Problem(graph, machine, costs.override(pageable=["x"])))["critical_path"] == 8 + 1


def independent(*rows: dict[str, float]) -> Graph:
    graph = Graph()
    for i, row in enumerate(rows):
        graph.add(int, name=f"t{i}", seconds=row)
    return graph


def test_work_counts_streams():
    machine = Machine([Device("p1", streams=2), *processors(3).devices[1:]], processors(3).links)
    assert bound("work", independent(*[{"p1": 1, "p2": 1, "p3": 1}] * 8), machine) == 8 / 4


def test_work_sees_what_a_set_of_devices_must_do_alone():
    graph = independent({"p1": 4, "p2": 4}, {"p1": 6, "p2": 6}, {"p1": 1, "p2": 1, "p3": 1})
    assert bound("work", graph, processors(3)) == (4 + 6) / 2


def test_work_does_not_take_a_slow_device_for_a_fast_one():
    graph = independent(*[{"p1": 100.5, "p2": 1.5}] * 10)
    assert bound("work", graph, processors(2)) == pytest.approx(15 * 100.5 / (100.5 + 1.5))


def test_a_group_works_on_one_device():
    """Apart, each would be on the device that suits it."""
    graph = Graph()
    for name, row in (("a", {"p1": 1.5, "p2": 9}), ("b", {"p1": 9, "p2": 1.5})):
        graph.add(int, name=name, seconds=row, nbytes=1)
    assert bound("work", graph, processors(2)) == pytest.approx(1.5)
    graph.together(graph.value("a"), graph.value("b"))
    assert bound("work", graph, processors(2)) == pytest.approx(10.5 / 2)


@pytest.mark.parametrize("seed", range(8))
def test_work_is_the_linear_relaxation(seed):
    """Compared with HiGHS, on devices that cannot do everything."""
    optimize = pytest.importorskip(
        "scipy.optimize", reason="scipy is no dependency; it has an LP solver to compare to"
    )
    rng = np.random.default_rng(seed)
    tasks, devices = 30, 2 + seed % 4
    pieces = (
        rng.uniform(1, 100, (tasks, 1))
        * rng.uniform(0.5, 1.5, (tasks, devices))
        * 30 ** rng.uniform(0, seed % 3)
    )
    pieces[rng.uniform(size=pieces.shape) < 0.3] = math.inf
    pieces[:, 0] = np.where(np.isinf(pieces).all(axis=1), 7.0, pieces[:, 0])
    streams = rng.integers(1, 4, devices).astype(float)
    there = np.argwhere(np.isfinite(pieces))
    once, load = np.zeros((tasks, len(there) + 1)), np.zeros((devices, len(there) + 1))
    for i, (task, device) in enumerate(there):
        once[task, i], load[device, i] = 1, pieces[task, device]
    load[:, -1] = -streams
    goal = [*np.zeros(len(there)), 1]
    exact = optimize.linprog(
        goal, A_ub=load, b_ub=np.zeros(devices), A_eq=once, b_eq=np.ones(tasks)
    ).fun
    assert shared(pieces, streams) == pytest.approx(exact, rel=1e-5)
    assert shared(pieces, streams) <= exact * (1 + 1e-9)


def test_an_interval_between_two_tasks_holds_what_runs_between_them():
    """Fernandez, Bussell 1973: 6 seconds of work lie between the first second and the last, on two processors."""
    graph = Graph()
    first = graph.add(int, name="first", seconds=1, nbytes=0)
    middle = [graph.add(int, first, name=f"m{i}", seconds=2, nbytes=0) for i in range(3)]
    graph.add(int, *middle, name="last", seconds=1)
    found = bounds(Problem(graph, processors(2), COSTS))
    assert (found["critical_path"], found["work"], found["interval"]) == (4, 4, 1 + 6 / 2 + 1)


def test_an_interval_knows_which_devices_are_too_slow():
    """In 9 seconds the slow one can do nothing, so the fast one must do it all, which takes 10."""
    graph = independent(*[{"p1": 40.5, "p2": 2.5}] * 4)
    found = bounds(Problem(graph, processors(2), COSTS))
    assert found["work"] < 9.5
    assert found["interval"] == pytest.approx(10)


def test_an_interval_counts_a_slow_device_from_when_there_is_time():
    """17 tasks take 42.5 seconds on the fast device; in 40.5 the slow one can do one of them, and the fast one 16."""
    graph = independent(*[{"p1": 40.5, "p2": 2.5}] * 17)
    found = bounds(Problem(graph, processors(2), COSTS))
    assert found["work"] < 40.1
    assert found["interval"] == pytest.approx(40.5)


def test_whole_costs_have_whole_bounds():
    graph = independent(*[{"p1": 1, "p2": 1}] * 3)
    assert bound("work", graph, processors(2)) == 2
    graph.add(int, name="half", seconds=0.5)
    assert bound("work", graph, processors(2)) == 3.5 / 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("cpu", "cuda:0", "cuda:1"), 7),
        (("cpu", "cpu:1", "cpu:2"), 9),
        (("cuda:0", "cuda:1", "cuda:2"), 9),
    ],
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
    assert bound("copies", graph, Machine(devices, links)) == expected
    assert bound("copies", graph, Machine(devices, links, contention=False)) == 0


def test_copies_to_sets_that_overlap_may_be_one():
    graph = Graph()
    a = graph.add(int, name="a", seconds=0, nbytes=8, on="p1")
    for i, names in enumerate((("p2", "p3"), ("p3", "p4"))):
        graph.add(int, a, name=f"b{i}", seconds=dict.fromkeys(names, 0))
    assert bound("copies", graph, linked("p1", "p2", "p3", "p4")) == 8


def test_copies_from_several_devices_to_the_host_do_not_wait_for_each_other():
    graph = Graph()
    for name in ("cuda:0", "cuda:1"):
        graph.add(int, graph.add(int, seconds=0, nbytes=3, on=name), seconds=0, on="cpu")
    assert bound("copies", graph, linked("cpu", "cuda:0", "cuda:1")) == 3


def test_a_copy_of_a_quarter_of_a_second_is_not_whole_though_a_detour_is():
    links = [Link("p1", "p2", math.inf), Link("p1", "p3", 4), Link("p2", "p3", math.inf)]
    graph = Graph()
    graph.add(int, graph.input("x"), name="a", seconds=0, on="p3")
    machine = Machine([Device("p1"), Device("p2"), Device("p3")], links)
    assert max(bounds(Problem(graph, machine, Costs(default_nbytes=1))).values()) == 1 / 4


def test_copies_to_one_of_several_devices_are_shared_out():
    """What the host makes, some GPU must read: 4 copies of 3 seconds, over two copy streams."""
    names = "cpu", "cuda:0", "cuda:1"
    graph = Graph()
    for i in range(4):
        made = graph.add(int, name=f"a{i}", seconds=0, nbytes=3, on="cpu")
        graph.add(int, made, name=f"b{i}", seconds={"cuda:0": 0, "cuda:1": 0})
    assert bound("copies", graph, linked(*names)) == 4 * 3 / 2


def short(nbytes: float) -> Machine:
    devices = [Device("cpu"), Device("cuda:0", nbytes=nbytes)]
    return Machine(devices, [Link("cpu", "cuda:0", 1)])


def held_across() -> Graph:
    """Made first and read last, 6 bytes that are not used while 8 others are."""
    graph = Graph()
    with graph.on("cuda:0"):
        first = graph.add(int, name="first", seconds=5.5, nbytes=6)
        other = graph.add(int, first, name="other", seconds=1, nbytes=2)
        middle = graph.add(int, other, name="middle", seconds=1, nbytes=6)
        graph.output(graph.add(int, middle, first, name="last", seconds=1, nbytes=0))
    return graph


def test_a_task_that_fits_in_no_memory_takes_forever():
    assert bound("critical_path", held_across(), short(7)) == math.inf


def test_a_task_goes_where_it_fits():
    graph = Graph()
    graph.output(graph.add(int, name="large", seconds={"cpu": 8, "cuda:0": 1}, nbytes=10))
    assert bound("critical_path", graph, short(10)) == 1
    assert bound("critical_path", graph, short(9)) == 8


def test_a_task_that_can_run_nowhere_takes_forever():
    graph = Graph()
    graph.add(int, name="a", seconds={"p1": 1}, on="p2")
    assert bound("critical_path", graph, processors(2)) == float("inf")
    assert bound("work", graph, processors(2)) == float("inf")


def test_an_empty_graph_takes_no_time():
    assert set(bounds(Problem(Graph(), processors(2), COSTS)).values()) == {0}


@pytest.mark.parametrize("which", ["graph", "machine", "costs"])
def test_a_wrong_argument_is_named(which):
    given = {"graph": Graph(), "machine": processors(1), "costs": COSTS, which: 3}
    with pytest.raises(ScheduleError, match=f"^{which} must be a {which.capitalize()}, got 3"):
        bounds(Problem(**given))


def test_chains_are_the_same_compiled(monkeypatch):
    pytest.importorskip("numba")
    graph, machine = TOPCUOGLU, processors(3)
    plain = bounds(Problem(graph, machine, COSTS))
    monkeypatch.setattr(chains, "mode", lambda *_: Mode(True))
    assert bounds(Problem(graph, machine, COSTS)) == plain


def test_of_many_parents_those_that_come_latest_count():
    graph = Graph()
    made = [graph.add(int, name=f"t{i}", seconds=1, nbytes=1000) for i in range(100)]
    graph.add(int, *made, name="last", seconds=1)
    assert bound("critical_path", graph, processors(2)) == chains._MOST + 1


def predicted(graph: Graph, machine: Machine, placement: Placement) -> float:
    program = lower(Problem(graph, machine), placement)
    return makespan(program, durations(program, Problem(graph, machine, COSTS)))


@pytest.mark.parametrize("name", POLICIES)
@given(case=cases())
def test_no_policy_is_faster_than_a_bound(name, case):
    graph, machine = case
    try:
        placement = POLICIES[name](Problem(graph, machine, COSTS))
    except ScheduleError:
        return
    reached = predicted(graph, machine, placement)
    for bound, seconds in bounds(Problem(graph, machine, COSTS)).items():
        assert seconds <= reached * (1 + 1e-9), f"{bound} of\n{graph}"


def orders(graph: Graph, done: tuple[int, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield all orders in which tasks may be issued."""
    if len(done) == len(graph):
        yield tuple(graph.tasks[i].name for i in done)
    for task in graph.tasks:
        if task.index not in done and {d.task for d in task.dependencies} <= set(done):
            yield from orders(graph, (*done, task.index))


@given(case=cases(devices=3, tasks=4))
def test_no_placement_is_faster_than_a_bound(case):
    """By exhaustion, and so all that a policy may find."""
    graph, machine = case
    names = [task.name for task in graph.tasks]
    least = max(bounds(Problem(graph, machine, COSTS)).values())
    for devices in itertools.product(machine.names, repeat=len(names)):
        device = dict(zip(names, devices, strict=True))
        try:
            check(Placement(device, tuple(names)), Problem(graph, machine))
        except ScheduleError:
            continue
        if not breaks_a_rule(graph, machine, device):
            for order in orders(graph):
                assert least <= predicted(graph, machine, Placement(device, order)) * (1 + 1e-9)
