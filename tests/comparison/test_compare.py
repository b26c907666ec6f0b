"""Comparisons: what is predicted for machines and policies, what machines are called, and what is refused."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

import autosched as asc
from autosched.comparison import POLICIES
from autosched.policies import TIMED, heft, search, single_on
from tests.strategies import graphs, machines


def emulated(*gpus: int, link: str = "pcie4") -> list[asc.Machine]:
    return [asc.Machine.emulated(count, link) for count in gpus]


def wide(tasks: int = 8) -> asc.Graph:
    """Return tasks of a second, none of which needs another."""
    graph = asc.Graph("wide")
    for i in range(tasks):
        graph.output(
            **{f"out{i}": graph.add(abs, graph.input(f"in{i}"), name=f"t{i}", seconds=1.0)}
        )
    return graph


def pinned() -> asc.Graph:
    """Return a graph that needs two GPUs."""
    graph = asc.Graph("pinned")
    x = graph.input("x")
    for gpu in ("cuda:0", "cuda:1"):
        x = graph.add(abs, x, on=gpu, seconds=1.0, nbytes=8)
    graph.output(x=x)
    return graph


@settings(max_examples=settings().max_examples * 2 // 5)
@given(graph=graphs(), machine=machines())
def test_each_row_is_what_schedule_predicts(graph: asc.Graph, machine: asc.Machine) -> None:
    costs = asc.Costs(default_nbytes=100)
    found = asc.compare(graph, machine, ["heft", "auto"], costs=costs)
    assert found.refusals == ()
    for row in found.rows:
        made = asc.schedule(graph, machine, policy=row.policy, costs=costs)
        assert (row.makespan, row.lower_bound, row.gap) == (
            made.makespan,
            made.lower_bound,
            made.gap,
        )
        assert row.peak_bytes == max(made.peak_bytes.values())
        assert 0 <= row.busiest <= 1 + 1e-9
    auto, single = found.rows[-1], asc.schedule(graph, machine, policy="single", costs=costs)
    assert auto.speedup is None or auto.speedup == pytest.approx(single.makespan / auto.makespan)


def test_more_gpus_speed_up_what_is_parallel() -> None:
    found = asc.compare(wide(), emulated(1, 2, 4), "heft")
    assert [round(row.speedup or 0, 2) for row in found.rows] == [2.0, 2.67, 4.0]
    assert [row.gpus for row in found.rows] == [1, 2, 4]


def test_machines_are_named_by_what_tells_them_apart() -> None:
    slow = asc.Machine.emulated(2).slower(2)
    many = asc.Machine.emulated(2, cpu_streams=4)
    free = asc.Machine.emulated(2, contention=False)
    odd = asc.Machine.emulated(2, bytes_per_second=3e9)
    names = [
        row.machine
        for row in asc.compare(wide(), [*emulated(0, 1, 2), slow, many, free, odd], "single").rows
    ]
    assert names == [
        "1 CPU, 1 CPU stream, with contention",
        "1 GPU, pcie4, 20 TFLOP/s, 1 CPU stream, with contention",
        "2 GPUs, pcie4, 20 TFLOP/s, 1 CPU stream, with contention",
        "2 GPUs, 12.5 GB/s, 10 TFLOP/s, 1 CPU stream, with contention",
        "2 GPUs, pcie4, 20 TFLOP/s, 4 CPU streams, with contention",
        "2 GPUs, pcie4, 20 TFLOP/s, 1 CPU stream, no contention",
        "2 GPUs, 3 GB/s, 20 TFLOP/s, 1 CPU stream, with contention",
    ]


def test_what_a_machine_cannot_do_is_told_beside_what_others_can() -> None:
    found = asc.compare(pinned(), emulated(1, 2))
    assert [row.machine for row in found.rows] == ["2 GPUs, pcie4"] * len(POLICIES)
    assert [refusal.policy for refusal in found.refusals] == list(POLICIES)
    last = str(found).splitlines()[-1]
    who = "1 GPU, pcie4: refused (single, round_robin, heft, auto): "
    assert last == f"{who}the machine has no device 'cuda:1'; it has 'cpu', 'cuda:0'"


def test_policies_of_one_name_in_a_list_are_numbered_and_equal_ones_are_one() -> None:
    found = asc.compare(
        wide(), emulated(1), [search(moves=0), "heft", search(moves=9), "heft", single_on("cpu")]
    )
    assert [row.policy for row in found.rows] == [
        "search (1)",
        "heft",
        "search (3)",
        "single_on cpu",
    ]


def test_seconds_go_to_the_policies_that_take_some(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float | None, int]] = []
    monkeypatch.setitem(
        TIMED, "search", lambda seconds, seed, progress: told.append((seconds, seed)) or heft
    )
    found = asc.compare(wide(), emulated(2), ["heft", "search"], seconds=9.0, seed=2)
    assert [row.policy for row in found.rows] == ["heft", "search"]
    assert told[-1] == (9.0, 2)


def test_examples_are_estimated_once() -> None:
    torch = pytest.importorskip("torch")
    graph = asc.Graph()
    calls = []

    def product(a, b):
        calls.append(1)
        return a @ b

    graph.output(y=graph.add(product, *graph.inputs("x", "w")))
    examples = {"x": torch.zeros(64, 64), "w": torch.zeros(64, 64)}
    found = asc.compare(graph, emulated(0, 1, 2), examples=examples)
    assert len(calls) == 1
    assert all(row.peak_bytes > 0 for row in found.rows)


def test_real_machines_copy_from_pageable_memory_as_slowly_as_schedules_say() -> None:
    torch = pytest.importorskip("torch")
    link = asc.Link("cpu", "cuda:0", 100, pageable_bytes_per_second=50)
    machine = asc.Machine([asc.Device("cpu"), asc.Device("cuda:0")], [link])
    graph = asc.Graph()
    graph.output(y=graph.add(torch.neg, graph.input("x"), on="cuda:0"))
    examples = {"x": torch.zeros(100)}
    (row,) = asc.compare(graph, machine, "single", examples=examples).rows
    assert (
        row.makespan
        == asc.schedule(graph, machine, policy="single", examples=examples, backend="host").makespan
    )
    assert row.makespan > 8  # 400 bytes at 50 a second


def test_over_numbers_of_gpus_there_is_a_line_for_each_policy_and_link() -> None:
    both = [*emulated(1, 2, 4), *emulated(2, 4, link="nvlink4")]
    svg = asc.compare(wide(), both, ["single", "heft"]).svg()
    words = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    names = ("single, pcie4", "single, nvlink4", "heft, pcie4", "heft, nvlink4")
    assert [word for word in words if word in names] == list(names)
    assert "GPUs" in words
    lines = dict(asc.compare(wide(), both, ["heft"])._lines())
    assert [len(points) for points in lines.values()] == [3, 3]  # the one GPU is on both lines


def test_a_comparison_of_nothing_that_works_is_drawn_and_told() -> None:
    found = asc.compare(pinned(), emulated(0, 1), "heft")
    assert found.best == ()
    assert "refused" in str(found)
    ElementTree.fromstring(found.svg())


def test_json_and_html_hold_all_rows() -> None:
    found = asc.compare(pinned(), emulated(1, 2), "heft")
    document = json.loads(found.to_json())
    assert document["rows"][0]["makespan"] == found.rows[0].makespan
    assert document["refusals"][0]["machine"] == "1 GPU, pcie4"
    page = asc.compare(wide(), {"<b>": emulated(1)[0]}, "heft")._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("machines", "policies", "message"),
    [
        ([], "heft", "machines must be one at least, got none"),
        (2, "heft", "machines must be Machine, a list of them or a mapping by name, got 2"),
        (["cuda:0"], "heft", "machines must be Machine, .*got 'cuda:0'"),
        (emulated(1), ["heft", "fastest"], "unknown policy 'fastest'; known are 'auto'"),
        (emulated(1), 3, "policies must be names or functions, got 3"),
    ],
)
def test_what_is_no_machine_and_no_policy_is_refused(machines, policies, message) -> None:
    with pytest.raises((asc.MachineError, asc.ScheduleError), match=message):
        asc.compare(wide(), machines, policies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay": True}, "compare has no option replay=; beside its parameters it has inputs="),
        ({"hosts": False}, "compare has no option hosts="),  # was a parameter of what it calls
        ({"objective": "length"}, "objective must be 'makespan' or 'period', got 'length'"),
        ({"in_flight": 0}, "in_flight must be a whole number, 1 or more, got 0"),
        ({"seconds": "1"}, "seconds must be a number"),
        ({"seed": 0.5}, "seed must be a whole number"),
    ],
)
def test_what_is_no_option_of_a_comparison_is_refused(options, message) -> None:
    with pytest.raises(asc.ScheduleError, match=message):
        asc.compare(wide(), emulated(1), "heft", **options)


def test_a_machine_without_links_is_compared_too() -> None:
    island = asc.Machine(
        [asc.Device("cpu:0"), asc.Device("cpu:1")], [asc.Link("cpu:0", "cpu:1", math.inf)]
    )
    (row,) = asc.compare(wide(2), island, "heft").rows
    assert (row.machine, row.gpus, row.makespan) == ("2 CPUs", 0, 1.0)


def test_periods_are_compared_where_they_are_the_objective():
    graph = asc.Graph("chain")
    value = graph.input("x")
    for i in range(4):
        value = graph.add(abs, value, name=f"t{i}", seconds=1.0)
    graph.output(y=value)
    machine = asc.Machine.emulated(gpus=1, bytes_per_second=1e30, latency=0.0)
    found = asc.compare(graph, machine, ["single", "auto"], objective="period")
    assert [(row.period, row.in_flight, row.speedup) for row in found.rows] == [
        (4.0, 1, 1.0),
        (2.0, 2, 2.0),
    ]
    assert [row.policy for row in found.best] == ["auto"]
    assert str(found).splitlines()[1].split()[-3:] == ["in", "flight", "period"]
    assert "period" in found.svg()
