"""Programs of graphs that read files: where the reads are, and what they need of memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autosched as asc
from autosched.graph.files import StoredTensor
from autosched.policies.simple import single_on
from autosched.program.program import Copy

SIZE = 32
NBYTES = SIZE * SIZE * 4


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def model(folder: Path, layers: int, passes: int = 1) -> asc.Graph:
    """Return a graph of layers in a row, which reads each weight from a file."""
    graph = asc.Graph("layers")
    x = graph.input("x", nbytes=NBYTES)
    weights = []
    for i in range(layers):
        path = folder / f"w{i}.safetensors"
        save_file(
            {f"w{i}": torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(i))}, path
        )
        weights.append(graph.read(path, f"w{i}"))
    for i, w in enumerate(weights * passes):
        x = graph.add(layer, x, w, name=f"layer{i}", nbytes=NBYTES, seconds=1e-3)
    graph.output(y=x)
    return graph


def limited(machine: asc.Machine, **values: float) -> asc.Machine:
    """Return the machine with memory for so many values on devices, by kind."""
    devices = [
        replace(d, nbytes=values[d.kind] * NBYTES) if d.kind in values else d
        for d in machine.devices
    ]
    return asc.Machine(devices, machine.links)


def copies(schedule: asc.Schedule) -> list[str]:
    return [str(i) for i in schedule.program if isinstance(i, Copy)]


def test_a_read_is_a_copy_from_storage_to_the_host_and_goes_on_from_there(tmp_path: Path) -> None:
    machine = asc.Machine.emulated(gpus=1, storage=1e9)
    schedule = asc.schedule(model(tmp_path, 2), machine, policy=single_on("cuda:0"))
    assert str(schedule) == (
        "input x on cpu\n"
        "cuda:0/copy-in  copy x <- cpu\n"
        "disk:0/read     run w0\n"
        "disk:0/read     copy w0 -> cpu\n"
        "disk:0/read     free w0\n"
        "disk:0/read     record e0\n"
        "cuda:0/copy-in  wait e0\n"
        "cuda:0/copy-in  copy w0 <- cpu\n"
        "cuda:0/copy-in  record e1\n"
        "disk:0/read     run w1\n"
        "disk:0/read     copy w1 -> cpu\n"
        "disk:0/read     free w1\n"
        "disk:0/read     record e2\n"
        "cuda:0/copy-in  wait e2\n"
        "cuda:0/copy-in  copy w1 <- cpu\n"
        "cuda:0/copy-in  record e3\n"
        "cuda:0/compute  wait e1\n"
        "cuda:0/compute  run layer0\n"
        "cuda:0/compute  wait e3\n"
        "cuda:0/compute  run layer1\n"
        "cuda:0/compute  free layer0\n"
        "cuda:0/compute  record e4\n"
        "cuda:0/copy-in  wait e4\n"
        "cuda:0/copy-in  free x\n"
        "cuda:0/copy-in  free w0\n"
        "cuda:0/copy-in  free w1\n"
        "cpu/compute     wait e3\n"
        "cpu/compute     free w0\n"
        "cpu/compute     free w1\n"
        "output y on cuda:0"
    )


def test_without_storage_the_host_reads(tmp_path: Path) -> None:
    schedule = asc.schedule(
        model(tmp_path, 1), asc.Machine.emulated(gpus=1), policy=single_on("cuda:0")
    )
    assert schedule.placement.device == {"w0": "cpu", "layer0": "cuda:0"}
    assert copies(schedule) == ["copy x <- cpu", "copy w0 <- cpu"]


def test_what_is_not_used_is_not_read_and_outputs_are_on_the_host(tmp_path: Path) -> None:
    graph = model(tmp_path, 2)
    graph.outputs.clear()
    graph.output(graph.value("w1"), graph.value("layer0"))
    graph.read(tmp_path / "w0.safetensors", "w0")
    schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0, storage=1e9))
    assert copies(schedule) == ["copy w0 -> cpu", "copy w1 -> cpu"]
    assert dict(schedule.program.outputs) == {"w1": "cpu", "layer0": "cpu"}


def test_reads_are_predicted_to_take_place_while_layers_compute(tmp_path: Path) -> None:
    graph = model(tmp_path, 6)
    machine = asc.Machine.emulated(gpus=0).with_storage(NBYTES / 1e-3, 0.0)
    schedule = asc.schedule(graph, machine)
    assert schedule.makespan == pytest.approx(7e-3)  # the first read, and then each with a layer
    assert schedule.lower_bound == pytest.approx(7e-3)
    timeline = schedule.simulate()
    assert timeline.computing("cpu") == pytest.approx(6e-3)


@pytest.mark.parametrize("backend", ["threads", "emulated"])
def test_reads_take_place_while_layers_compute(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second weight arrives only after the first layer has begun, and that does not matter."""
    graph = model(tmp_path, 2)
    begun = threading.Event()
    read = StoredTensor.read

    def reading(stored: StoredTensor, pinned: bool = False) -> Any:
        assert not stored.path.endswith("w1.safetensors") or begun.wait(timeout=60)
        return read(stored, pinned)

    def first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        begun.set()
        return layer(x, w)

    graph.tasks[2] = replace(graph.task("layer0"), fn=first)
    monkeypatch.setattr(StoredTensor, "read", reading)
    machine = asc.Machine.emulated(gpus=0, storage=1e9)
    with asc.schedule(graph, machine, backend=backend) as schedule:
        schedule(x=torch.ones(SIZE, SIZE))


