"""Explanations of graphs of torch calls: what is advised can be had, and faults are told in words that help."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.explanation import Advice
from tests.strategies import graphs, machines

ONE, TWO = asc.Machine.emulated(gpus=1), asc.Machine.emulated(gpus=2)
CUDA = {"*": "cuda:0"}


def call(*values: Any) -> None:
    """Stand for any function: nothing here runs."""


# ---- advice can be had


@given(
    graph=graphs(),
    machine=machines(),
    policy=st.sampled_from(["heft", "round_robin", "single"]),
    wanted=st.sampled_from([None, "cpu", "cuda:1"]),
)
def test_what_is_advised_gives_what_is_said(
    graph: asc.Graph, machine: asc.Machine, policy: str, wanted: str | None
) -> None:
    links = [
        dataclasses.replace(k, pageable_bytes_per_second=k.bytes_per_second / 2)
        for k in machine.links
    ]
    machine = asc.Machine(machine.devices, links, contention=machine.contention, imagined=True)
    costs = asc.Costs(default_nbytes=1e4, pageable=frozenset("x"))
    schedule = asc.schedule(graph, machine, policy=policy, costs=costs, outputs=wanted)
    for advice in schedule.explain().advice:
        again = followed(schedule, advice, graph, wanted)
        assert again <= advice.makespan * (1 + 1e-9), advice.words


def followed(schedule: asc.Schedule, advice: Advice, graph: asc.Graph, wanted: str | None) -> float:
    """Return the makespan of a schedule that is made anew, as advised; 0 for what planning alone cannot do."""
    if advice.kind == "pin":
        costs = dataclasses.replace(
            schedule.costs, pageable=schedule.costs.pageable.difference(advice.values)
        )
        same = asc.schedule(
            graph,
            schedule.machine,
            policy=lambda *_: schedule.placement,
            costs=costs,
            outputs=wanted,
        )
        return same.makespan
    if advice.kind == "keep inputs":
        homes = [dict.fromkeys(advice.values, device) for device in schedule.machine.accelerators]
        made = [
            asc.schedule(graph, schedule.machine, costs=schedule.costs, outputs=wanted, inputs=h)
            for h in homes
        ]
        return min(again.makespan for again in made)
    if advice.kind == "keep":
        homes = dict(re.findall(r"'(\w+)': '([\w:]+)'", advice.words))
        homes = homes if homes.keys() == {*advice.values} else {}
        return asc.schedule(
            graph, schedule.machine, costs=schedule.costs, outputs=wanted, inputs=homes
        ).makespan
    if advice.kind.endswith("bound"):
        free = [
            dataclasses.replace(t, device=None) if t.name in advice.tasks else t
            for t in graph.tasks
        ]
        graph = graph.snapshot(free)
        return asc.schedule(graph, schedule.machine, costs=schedule.costs, outputs=wanted).makespan
    if advice.kind.endswith("policy"):
        return asc.schedule(graph, schedule.machine, costs=schedule.costs, outputs=wanted).makespan
    return 0.0


def slow_to_issue(streams: int) -> asc.Machine:
    devices = [
        dataclasses.replace(d, streams=streams, issue_seconds=1e-3 * d.is_accelerator)
        for d in TWO.devices
    ]
    return asc.Machine(devices, TWO.links, imagined=True)


def test_what_is_advised_to_be_free_is_planned_with_the_host_too():
    """The best plan on GPUs is not found where tasks may also be on the CPU."""
    graph = asc.Graph()
    x = graph.input("x", nbytes=1e3)
    with graph.on("cuda:1"):
        y = graph.input("y", nbytes=0)
    first = {"cpu": 4e-3, "cuda:0": 0.0, "cuda:1": 8e-3}
    third = {"cpu": 0.0, "cuda:0": 0.0, "cuda:1": 8e-3}
    a = graph.add(call, x, seconds=first, nbytes=1e6)
    b = graph.add(call, y, seconds=1e-3, nbytes=1e3)
    graph.add(call, x, a, writes=[x], outputs=(), seconds=4e-3)
    graph.add(call, x, y, a, writes=[x], outputs=(), seconds=third, on="cuda:0")
    graph.add(call, y, a, b, writes=[y], outputs=(), seconds=8e-3, on="cuda:0")
    schedule = asc.schedule(graph, slow_to_issue(4), policy="round_robin")
    found = {advice.kind.split()[-1]: advice for advice in schedule.explain().advice}
    assert found.keys() >= {"bound", "policy"}
    for advice in found.values():
        assert followed(schedule, advice, graph, None) <= advice.makespan * (1 + 1e-9), advice


def test_a_plan_brings_outputs_where_they_are_wanted():
    """All on one device looks better than it is, if one forgets that the output must leave it."""
    graph = asc.Graph()
    value = graph.input("x")
    for i in range(4):
        value = graph.add(
            call, value, name=f"step{i}", seconds=1e-3, nbytes=25e6, on=f"cuda:{i % 2}"
        )
    graph.output(y=value)
    for wanted, copies in (("cpu", 1), (None, 0)):
        (found,) = asc.schedule(graph, TWO, outputs=wanted).explain().advice
        assert found.kind == "fewer bound"
        assert found.makespan == pytest.approx(4e-3 + 1e-5 + copies * (1e-5 + 1e-3))


# ---- what is said


def chain_of(length: int) -> asc.Graph:
    graph = asc.Graph("chain")
    value = graph.input("x")
    for _ in range(length):
        value = torch.sin(value)
    graph.output(y=value)
    return graph


@pytest.mark.parametrize("is_merged", [False, True])
def test_tiny_operators_are_named_merged_or_not(is_merged: bool) -> None:
    graph, examples = chain_of(50), {"x": torch.zeros(16, 16)}
    costs = asc.Costs.estimate(graph, examples)
    groups = dict.fromkeys((task.name for task in graph.tasks), "all")
    graph = asc.merge(graph, groups) if is_merged else graph
    (found,) = asc.schedule(graph, ONE, costs=costs, place=CUDA).explain().advice
    assert found.kind == "launch"
    assert ("1 task" if is_merged else "50 tasks") in found.words
    assert "test_explain_true.py:" in found.words
    copied, computed = 1e-5 + 1024 / 25e9, 50 * 2 * 1024 / 2e12
    assert found.makespan == pytest.approx(copied + 5e-6 + computed, rel=0.05)


def test_an_emulated_machine_says_what_pageable_memory_would_cost():
    graph, examples = asc.Graph(), {"x": torch.zeros(2048, 2048)}
    graph.output(y=torch.relu(graph.input("x")))
    costs = asc.Costs.estimate(graph, examples)
    (note,) = asc.schedule(graph, ONE, costs=costs, place=CUDA).explain().notes
    assert "if 'x' were not" in note
    slow = asc.schedule(graph, ONE, costs=costs.override(pageable=["x"]), place=CUDA).explain()
    assert (slow.notes, slow.advice[0].kind, slow.advice[0].values) == ((), "pin", ("x",))


def test_a_view_is_moved_only_where_its_base_can_be():
    graph = asc.Graph()
    x = graph.input("x")
    base = graph.add(call, x, name="base", on="cuda:0", seconds={"cuda:0": 1e-3, "cuda:1": 1e-3})
    part = base[1:]
    part.mul_(2)
    graph.output(y=part)
    found = asc.schedule(graph, TWO).explain("getitem")
    assert [option.device for option in found.options] == ["cuda:0", "cuda:1"]
    assert not any(option.refusal for option in found.options)


@pytest.mark.parametrize("rate", [25e9, math.inf])
@pytest.mark.parametrize("tasks", [0, 1])
def test_nothing_is_said_of_no_time(rate: float, tasks: int) -> None:
    graph = asc.Graph("nothing")
    value = graph.input("x")
    for _ in range(tasks):
        value = graph.add(call, value, name="task", on="cuda:0", seconds=0.0)
    graph.output(y=value)
    devices = [asc.Device("cpu"), asc.Device("cuda:0")]
    machine = asc.Machine(devices, [asc.Link("cpu", "cuda:0", rate)], imagined=True)
    text = str(asc.schedule(graph, machine).explain())
    assert [
        word
        for word in ("0%", " 0 us: ", "never", "Critical")
        if word in text.partition("Copies")[0]
    ] == []


def test_long_names_fit_a_terminal():
    graph = asc.Graph()
    value = graph.input("the_input_of_a_model_" * 5)
    for i in range(12):
        name = f"model.encoder.layer{i}.attention.self.query.weight.grad.clone.detach"
        value = graph.add(call, value, name=name, on=f"cuda:{i % 2}", seconds=1e-3, nbytes=1e6)
    graph.output(y=value)
    schedule = asc.schedule(graph, TWO)
    text = f"{schedule.explain()}\n{schedule.explain(schedule.graph.tasks[-1].name)}"
    assert max(map(len, text.split("\n"))) <= 100
    assert "...t.grad.clone.detach" in text
