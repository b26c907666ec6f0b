"""Measured storage devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import autosched as asc
from autosched.measurement import measured_links


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    return tmp_path / "file"


def test_a_file_shows_how_fast_its_device_is(file: Path) -> None:
    machine = asc.measure_storage(file, asc.Machine.local(gpus=0), repeat=2)
    assert machine.storage == ("disk:0",)
    link = machine.link("disk:0", "cpu")
    assert link is not None
    assert link.bytes_per_second > 1e6
    again = asc.measure_storage(file, machine, name="disk:0", repeat=1)
    assert again.storage == ("disk:0",)
    assert asc.measure_machine(again) == measured_links(again) == again


def test_what_cannot_be_measured_is_told(file: Path) -> None:
    with pytest.raises(asc.MachineError, match="an emulated machine has nothing to measure"):
        asc.measure_storage(file, asc.Machine.emulated())
    file.write_bytes(bytes(2000))
    with pytest.raises(asc.MachineError, match="of 2,000 B is too small to measure its device"):
        asc.measure_storage(file, asc.Machine.local(gpus=0))


def test_tasks_that_read_are_measured_as_those_of_a_host(tmp_path: Path) -> None:
    save_file({"file": torch.ones(4)}, tmp_path / "w.safetensors")
    graph = asc.Graph()
    graph.output(y=graph.input("x") + graph.read(tmp_path / "w.safetensors", "file"))
    machine = asc.Machine.local(gpus=0, storage=1e9)
    costs = asc.measure_costs(graph, machine, {"x": torch.zeros(4)}, repeat=1)
    assert costs.seconds.keys() == {"file", "add"}
    seconds = [costs.task_seconds(graph.task("file"), device) for device in machine.devices]
    assert seconds[0] > 0
    assert seconds[1] == 0