class Held:
    """The bytes of what was read and is still in memory, and the most there ever were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.most = 0
        read = StoredTensor.read

        def counted(stored: StoredTensor, pinned: bool = False) -> Any:
            tensor = read(stored, pinned)
            self.add(stored.nbytes)
            weakref.finalize(tensor, self.add, -stored.nbytes)
            return tensor

        monkeypatch.setattr(StoredTensor, "read", counted)

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)


@pytest.mark.parametrize("backend", ["threads", "emulated", "virtual", "host"])
def test_a_model_of_three_times_the_memory_streams_through_it(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = model(tmp_path, 15)
    x = torch.eye(SIZE)
    expected = graph.run_serial(x=x)["y"]
    machine = limited(asc.Machine.emulated(gpus=0, storage=1e9), cpu=5)
    held = Held(monkeypatch)
    with asc.schedule(graph, machine, backend=backend) as schedule:
        assert schedule.peak_bytes["cpu"] <= 5 * NBYTES < 15 * NBYTES
        for _ in range(2):
            assert torch.equal(schedule(x=x)["y"], expected)
        assert 0 < held.most <= 3 * NBYTES  # with the input and a result
        assert held.now == 0
        assert copies(schedule) == [f"copy w{i} -> cpu" for i in range(15)]
        # Reads overlap with layers although memory is short.
        assert schedule.makespan < schedule.serial_seconds


def test_outputs_that_are_read_at_the_end_stay(tmp_path: Path) -> None:
    graph = asc.Graph()
    save_file({name: torch.rand(4) for name in "xy"}, tmp_path / "w.safetensors")
    x, y = graph.read(tmp_path / "w.safetensors", list("xy")).values()
    half = graph.add(torch.neg, y, name="half", nbytes=16, on="cpu")
    graph.output(y, half, x)
    machine = limited(asc.Machine.emulated(gpus=1, storage=1e9), cpu=2 * 16 / NBYTES)
    with asc.schedule(graph, machine, policy="single", backend="virtual") as schedule:
        assert dict(schedule.program.outputs) == {"y": "cpu", "half": "cuda:0", "x": "cpu"}
        found = schedule()
        assert all(torch.equal(found[name], item) for name, item in graph.run_serial().items())


def read_again(schedule: asc.Schedule) -> int:
    """Return how many reads there are more than values."""
    reads = [i.value for i in schedule.program if isinstance(i, Copy) and i.source == "disk:0"]
    return len(reads) - len(set(reads))


@pytest.mark.parametrize(
    ("cpu", "cuda", "again"), [(5, None, True), (4, 4, True), (None, 4, False), (4, None, False)]
)
def test_what_was_dropped_is_read_again_and_never_spilled(
    tmp_path: Path, cpu: int | None, cuda: int | None, again: bool
) -> None:
    """A host with room keeps what a GPU dropped, and a GPU what the host dropped."""
    graph = model(tmp_path, 6, passes=2)
    x = torch.eye(SIZE)
    machine = asc.Machine.emulated(gpus=0 if cpu == 5 else 1, storage=1e9)
    limits = {"cpu": cpu, "cuda": cuda}
    machine = limited(machine, **{kind: n for kind, n in limits.items() if n is not None})
    policy = single_on(machine.computing[-1])
    with asc.schedule(graph, machine, policy=policy, backend="virtual") as schedule:
        assert (read_again(schedule) > 0) == again
        assert all(schedule.peak_bytes[device.name] <= device.nbytes for device in machine.devices)
        sent = [i for i in schedule.program if isinstance(i, Copy) and i.source == "cuda:0"]
        assert not sent
        assert torch.equal(schedule(x=x)["y"], graph.run_serial(x=x)["y"])


def test_the_policies_know_how_long_storage_is_busy(tmp_path: Path) -> None:
    graph = model(tmp_path, 3)
    machine = asc.Machine.emulated(gpus=2).with_storage(NBYTES / 1.0, 0.5)
    for policy in ("heft", "round_robin", "search", "single"):
        schedule = asc.schedule(graph, machine, policy=policy)
        assert 4.5 < schedule.makespan < 4.6
        assert 4.5 < schedule.lower_bound <= schedule.makespan


def refused(schedule: asc.Schedule, old: str, new: str) -> str:
    text = str(schedule.program)
    assert old in text
    with pytest.raises(asc.ProgramError) as caught:
        asc.verify(asc.Program.parse(text.replace(old, new)), schedule.graph, schedule.machine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cpu/compute  run layer0", "disk:0/read  run layer0", "task 'layer0' cannot run on disk"),
        ("disk:0/read  run w0", "cpu/compute  run w0", "task 'w0' must run on disk:0"),
        ("disk:0/read  free w0", "disk:0/read  copy layer0 <- cpu", "which is only read"),
        ("cpu/compute  wait e0\n", "", "is not waited for"),
        ("disk:0/read  copy w0 -> cpu\n", "", "a copy is missing"),
    ],
)
def test_verify_refuses(tmp_path: Path, old: str, new: str, message: str) -> None:
    machine = asc.Machine.emulated(gpus=0, storage=1e9)
    schedule = asc.schedule(model(tmp_path, 2), machine)
    assert message in refused(schedule, old, new)


def names(items: Sequence[Any]) -> list[str]:
    return [item.name for item in items]


def test_two_storage_devices_read_at_once(tmp_path: Path) -> None:
    graph = model(tmp_path, 1)
    second = graph.read(tmp_path / "w0.safetensors", ["w0"], prefix="second.", on="disk:1")["w0"]
    graph.output(second)
    machine = asc.Machine.emulated(gpus=0).with_storage(NBYTES, 0.0)
    machine = machine.with_storage(NBYTES, 0.0, name="disk:1")
    schedule = asc.schedule(graph, machine)
    assert schedule.makespan == pytest.approx(1.001)
    assert names(schedule.simulate().spans).count("second.w0") == 2
    with pytest.raises(asc.MachineError, match="no device 'disk:1'"):
        asc.schedule(graph, asc.Machine.emulated(gpus=0, storage=1e9))
