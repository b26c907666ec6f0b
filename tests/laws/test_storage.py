"""The laws for graphs that read files: what random graphs are given, they read here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.program.program import Copy, Run
from autosched.runtime.backends.virtual import Virtual
from autosched.simulation.footprint import footprint
from autosched.testing import graphs, inputs_for, machines
from autosched.verification.verify import verify
from tests.gpu.fake_gpu import playing
from tests.gpu.for_gpus import loaded, on_gpus
from tests.gpu.test_accelerator import left, physical, same
from tests.laws.test_laws import COSTS, CPUS, assert_equals_serial
from tests.sample_policies import policies

few = settings(max_examples=max(1, settings().max_examples // 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


def reading(graph: asc.Graph, folder: Path, names: set[str]) -> asc.Graph:
    """Return a graph that reads these inputs from files with what ``inputs_for`` gives."""
    made = asc.Graph("reading")
    given = {}
    for name, tensor in inputs_for(graph).items():
        path = folder / f"{name}.bin"
        if name in names:
            if not path.exists():
                tensor.numpy().tofile(path)
            given[name] = made.read(path, dtype=torch.float64, shape=tensor.shape)
        else:
            with made.on(graph.value(name).home or asc.Machine.emulated().host):
                given[name] = made.input(name)
    made.output(**made.include(graph, given))
    return made


def drawn(data: st.DataObject, folder: Path, devices: tuple[str, ...]) -> asc.Graph:
    graph = data.draw(graphs(devices))
    names = graph.input_names
    first = data.draw(st.integers(0, len(names) - 1))  # earlier ones keep the shape of their place
    return reading(graph, folder, {*names[first:]})


DEVICES = ("cpu", "cuda:0", "cuda:1")


def stored(data: st.DataObject, devices: tuple[str, ...]) -> asc.Machine:
    machine = data.draw(machines(devices))
    return machine.with_storage(data.draw(st.sampled_from([1e7, 1e9])), 1e-6)


@few
@given(policy=policies, data=st.data(), backend=st.sampled_from(["host", "emulated"]))
def test_a_scheduled_run_equals_the_serial_run(
    folder: Path, policy: str, data: st.DataObject, backend: str
) -> None:
    graph, machine = drawn(data, folder, DEVICES), stored(data, DEVICES)
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend=backend) as schedule:
        assert_equals_serial(schedule, graph, runs=2)


@few
@given(policy=policies, data=st.data())
def test_so_does_every_legal_interleaving(folder: Path, policy: str, data: st.DataObject) -> None:
    graph, machine = drawn(data, folder, DEVICES), stored(data, DEVICES)
    backend = Virtual(choose=lambda ready: data.draw(st.sampled_from(ready)))
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend=backend) as schedule:
        assert_equals_serial(schedule, graph, runs=1)


@few
@given(policy=policies, data=st.data(), has_storage=st.booleans())
def test_so_does_a_run_on_threads(
    folder: Path, policy: str, data: st.DataObject, has_storage: bool
) -> None:
    graph = drawn(data, folder, CPUS)
    machine = stored(data, CPUS) if has_storage else data.draw(machines(CPUS))
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="threads") as schedule:
        assert_equals_serial(schedule, graph, runs=2)


@few
@given(policy=policies, data=st.data(), gpus=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_so_does_a_run_on_played_gpus_and_the_generated_code(
    folder: Path, policy: str, data: st.DataObject, gpus: int, seed: int
) -> None:
    graph = on_gpus(drawn(data, folder, DEVICES))
    machine = physical(stored(data, DEVICES), gpus)
    with (
        playing(gpus, seed),
        asc.schedule(graph, machine, policy=policy, costs=COSTS) as schedule,
    ):
        expected = left(schedule.run_serial, machine, schedule.graph)
        for run in (schedule, schedule, loaded(schedule)):
            assert same(left(run, machine, schedule.graph), expected)


@few
@given(policy=policies, data=st.data())
def test_nothing_can_be_left_out_and_the_text_reads_back(
    folder: Path, policy: str, data: st.DataObject
) -> None:
    graph, machine = drawn(data, folder, DEVICES), stored(data, DEVICES)
    schedule = asc.schedule(graph, machine, policy=policy, costs=COSTS)
    program = schedule.program
    assert asc.Program.parse(str(program)) == program
    assert schedule.lower_bound * (1 - 1e-9) <= schedule.makespan
    for i in range(len(program)):
        kept = program.instructions[:i] + program.instructions[i + 1 :]
        with pytest.raises(asc.ProgramError):
            verify(replace(program, instructions=kept), graph)


@few
@given(policy=policies, data=st.data(), cpu=st.integers(2, 12), gpu=st.integers(2, 8))
def test_limited_memory_holds_and_nothing_is_written_to_storage(
    folder: Path, policy: str, data: st.DataObject, cpu: int, gpu: int
) -> None:
    graph, machine = drawn(data, folder, DEVICES), stored(data, DEVICES)
    costs = COSTS.override(nbytes={value.name: 100 for value in graph.values})
    limits = {"cpu": cpu * 100.0, "cuda:0": gpu * 100.0}
    devices = [replace(d, nbytes=limits.get(d.name, d.nbytes)) for d in machine.devices]
    machine = asc.Machine(devices, machine.links, contention=machine.contention, imagined=True)
    backend = Virtual(choose=lambda ready: data.draw(st.sampled_from(ready)))
    try:
        schedule = asc.schedule(graph, machine, policy=policy, costs=costs, backend=backend)
    except MemoryLimitError:
        return
    with schedule:
        program = schedule.program
        held = footprint(program, schedule.graph, machine, costs)
        assert all(max(held[name]) <= limit for name, limit in limits.items())
        assert not any(isinstance(i, Copy) and i.destination == "disk:0" for i in program)
        reads = [i.task for i in program if isinstance(i, Run) and i.stream.device == "disk:0"]
        assert all(graph.task(name).reads_file for name in reads)
        assert_equals_serial(schedule, graph, runs=1)
