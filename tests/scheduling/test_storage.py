"""What schedules that read files say, draw, save and write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autosched as asc
from autosched.testing.checking import machines_for

X = torch.eye(16)


@pytest.fixture
def graph(tmp_path: Path) -> asc.Graph:
    graph = asc.Graph("stored")
    x = graph.input("x")
    for i in range(3):
        path = tmp_path / f"w{i}.safetensors"
        save_file({f"w{i}": (torch.arange(256.0) / (i + 256)).view(16, 16)}, path)
        w = graph.read(path, f"w{i}")
        x = torch.tanh(x @ w.t())
    graph.output(y=x)
    return graph


MACHINES = [
    asc.Machine.emulated(gpus=0),
    asc.Machine.emulated(gpus=0, storage=1e9),
    asc.Machine.emulated(gpus=2, storage=1e9),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_saved_schedules_and_generated_code_read_the_same(
    tmp_path: Path, graph: asc.Graph, machine: asc.Machine
) -> None:
    expected = graph.run_serial(x=X)["y"]
    schedule = asc.schedule(graph, machine, examples={"x": X}, policy="round_robin")
    schedule.save(tmp_path / "schedule.json")
    with asc.load(tmp_path / "schedule.json", graph) as loaded:
        assert loaded.program == schedule.program
        assert torch.equal(loaded(x=X)["y"], expected)
    names: dict[str, Any] = {}
    code = re.sub(r'device\("cuda:\d"\)', 'device("cpu")', schedule.code)
    exec(code, names)
    assert "autosched" not in code.replace("Written by autosched", "")
    assert torch.equal(names["step"](X)["y"], expected)
    (tmp_path / "w1.safetensors").write_bytes(b"")
    with pytest.raises(EOFError, match=r"w1\.safetensors ended while it was read"):
        names["step"](X)


def test_pictures_have_a_row_for_storage(tmp_path: Path, graph: asc.Graph) -> None:
    schedule = asc.schedule(graph, MACHINES[2], examples={"x": X})
    schedule.draw(tmp_path / "schedule.svg")
    drawn = (tmp_path / "schedule.svg").read_text()
    assert "disk:0" in drawn
    assert ">read<" in drawn
    graph.draw(tmp_path / "graph.svg", schedule.placement.device)
    assert "disk:0" in (tmp_path / "graph.svg").read_text()
    assert schedule.peak_bytes["disk:0"] == 0


def test_explanations_call_reads_what_they_are(graph: asc.Graph) -> None:
    schedule = asc.schedule(graph, MACHINES[1], examples={"x": X})
    report = str(schedule.explain())
    assert "copy w0, disk:0 -> cpu" in report
    assert "waiting for memory or order" not in report
    assert re.search(r"Twice as fast  links -\d\d%", report)
    assert "bound to disk:0" in str(schedule.explain("w1"))


def test_profiles_and_checks_see_reads(graph: asc.Graph) -> None:
    with asc.schedule(graph, MACHINES[1], examples={"x": X}, check="bytes") as schedule:
        schedule(x=X)
        spans = schedule.profile(x=X).spans
    read = [span.name for span in spans if span.kind == "copy"]
    assert sorted(read) == ["w0", "w1", "w2"]
    assert all(span.nbytes == 1024 for span in schedule.simulate().spans if span.kind == "copy")


def test_tasks_that_read_are_neither_merged_nor_fused(graph: asc.Graph) -> None:
    merged = asc.merge(graph, {task.name: "all" for task in graph.tasks})
    assert [task.name for task in merged.tasks if task.reads_file] == ["w0", "w1", "w2"]
    with asc.schedule(merged, MACHINES[1]) as schedule:
        assert torch.equal(schedule(x=X)["y"], graph.run_serial(x=X)["y"])


def test_estimates_know_the_bytes_of_files(graph: asc.Graph) -> None:
    costs = asc.Costs.estimate(graph, {"x": X})
    assert costs.nbytes["w0"] == costs.work["w0"].nbytes == 1024


def test_values_kept_together_with_what_is_read_are_not_on_storage(graph: asc.Graph) -> None:
    x, w = graph.value("x"), graph.value("w0")
    graph.together(x, w)
    x.mul_(2)
    w.mul_(2)
    schedule = asc.schedule(graph, MACHINES[2], policy="round_robin")
    device = schedule.placement.device
    assert device["w0"] == "disk:0"
    assert device["mul"] == device["mul_1"] != "disk:0"


def test_random_interleavings_are_checked_with_storage_too(graph: asc.Graph) -> None:
    asc.testing.check(graph, examples={"x": X}, policies=["single"], interleavings=1)
    names = {name for machine in machines_for(graph) for name in machine.storage}
    assert names == {"disk:0"}
