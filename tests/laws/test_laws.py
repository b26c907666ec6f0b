"""The laws, over every policy and every backend that runs without an accelerator."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.policies import POLICIES
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.runtime.backends import Step
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.virtual import Virtual
from autosched.runtime.threads.interleaver import Interleaver
from autosched.runtime.threads.tapes import Fault, Late, Tape, Team
from autosched.testing import DEVICES, graphs, inputs_for, machines
from autosched.verification.verify import verify
from tests.sample_policies import policies, under_every_policy

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
CPUS, GPUS = ("cpu", "cpu:1"), ("cuda:0", "cuda:1", "cuda:2")


def equal(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # type: ignore[arg-type]


def serial(graph: asc.Graph) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run serially; return the outputs and what became of the inputs."""
    torch.manual_seed(3)
    inputs = inputs_for(graph)
    return graph.run_serial(**inputs), inputs


def assert_equals_serial(schedule: asc.Schedule, graph: asc.Graph, runs: int = 3) -> None:
    expected, expected_inputs = serial(graph)
    for _ in range(
        runs
    ):  # the first run is watched, later ones are not; nothing may be left behind by one
        torch.manual_seed(3)
        inputs = inputs_for(graph)
        outputs = schedule(**inputs)
        assert list(outputs) == list(expected)
        assert all(torch.equal(outputs[label], expected[label]) for label in expected)
        assert all(torch.equal(inputs[name], expected_inputs[name]) for name in inputs)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines())
def test_law_1_a_scheduled_run_equals_the_serial_run_at_once(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="host") as schedule:
        assert_equals_serial(schedule, graph)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines())
def test_law_1_a_scheduled_run_equals_the_serial_run_emulated(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="emulated") as schedule:
        assert_equals_serial(schedule, graph)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines(), data=st.data())
def test_law_1_a_scheduled_run_equals_the_serial_run_in_every_legal_interleaving(
    policy: str, graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    backend = Virtual(choose=lambda ready: data.draw(st.sampled_from(ready)))
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend=backend) as schedule:
        assert_equals_serial(schedule, graph, runs=2)


@under_every_policy
@given(policy=policies, graph=graphs(CPUS), machine=machines(CPUS))
def test_law_1_a_scheduled_run_equals_the_serial_run_on_threads(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="threads") as schedule:
        assert_equals_serial(schedule, graph)


@given(graph=graphs(), machine=machines(), data=st.data())
def test_law_1_outputs_go_where_they_are_wanted(
    graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    wanted = {label: data.draw(st.sampled_from(DEVICES)) for label in graph.outputs}
    with asc.schedule(
        graph, machine, policy="heft", costs=COSTS, outputs=wanted, backend="host"
    ) as schedule:
        assert dict(schedule.program.outputs) == wanted
        assert_equals_serial(schedule, graph)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines())
def test_law_2_nothing_can_be_left_out(policy: str, graph: asc.Graph, machine: asc.Machine) -> None:
    program = asc.schedule(graph, machine, policy=policy, costs=COSTS).program
    for i, instruction in enumerate(program.instructions):
        assert isinstance(instruction, (Run, Copy, Record, Wait, Free))
        shorter = replace(
            program, instructions=program.instructions[:i] + program.instructions[i + 1 :]
        )
        try:
            verify(shorter, graph)
        except asc.ProgramError:
            continue
        pytest.fail(
            f"accepted without line {i}, {instruction} on {instruction.stream}:\n{graph}\n{program}"
        )


@given(graph=graphs(), machine=machines())
def test_law_3_no_makespan_is_below_a_bound_and_auto_is_not_worse_than_what_it_tries(
    graph: asc.Graph, machine: asc.Machine
) -> None:
    best = asc.schedule(graph, machine, costs=COSTS)
    for policy in POLICIES:
        schedule = asc.schedule(graph, machine, policy=policy, costs=COSTS)
        if policy in ("single", "round_robin", "heft", "portfolio"):
            assert best.makespan <= schedule.makespan
        assert schedule.makespan >= schedule.lower_bound * (1 - 1e-9)
        assert schedule.makespan <= schedule.serial_seconds * (1 + 1e-9)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines())
