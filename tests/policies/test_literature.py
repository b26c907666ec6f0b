"""Policies of the literature: their papers' examples, in the papers' model; what they share; what each is for."""

from __future__ import annotations

import pytest
from hypothesis import given

import autosched as asc
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Device, Machine
from autosched.policies import POLICIES, heft
from autosched.policies.base.possible import Possible
from autosched.policies.heft import by_rank
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
)

EXAMPLES = {
    "Topcuoglu": TOPCUOGLU,
    "Arabnejad": ARABNEJAD,
    "Sample": SAMPLE,
    "YCLee": YC_LEE,
    "Kuan": example(*KUAN),
}
MAKESPANS = [80, 133, 84, 88, 30]  # of HEFT; the first two are published
TIMED = {name: POLICIES[name] for name in ("heft", "portfolio")}


def test_schedules_of_published_examples_take_as_long_as_published():
    made = [asc.schedule(graph, processors(3), policy="heft") for graph in EXAMPLES.values()]
    assert [schedule.makespan for schedule in made] == MAKESPANS


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
        problem = Problem(*case, COSTS)
        expected = by_rank(problem, Possible(problem))
    except ScheduleError:
        return
    assert heft(Problem(*case, COSTS)).device == expected.device
