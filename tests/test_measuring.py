"""Measuring: which tasks are timed, what their costs are good for, and the line through times of copies."""

from __future__ import annotations

import time

import pytest
import torch

import autosched as asc
from autosched import measuring
from autosched.measuring import fitted, measured_costs, measured_links


def nap(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.003)
    return x + 1


def graph_on_gpus() -> tuple[asc.Graph, dict[str, torch.Tensor]]:
    """Return a graph that must run on GPUs, with a view, a write in place and a nap; and inputs for it."""
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:1"):
        rested = graph.add(nap, x, name="nap")
        x.mul_(2)
        graph.output(y=rested.T @ x)
    return graph, {"x": torch.ones(4, 4)}


def test_tasks_are_timed_on_the_cpu_wherever_they_must_run() -> None:
    graph, inputs = graph_on_gpus()
    costs = measured_costs(graph, asc.Machine.local(gpus=0), inputs, repeat=2)
    assert list(costs.seconds) == ["nap", "mul", "matmul"]
    assert 0.003 <= costs.seconds["nap"] < 3
    assert costs.nbytes["x"] == 64
    assert torch.equal(inputs["x"], torch.ones(4, 4))  # what tasks write is a copy


def test_measured_costs_make_schedules_for_any_machine() -> None:
    graph, inputs = graph_on_gpus()
    costs = measured_costs(graph, asc.Machine.local(gpus=0), inputs, repeat=1)
    assert asc.schedule(graph, asc.Machine.emulated(gpus=2), costs=costs).makespan >= 0.003


def test_the_first_run_warms_up() -> None:
    calls: list[int] = []

    def slow_at_first(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # and not one without data, from which bytes are estimated
            calls.append(1)
            time.sleep(0.05 * (len(calls) == 1))
        return x + 1

    graph = asc.Graph()
    graph.output(y=graph.add(slow_at_first, graph.input("x")))
    costs = measured_costs(graph, asc.Machine.local(gpus=0), {"x": torch.ones(1)}, repeat=1)
    assert len(calls) == 2
    assert costs.seconds["slow_at_first"] < 0.02


def test_each_kind_of_device_is_timed_on_its_first() -> None:
    played = [asc.Device("cpu"), *(asc.Device(f"cuda:{i}", physical="cpu") for i in range(2))]
    links = [asc.Link(a.name, b.name, 1e9) for a, b in ((played[0], played[1]), (played[0], played[2]))]
    graph = asc.Graph()
    rested = graph.add(nap, graph.input("x"), name="nap")
    graph.output(sum=graph.add(torch.sum, rested.T, name="sum"), here=graph.add(abs, rested, name="here", on="cpu"))
    inputs, costs = {"x": torch.ones(4, 4)}, asc.Costs()
    samples = measuring._profiled(graph, asc.Machine(played, links, imagined=True), inputs, costs, 2, iter)
    assert {task: {kind: len(times) for kind, times in found.items()} for task, found in samples.items()} == {
        "nap": {"cpu": 2, "cuda": 2},
        "sum": {"cpu": 2, "cuda": 2},
        "here": {"cpu": 4},
    }
    assert measuring._spread({"cpu": [1, 2, 9], "cuda": [3]}, played) == {"cpu": 2, "cuda:0": 3, "cuda:1": 3}


def test_an_emulated_machine_is_not_measured() -> None:
    with pytest.raises(asc.MachineError, match="an emulated machine has nothing to measure"):
        measured_costs(asc.Graph(), asc.Machine.emulated(gpus=1), {})


def test_a_task_without_a_function_is_named() -> None:
    networkx = pytest.importorskip("networkx")
    graph = asc.Graph.from_networkx(networkx.DiGraph([("a", "b")]))
    with pytest.raises(asc.ScheduleError, match="task 'a' has no function: it can be planned, not measured"):
        measured_costs(graph, asc.Machine.local(gpus=0), {})


def test_times_that_show_no_rate_give_none() -> None:
    assert fitted({1: 1.0, 10: 2.0, 100: 2.0}) is None
    assert fitted({10: 0.5, 100: 1.0, 1000: 10.0}) == (100.0, 0.4)


def test_a_machine_without_links_keeps_none() -> None:
    machine = asc.Machine.local(gpus=0)
    assert measured_links(machine) == machine


@pytest.mark.cuda
def test_each_kind_of_device_has_costs_and_links_have_rates() -> None:
    machine = asc.Machine.local(gpus=2)
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    graph.output(y=x @ w + 1)
    inputs = {"x": torch.ones(512, 512), "w": torch.ones(512, 512)}
    costs = measured_costs(graph, machine, inputs, repeat=3)
    assert list(costs.seconds["matmul"]) == list(machine.names)
    assert 0 < costs.seconds["matmul"]["cuda:0"] == costs.seconds["matmul"]["cuda:1"] < 0.1
    for link in measured_links(machine, repeat=3).links:
        assert 1e8 < link.bytes_per_second < 1e13
        assert 0 <= link.latency < 1e-2
