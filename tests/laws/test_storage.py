"""The laws of memory and of what is needed, for graphs that read files what random graphs are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.program.program import Copy, Run
from autosched.runtime.backends.virtual import Virtual
from autosched.simulation.footprint import footprint
from autosched.verification.verify import verify
from tests.laws.test_laws import COSTS, assert_equals_serial, chosen, reading
from tests.sample_policies import policies
from tests.strategies import graphs, machines

few = settings(max_examples=max(1, settings().max_examples // 3))


def drawn(data: st.DataObject, devices: tuple[str, ...]) -> asc.Graph:
    return reading(data.draw(graphs(devices)), data.draw(st.integers(0, 2)))


DEVICES = ("cpu", "cuda:0", "cuda:1")


def stored(data: st.DataObject, devices: tuple[str, ...]) -> asc.Machine:
    machine = data.draw(machines(devices))
    return machine.with_storage(data.draw(st.sampled_from([1e7, 1e9])), 1e-6)


@few
@given(policy=policies, data=st.data())
def test_nothing_can_be_left_out_and_the_text_reads_back(policy: str, data: st.DataObject) -> None:
    graph, machine = drawn(data, DEVICES), stored(data, DEVICES)
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
    policy: str, data: st.DataObject, cpu: int, gpu: int
) -> None:
    graph, machine = drawn(data, DEVICES), stored(data, DEVICES)
    costs = COSTS.override(nbytes={value.name: 100 for value in graph.values})
    limits = {"cpu": cpu * 100.0, "cuda:0": gpu * 100.0}
    devices = [replace(d, nbytes=limits.get(d.name, d.nbytes)) for d in machine.devices]
    machine = asc.Machine(devices, machine.links, contention=machine.contention, imagined=True)
    backend = Virtual(chosen(data))
    try:
        schedule = asc.schedule(graph, machine, policy=policy, costs=costs, backend=backend)
    except MemoryLimitError:
        return
    with schedule:
        program = schedule.program
        held = footprint(program, asc.Problem(schedule.graph, machine, costs))
        assert all(max(held[name]) <= limit for name, limit in limits.items())
        assert not any(isinstance(i, Copy) and i.destination == "disk:0" for i in program)
        reads = [i.task for i in program if isinstance(i, Run) and i.stream.device == "disk:0"]
        assert all(graph.task(name).reads_file for name in reads)
        assert_equals_serial(schedule, graph, runs=1)
