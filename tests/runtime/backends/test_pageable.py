"""Pageable host memory: which copies are slow, who plans with that, and what a file keeps of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autosched as asc
from autosched.policies import POLICIES
from autosched.simulation.simulate import durations

# Page-locked memory goes at 100 bytes a second, other at 50.
LINK = asc.Link("cpu", "cuda:0", 100, pageable_bytes_per_second=50)
MACHINE = asc.Machine([asc.Device("cpu"), asc.Device("cuda:0")], [LINK])


def call(*values: Any) -> None:
    """Stand for any function: nothing here runs."""


def costs(*pageable: str, **nbytes: float) -> asc.Costs:
    return asc.Costs(nbytes=nbytes, pageable=frozenset(pageable))


def copies(schedule: asc.Schedule) -> dict[str, float]:
    """Return the seconds of each copy, by what it says."""
    seconds = durations(schedule.program, schedule.problem)
    found = zip(map(str, schedule.program), seconds, strict=True)
    return {text: number for text, number in found if text.startswith("copy")}


def updated() -> asc.Graph:
    """Return a graph that writes w on the GPU, and reads what it makes there on the host."""
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    with graph.on("cuda:0"):
        loss = graph.add(call, w, x, name="loss", writes=[w], nbytes=100)
    graph.output(y=graph.add(call, loss, name="log", on="host"))
    return graph


def test_copies_from_and_back_to_pageable_memory_are_slow_and_no_others():
    made = asc.schedule(updated(), MACHINE, costs=costs("w", w=100, x=100))
    assert copies(made) == {
        "copy w <- cpu": 2,
        "copy x <- cpu": 1,
        "copy loss -> cpu": 1,  # torch makes fresh host memory page-locked
        "copy w@1 -> cpu overwriting": 2,
    }


def test_a_view_lies_where_its_base_does():
    graph = asc.Graph()
    part = graph.input("x")[:1]
    with graph.on("cuda:0"):
        graph.output(y=graph.add(call, part, name="y"))
    (item,) = (value.name for value in graph.values if value.root != value.index)
    made = asc.schedule(graph, MACHINE, costs=costs("x", **{item: 100}))
    assert copies(made) == {f"copy {item} <- cpu": 2}


def test_between_devices_and_between_hosts_nothing_is_pageable():
    devices = [asc.Device("cpu"), asc.Device("cpu:1"), asc.Device("cuda:0"), asc.Device("cuda:1")]
    links = [
        asc.Link("cpu", "cpu:1", 100, pageable_bytes_per_second=50),
        asc.Link("cuda:0", "cuda:1", 100, pageable_bytes_per_second=50),
        asc.Link("cpu", "cuda:0", 100),
    ]
    graph = asc.Graph()
    x, z = graph.inputs("x", "z")
    graph.output(
        a=graph.add(call, x, name="a", on="cpu:1"), b=graph.add(call, z, name="b", on="cuda:1")
    )
    homes = {"z": "cuda:0"}
    made = asc.schedule(
        graph, asc.Machine(devices, links), inputs=homes, costs=costs("x", "z", x=100, z=100)
    )
    assert list(copies(made).values()) == [1, 1]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "round_robin"])
def test_policies_see_that_a_copy_is_slow(policy: str) -> None:
    """The GPU saves 1.5 s: more than a copy of page-locked memory takes, less than one of other."""
    graph = asc.Graph()
    graph.output(y=graph.add(call, graph.input("x"), name="y", seconds={"cpu": 2.0, "cuda:0": 0.5}))
    fast, slow = (
        asc.schedule(graph, MACHINE, policy=policy, costs=costs(*pageable, x=100))
        for pageable in ("", "x")
    )
    assert (fast.placement.device["y"], slow.placement.device["y"]) == ("cuda:0", "cpu")


def test_real_machines_ask_the_examples():
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=x + torch.ones(3))
    examples = {"x": torch.ones(3)}
    (constant,) = (value.name for value in graph.sources if value.tensor is not None)
    real = asc.schedule(graph, MACHINE, examples=examples, backend="host")
    assert real.costs.pageable == {"x", constant}
    imagined = asc.schedule(graph, asc.Machine.emulated(gpus=1), examples=examples)
    assert imagined.costs.pageable == frozenset()
    meta = asc.schedule(
        graph, MACHINE, examples={"x": torch.ones(3, device="meta")}, backend="host"
    )
    assert "x" not in meta.costs.pageable


def test_a_saved_schedule_keeps_it(tmp_path: Path) -> None:
    made = asc.schedule(updated(), MACHINE, costs=costs("x", "w", w=100), backend="host")
    made.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["costs"]["pageable"] == ["w", "x"]
    loaded = asc.load(tmp_path / "plan.json", updated())
    assert (loaded.costs, loaded.machine, loaded.makespan) == (
        made.costs,
        made.machine,
        made.makespan,
    )


def test_machines_keep_it_as_json_and_say_it():
    assert asc.Machine.from_json(MACHINE.to_json()) == MACHINE
    assert str(MACHINE).endswith("5e-08 GB/s of pageable memory")
    assert "pageable" not in asc.Machine([asc.Device("cpu")]).to_json()
    assert MACHINE.slower(2).links[0].pageable_bytes_per_second == 25


def test_links_of_the_host_have_half_their_rate_for_it():
    machine = asc.Machine.emulated(gpus=2, link="nvlink4")
    rates = {(k.source, k.destination): k.pageable_bytes_per_second for k in machine.links}
    assert rates == {
        ("cpu", "cuda:0"): 12.5e9,
        ("cpu", "cuda:1"): 12.5e9,
        ("cuda:0", "cuda:1"): None,
    }


@pytest.mark.parametrize(
    ("rate", "reason"), [(0, "above 0"), (101, "at most"), ("fast", "above 0")]
)
def test_rates_that_cannot_be(rate: Any, reason: str) -> None:
    with pytest.raises(asc.MachineError, match=reason):
        asc.Machine(MACHINE.devices, [dataclasses.replace(LINK, pageable_bytes_per_second=rate)])


def test_names_that_cannot_be():
    with pytest.raises(asc.ScheduleError, match="frozenset"):
        asc.Costs(pageable=["x"])  # type: ignore[arg-type]
    with pytest.raises(asc.ScheduleError, match="'z' pageable"):
        asc.schedule(updated(), MACHINE, costs=costs("z"))