def test_law_4_planning_twice_gives_the_same_and_text_reads_back(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    program = asc.schedule(graph, machine, policy=policy, costs=COSTS).program
    assert str(asc.schedule(graph, machine, policy=policy, costs=COSTS).program) == str(program)
    assert Program.parse(str(program)) == program


def test_law_4_the_order_of_sets_and_dicts_of_strings_does_not_matter() -> None:
    code = """
import autosched as asc, operator
graph = asc.Graph()
values = list(graph.inputs("a", "b", "c"))
for i in range(60):
    values.append(graph.add(operator.add, values[i // 2], values[-1 - i % 3]))
graph.output(*values[-4:])
devices = [asc.Device("cpu", streams=3), *(asc.Device(f"cuda:{i}", streams=3) for i in range(2))]
machine = asc.Machine(devices, asc.Machine.emulated(gpus=2).links)
for policy in ("auto", "heft", "round_robin", "single"):
    print(asc.schedule(graph, machine, policy=policy).program)
"""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    assert printed.getvalue() == run.stdout
    assert "compute2" in run.stdout


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines(), data=st.data())
def test_law_5_every_interleaving_in_virtual_time_gives_the_timeline_of_the_simulator(
    policy: str, graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    for choose in (None, lambda ready: data.draw(st.sampled_from(ready))):
        with asc.schedule(
            graph, machine, policy=policy, costs=COSTS, backend=Virtual(choose)
        ) as schedule:
            assert schedule.profile(**inputs_for(graph)) == schedule.simulate()


class AnyStep(Virtual):
    """Goes on with any stream after each step, where ``Virtual`` ends the instruction first."""

    class Switched(Interleaver):
        def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
            steps = {
                name: [(n, step) for n, (_, step) in enumerate(line)]
                for name, line in tape.steps.items()
            }
            return super().run(Tape(steps, tape.locks), deadline)

    def team(self, threads: Sequence[str]) -> Team:
        return AnyStep.Switched(self.choose)


@pytest.mark.parametrize("policy", ["heft", "round_robin"])
@given(graph=graphs(GPUS), machine=machines(GPUS), data=st.data())
def test_law_5_threads_that_are_switched_between_any_two_steps_give_the_timeline_of_the_simulator(
    policy: str, graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    """So no thread is let go before what it waits for was issued; a copy between GPUs holds a stream of each."""
    backend = AnyStep(lambda ready: data.draw(st.sampled_from(ready)))
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend=backend) as schedule:
        assert schedule.profile(**inputs_for(graph)) == schedule.simulate()


class PlantedError(Exception):
    pass


@pytest.mark.parametrize("backend", ["host", "emulated"])
@given(graph=graphs(views=False), machine=machines(), data=st.data())
def test_law_6_a_failing_task_is_named_and_what_depends_on_it_does_not_run(
    backend: str, graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(graph) - 1))
    ran: list[int] = []
    broken = [True]

    def spied(i: int, fn: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            if broken and i == index:
                raise PlantedError(f"task {i}")
            ran.append(i)
            return fn(*args, **kwargs)  # type: ignore[operator]

        return call

    spy = graph.pinned()
    spy.tasks[:] = [replace(task, fn=spied(task.index, task.fn)) for task in graph.tasks]
    behind = {index}
    for task in spy.tasks:
        if any(d.task in behind and d.kind in ("data", "order") for d in task.dependencies):
            behind.add(task.index)
    with asc.schedule(spy, machine, policy="heft", costs=COSTS, backend=backend) as schedule:
        for _ in range(2):
            ran.clear()
            with pytest.raises(
                asc.TaskError, match=rf"task '{graph.tasks[index].name}' on "
            ) as error:
                schedule(**inputs_for(graph))
            assert isinstance(error.value.__cause__, PlantedError)
            assert graph.tasks[index].source in str(error.value)
            assert not behind & set(ran)
        broken.clear()
        assert_equals_serial(schedule, graph)


@under_every_policy
@given(policy=policies, graph=graphs(), machine=machines())
def test_law_7_a_run_ends_with_nothing_in_memory_but_what_is_kept(
    policy: str, graph: asc.Graph, machine: asc.Machine
) -> None:
    """Inputs, constants, outputs, and what shares memory with those."""
    with asc.schedule(graph, machine, policy=policy, costs=COSTS, backend="host") as schedule:
        schedule(**inputs_for(graph))  # makes the executor, and is watched; the next one is not
        schedule._executor.code = None  # which Python clears itself
        memory = schedule._executor.memory
        at_the_end: list[set[int]] = []

        def outputs() -> dict[str, object]:
            at_the_end.append({slot for slot, item in enumerate(memory.data) if item is not None})
            return type(memory).outputs(memory)

        memory.outputs = outputs
        schedule(**inputs_for(graph))
        kept = [*memory.homes.values(), *(slot for _, slot in memory._outputs)]
        constants = {slot for slot, item in enumerate(memory._blank) if item is not None}
        assert at_the_end[0] <= constants.union(*(memory.sharing[slot] for slot in kept))


class Entered(Host):
    """A thread for each device, which puts its runs and copies on the streams that it has entered last."""

    def __init__(self) -> None:
        super().__init__()
        self.current: dict[int, Sequence[Stream]] = {}

    def thread(self, stream: Stream) -> str:
        return stream.device

    def enter(self, streams: Sequence[Stream]) -> Step:
        return lambda: self.current.update({threading.get_ident(): streams})

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        def step() -> None:
            assert self.current.get(threading.get_ident()) == streams
            call()

        return step


@given(graph=graphs(), machine=machines())
def test_law_8_what_is_put_on_streams_finds_them_entered_by_its_thread(
    graph: asc.Graph, machine: asc.Machine
) -> None:
    with asc.schedule(
        graph, machine, policy="round_robin", costs=COSTS, backend=Entered()
    ) as schedule:
        assert_equals_serial(schedule, graph, runs=2)
