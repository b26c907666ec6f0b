"""Policies of the literature: their papers' examples, in the papers' model; what they share; what each is for."""

from __future__ import annotations

import pytest
from hypothesis import given

import autosched as asc
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Device, Link, Machine
from autosched.policies import POLICIES, cpop, heft, peft
from autosched.policies.base.plan import Plan, by_priority
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import (
    critical_path,
    downward_ranks,
    optimistic_costs,
    upward_ranks,
)
from autosched.problem import Problem
from tests.policies.test_policies import (
    ARABNEJAD,
    COSTS,
    KUAN,
    SAMPLE,
    TOPCUOGLU,
    YC_LEE,
    cases,
    example,
    fork,
    makespan,
    processors,
    replay,
)

EXAMPLES = {
    "Topcuoglu": TOPCUOGLU,
    "Arabnejad": ARABNEJAD,
    "Sample": SAMPLE,
    "YCLee": YC_LEE,
    "Kuan": example(*KUAN),
}
# Published: HEFT 80 and 133, CPOP 86 (Topcuoglu and others), PEFT 122 (Arabnejad, Barbosa).
MAKESPANS = {
    "heft": [80, 133, 84, 88, 30],
    "peft": [85, 122, 92, 70, 31],
    "cpop": [86, 167, 95, 87, 31],
}
TIMED = {name: POLICIES[name] for name in MAKESPANS}


def tables(graph: Graph, machine: Machine | None = None) -> tuple[Problem, Possible]:
    problem = Problem(graph, machine or processors(3), COSTS)
    return problem, Possible(problem)


@pytest.mark.parametrize("name", MAKESPANS)
def test_schedules_of_published_examples_take_as_long_as_published(name):
    made = [asc.schedule(graph, processors(3), policy=name) for graph in EXAMPLES.values()]
    assert [schedule.makespan for schedule in made] == MAKESPANS[name]


@pytest.mark.parametrize(
    ("policy", "graph", "expected"),
    [
        (cpop, TOPCUOGLU, "2@0 2@16 1@28 3@25 2@35 3@42 1@39 3@54 2@65 2@79"),
        (peft, ARABNEJAD, "1@0 1@29 1@51 1@22 3@35 2@29 1@83 2@54 3@81 2@106"),
    ],
    ids=["CPOP", "PEFT"],
)
def test_plans_are_those_of_the_papers(policy, graph, expected):
    placement = policy(asc.Problem(graph, processors(3), COSTS))
    spans = replay(graph, processors(3), placement)
    shown = [f"{placement.device[task.name][1:]}@{spans[task.name][0]:.0f}" for task in graph.tasks]
    assert " ".join(shown) == expected


# ---- measures


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (
            TOPCUOGLU,
            "48 38 53; 35 19 35; 28 22 27; 38 19 36; 32 19 32; 23 18 30; 21 7 16; 18 7 16; 20 7 16; 0 0 0",
        ),
        (
            ARABNEJAD,
            "64 68 86; 42 39 42; 27 41 43; 42 39 50; 28 37 28; 42 39 44; 13 16 22; 13 16 33; 13 16 20; 0 0 0",
        ),
    ],
    ids=["Topcuoglu", "Arabnejad"],
)
def test_optimistic_costs_are_those_of_the_paper(graph, expected):
    assert optimistic_costs(*tables(graph)) == [
        [float(cost) for cost in row.split()] for row in expected.split(";")
    ]


def test_downward_ranks_and_the_critical_path_are_those_of_the_paper():
    problem, possible = tables(TOPCUOGLU)
    upward, downward = upward_ranks(problem, possible), downward_ranks(problem, possible)
    assert downward == pytest.approx(
        [0, 31, 25, 22, 24, 27, 62.333, 66.667, 63.667, 93.333], abs=1e-3
    )
    path = critical_path(problem, [up + down for up, down in zip(upward, downward, strict=True)])
    assert [problem.tasks[task] for task in path] == ["1", "2", "9", "10"]


def test_optimistic_costs_know_which_link_is_slow():
    graph = Graph()
    a = graph.add(int, name="a", seconds=1, nbytes=8)
    graph.add(int, a, name="b", seconds={"p1": 9, "p2": 9, "p3": 1})
    links = [Link("p1", "p2", 1), Link("p1", "p3", 8), Link("p2", "p3", 2)]
    machine = Machine([Device(name) for name in ("p1", "p2", "p3")], links, contention=False)
    assert optimistic_costs(*tables(graph, machine)) == [[2, 5, 1], [0, 0, 0]]


def test_optimistic_costs_keep_a_group_together_and_see_where_tasks_may_go():
    graph = Graph()
    y = graph.add(int, name="y", seconds={"p1": 1, "p2": 2}, nbytes=1)
    part = y[:2]
    graph.add(int, part, name="write", writes=[part], outputs=(), seconds={"p1": 9, "p2": 1})
    graph.add(int, name="alone", seconds={"p1": 1, "p2": 5}, on="p2", after="write")
    assert optimistic_costs(*tables(graph, processors(2)))[0] == [9 + 5, 1 + 5]


# ---- what each is for


def test_peft_goes_where_what_follows_is_quick_and_heft_does_not():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 2, "p2": 3}, nbytes=9)
    graph.add(int, a, name="b", seconds={"p1": 9, "p2": 1})
    found = {
        name: makespan(graph, processors(2), TIMED[name](asc.Problem(graph, processors(2), COSTS)))
        for name in TIMED
    }
    assert (found["heft"], found["peft"], found["cpop"]) == (11, 4, 4)


def test_cpop_weighs_alike_what_has_no_choice():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 2})
    b = graph.add(int, a, name="b", seconds=9, on="p1")
    graph.add(int, b, name="c", seconds=2)
    assert cpop(asc.Problem(graph, processors(2), COSTS)).device == {
        "a": "p1",
        "b": "p1",
        "c": "p1",
    }


def test_cpop_sends_tasks_of_the_critical_path_elsewhere_only_where_they_must_be():
    graph = Graph()
    a = graph.add(int, name="a", seconds={"p1": 1, "p2": 2}, nbytes=1)
    b = graph.add(int, a, name="b", seconds=9, nbytes=1, on="p1")
    graph.add(int, b, name="c", seconds={"p1": 9, "p2": 2})
    assert cpop(asc.Problem(graph, processors(2), COSTS)).device == {
        "a": "p2",
        "b": "p1",
        "c": "p2",
    }


# ---- beyond the papers


@pytest.mark.parametrize("name", TIMED)
def test_copies_are_planned_where_they_stand_in_line(name):
    graph, real = fork(6, nbytes=3), processors(3, contention=True)
    blind, aware = (
        TIMED[name](asc.Problem(graph, machine, COSTS)) for machine in (processors(3), real)
    )
    assert makespan(graph, real, aware) < makespan(graph, real, blind)


@pytest.mark.parametrize("name", TIMED)
def test_all_streams_of_a_device_are_used(name):
    graph = Graph()
    for task in "abc":
        graph.add(int, name=task, seconds={"cpu": 2, "cuda:0": 5})
    machine = Machine([Device("cpu", streams=2), Device("cuda:0")], Machine.emulated(gpus=1).links)
    assert makespan(graph, machine, TIMED[name](asc.Problem(graph, machine, COSTS))) <= 5


# ---- what they share


@given(case=cases())
def test_heft_on_kernels_places_as_heft_on_plans(case):
    try:
        problem, possible = tables(*case)
    except ScheduleError:
        return
    expected = by_priority(problem, possible, upward_ranks(problem, possible), Plan.earliest_finish)
    assert heft(Problem(*case, COSTS)).device == expected.device
