"""Splits into stages: beside all contiguous splits of small graphs."""

from __future__ import annotations

import itertools
import random

import pytest

import autosched as asc
from autosched.policies.local_search.splitting import split

RATE = 1.0  # a byte takes a second


def random_graph(seed, tasks=7):
    rng = random.Random(seed)
    graph = asc.Graph(f"random {seed}")
    values = [graph.input("x")]
    for i in range(tasks):
        reads = rng.sample(values, min(len(values), rng.randint(1, 2)))
        seconds = float(rng.randint(1, 9))
        values.append(
            graph.add(max, *reads, name=f"t{i}", seconds=seconds, nbytes=rng.randint(0, 3))
        )
    used = {use.value for task in graph.tasks for use in task.reads}
    for value in values[1:]:
        if value.index not in used:
            graph.output(value)
    return graph


def loads(graph, machine, device):
    """Return the greatest load of a placement: of compute, copies out and copies in."""
    found = dict.fromkeys(itertools.product(machine.names, ("compute", "out", "in")), 0.0)
    readers = {}
    for task in graph.tasks:
        found[device[task.name], "compute"] += task.seconds
        for use in task.reads:
            readers.setdefault(use.value, set()).add(device[task.name])
    for index, devices in readers.items():
        value = graph.values[index]
        home = machine.host if value.producer is None else device[graph.tasks[value.producer].name]
        for other in devices - {home}:
            seconds = machine.copy_seconds(home, other, value.nbytes or 0.0)
            for end, stream in ((home, "out"), (other, "in")):
                if end != "cpu":
                    found[end, stream] += seconds
    return max(found.values())


def contiguous(graph, device):
    edges = {
        (device[graph.tasks[before].name], device[task.name])
        for task in graph.tasks
        for before, _ in task.dependencies
    }
    return any(
        all(order.index(a) <= order.index(b) for a, b in edges)
        for order in itertools.permutations(dict.fromkeys(device.values()))
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_contiguous_split_of_a_small_graph_has_less_load(seed):
    graph = random_graph(seed)
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=RATE, latency=0.0)
    names = [task.name for task in graph.tasks]
    best = min(
        loads(graph, machine, device)
        for devices in itertools.product(machine.names, repeat=len(names))
        if contiguous(graph, device := dict(zip(names, devices, strict=True)))
    )
    found = split()(asc.Problem(graph, machine))
    assert contiguous(graph, found.device)
    assert loads(graph, machine, found.device) == best


def test_tasks_that_only_one_device_can_run_belong_to_no_stage():
    graph = asc.Graph()
    value = graph.add(abs, graph.input("x"), name="first", seconds=1.0, on="cpu")
    for i in range(4):
        value = graph.add(abs, value, name=f"t{i}", seconds=2.0)
    graph.output(y=graph.add(abs, value, name="last", seconds=1.0, on="cpu"))
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0)
    device = split()(asc.Problem(graph, machine)).device
    assert device["first"] == device["last"] == "cpu"
    assert {device["t0"], device["t3"]} == {"cuda:0", "cuda:1"} or "cpu" in device.values()


def test_units_are_joined_where_there_are_many(monkeypatch):
    monkeypatch.setattr("autosched.policies.local_search.splitting._MOST_UNITS", 4)
    graph = random_graph(0, tasks=30)
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0)
    found = split()(asc.Problem(graph, machine))
    total = sum(task.seconds for task in graph.tasks)
    assert loads(graph, machine, found.device) <= 0.5 * total
