"""Machines with storage devices."""

from __future__ import annotations

import math
from typing import Any

import pytest

import autosched as asc
from autosched.machine.device import Device, Link


def test_a_machine_may_have_storage_devices() -> None:
    machine = asc.Machine.emulated(gpus=1, storage=2e9)
    assert machine.names == ("cpu", "cuda:0", "disk:0")
    assert (machine.computing, machine.storage) == (("cpu", "cuda:0"), ("disk:0",))
    assert (machine.host, machine.accelerators) == ("cpu", ("cuda:0",))
    assert machine.physical["disk:0"] is None
    assert machine.imagined
    assert str(machine).splitlines()[2::2] == ["disk:0: storage", "disk:0 <-> cpu: 2 GB/s, 100 us"]
    assert asc.Machine.from_json(machine.to_json()) == machine
    assert machine.slower(2).copy_seconds("disk:0", "cpu", 1e9) == pytest.approx(1 + 2e-4)
    assert asc.Machine.local(gpus=0, storage=1e9).storage == ("disk:0",)
    two = machine.with_storage(1e9, 0.0, name="disk:1")
    assert two.storage == ("disk:0", "disk:1")
    assert math.isinf(two.copy_seconds("disk:0", "disk:1", 1))


def test_a_machine_without_a_cpu_reads_into_its_first_device_that_computes() -> None:
    devices = [Device("disk:0"), Device("cuda:0")]
    assert asc.Machine(devices, [Link("disk:0", "cuda:0", 1e9)]).host == "cuda:0"


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        (["disk:0"], [], "a machine needs a device that is no storage device"),
        (["cpu", "disk:0"], [], "must be linked to the host, 'cpu', alone; it is linked to none"),
        (["cpu", "cuda:0", "disk:0"], [("disk:0", "cuda:0")], "it is linked to 'cuda:0'"),
        (
            ["cpu", "cuda:0", "disk:0"],
            [("disk:0", "cuda:0"), ("disk:0", "cpu")],
            "it is linked to 'cpu', 'cuda:0'",
        ),
    ],
)
def test_storage_is_linked_to_the_host_alone(devices: Any, links: Any, message: str) -> None:
    with pytest.raises(asc.MachineError, match=message):
        asc.Machine(map(Device, devices), [Link(*ends, 1e9) for ends in links])


def test_what_is_wrong_with_a_storage_device_is_told() -> None:
    machine = asc.Machine.emulated(gpus=0)
    for name in ("cuda:0", "disk:0/x", "storage"):
        with pytest.raises(asc.MachineError, match="is named 'disk:0' or 'disk:1', got"):
            machine.with_storage(1e9, name=name)
    with pytest.raises(asc.MachineError, match="'disk:0' occurs twice"):
        machine.with_storage(1e9).with_storage(1e9)
    with pytest.raises(asc.MachineError, match="several ranks has no storage devices"):
        asc.Machine.emulated(gpus=0, hosts=2).with_storage(1e9)
    with pytest.raises(asc.MachineError, match="several ranks has no storage devices"):
        asc.Machine.emulated(gpus=0, hosts=2, storage=1e9)
    with pytest.raises(asc.MachineError, match="bytes_per_second of Link"):
        machine.with_storage(0)
    with pytest.raises(asc.MachineError, match="has 2 streams; 1 to 1 are possible"):
        Device("disk:0", streams=2)
