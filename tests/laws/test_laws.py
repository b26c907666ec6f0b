"""The laws, over every policy and every backend that runs without an accelerator."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import autosched as asc
from autosched.fusion import tracing
from autosched.policies import POLICIES
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.runtime.backends import Step
from autosched.runtime.backends.host import Host
from autosched.runtime.backends.virtual import Virtual
from autosched.runtime.threads.interleaver import Choose
from autosched.simulated_gpus import playing
from autosched.simulated_gpus.tensors import memory_of
from autosched.testing import contrary, uniform
from autosched.verification.verify import verify
from tests.codegen.test_codegen import run as run_code
from tests.fusion.regions import compiled_by, drawn_groups, fused
from tests.gpu.for_gpus import left, loaded, on_gpus, physical, same
from tests.sample_policies import policies, under_every_policy
from tests.strategies import DEVICES, graphs, inputs_for, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
CPUS, GPUS = ("cpu", "cpu:1"), ("cuda:0", "cuda:1", "cuda:2")
Call = Callable[..., Mapping[str, Any]]


def serial(graph: asc.Graph) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run serially; return the outputs and what became of the inputs."""
    torch.manual_seed(3)
    inputs = inputs_for(graph)
    return graph.run_serial(**inputs), inputs


def assert_equals_serial(schedule: Call, graph: asc.Graph, runs: int = 3) -> None:
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


# ---- law 1: a scheduled run equals the serial run, however it is run, and of whatever the graph was made


@contextlib.contextmanager
def on(backend: Any, graph: asc.Graph, machine: asc.Machine, policy: str) -> Iterator[asc.Schedule]:
    options: dict[str, Any] = {"policy": policy, "costs": COSTS, "backend": backend}
    with asc.schedule(graph, machine, **options) as schedule:
        yield schedule


def chosen(data: st.DataObject) -> Choose:
    """A choice among streams that can continue: any of them, or the same ones for long."""
    return data.draw(st.sampled_from([uniform, contrary]))(data.draw(st.integers(0, 999)))


@contextlib.contextmanager
def interleaved(
    graph: asc.Graph, machine: asc.Machine, policy: str, data: st.DataObject
) -> Iterator[Call]:
    with on(Virtual(chosen(data)), graph, machine, policy) as run:
        yield run


@contextlib.contextmanager
def as_code(
    graph: asc.Graph, machine: asc.Machine, policy: str, data: st.DataObject
) -> Iterator[Call]:
    """By the generated code, in which all devices are the CPU."""
    machine = asc.Machine(machine.devices, machine.links, imagined=True)
    schedule = asc.schedule(graph, machine, policy=policy, costs=COSTS)
    assert schedule.code.given == {}
    with torch.compiler.set_stance("force_eager"):
        yield lambda **inputs: run_code(schedule, inputs)


@contextlib.contextmanager
def inline(
    graph: asc.Graph, machine: asc.Machine, policy: str, data: st.DataObject
) -> Iterator[Call]:
    """By the function with local variables that a schedule on one CPU calls."""
    with on("host", graph, machine, policy) as schedule:
        schedule(**inputs_for(graph))  # is watched
        assert schedule._executor.local is not None
        yield schedule


WAYS: dict[str, Callable[..., Any]] = {
    "host": lambda *given: on("host", *given[:3]),
    "emulated": lambda *given: on("emulated", *given[:3]),
    "interleaved": interleaved,
    "threads": lambda *given: on("threads", *given[:3]),
    "code": as_code,
    "inline": inline,
}
PLACES = {"threads": CPUS, "inline": CPUS[:1]}  # of other ways: all devices
ONE_CPU = asc.Machine([asc.Device("cpu")])

FOLDER = tempfile.TemporaryDirectory()


def reading(graph: asc.Graph, first: int) -> asc.Graph:
    """Return a graph that reads its inputs from this one on from files, with what ``inputs_for`` gives."""
    made = asc.Graph("reading")
    given = {}
    for i, (name, tensor) in enumerate(inputs_for(graph).items()):
        path = Path(FOLDER.name, f"{name}.safetensors")
        if i >= first or len(graph.input_names) == 1:
            if not path.exists():
                save_file({name: tensor}, path)
            given[name] = made.read(path, name)
        else:  # earlier ones keep the shape of their place
            with made.on(graph.value(name).home or asc.Machine.emulated().host):
                given[name] = made.input(name)
    made.output(**made.include(graph, given))
    return made


groups = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=60, max_size=60)


def merged(graph: asc.Graph, data: st.DataObject) -> asc.Graph:
    """Merge tasks twice, by what is drawn."""
    for _ in range(2):
        drawn = zip(graph.tasks, data.draw(groups), strict=False)
        graph = asc.merge(graph, {task.name: group for task, group in drawn if group})
    return graph


CHANGES: dict[str, Callable[[asc.Graph, st.DataObject], asc.Graph]] = {
    "merged": merged,
    "fused": lambda graph, data: fused(graph, data.draw(drawn_groups)),
    "reading": lambda graph, data: reading(graph, data.draw(st.integers(0, 2))),
}


def assert_law_1(
    way: str, policy: str, data: st.DataObject, change: Callable[..., asc.Graph] | None = None
) -> None:
    places = PLACES.get(way, DEVICES)
    graph = data.draw(graphs(places))
    machine = ONE_CPU if way == "inline" else data.draw(machines(places))
    with compiled_by():
        made = change(graph, data) if change else graph
        if made.input_names != graph.input_names:  # it reads the others from files
            graph = made
            if data.draw(st.booleans()):
                machine = machine.with_storage(data.draw(st.sampled_from([1e7, 1e9])), 1e-6)
        with WAYS[way](made, machine, policy, data) as run:
            assert_equals_serial(run, graph, runs=1 if way == "code" else 2)


@pytest.mark.parametrize("way", WAYS)
@under_every_policy
@given(policy=policies, data=st.data())
def test_law_1_a_scheduled_run_equals_the_serial_run(
    way: str, policy: str, data: st.DataObject
) -> None:
    assert_law_1(way, policy, data)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
@given(policy=policies, data=st.data())
def test_law_1_so_does_that_of_a_graph_that_was_made_of_another(
    change: str, way: str, policy: str, data: st.DataObject
) -> None:
    assert_law_1(way, policy, data, CHANGES[change])


def _trace_memory(fn: Callable[..., Any], args: Sequence[Any], written: Sequence[int]) -> Any:
    """Trace for the memory of played tensors: tensors of the CPU."""
    return tracing.trace(fn, [memory_of(arg) for arg in args], written)


@pytest.mark.parametrize("change", [None, "fused", "reading"])
@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    policy=policies,
    machine=machines(),
    gpus=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_law_1_so_does_one_on_played_gpus_and_its_code(
    change: str | None,
    policy: str,
    machine: asc.Machine,
    gpus: int,
    seed: int,
    data: st.DataObject,
) -> None:
    if change == "reading":
        machine = machine.with_storage(data.draw(st.sampled_from([1e7, 1e9])), 1e-6)
    machine = physical(machine, gpus)
    graph = on_gpus(data.draw(graphs(machine.computing)))
    wanted = {
        label: data.draw(st.sampled_from(machine.computing))
        for label in graph.outputs
        if data.draw(st.booleans())
    }
    options: dict[str, Any] = {"policy": policy, "costs": COSTS, "outputs": wanted}
    with (
        compiled_by(),
        mock.patch("autosched.fusion.region.trace", _trace_memory),
        mock.patch("autosched.fusion.region.unsuitable", return_value=None),
        playing(gpus, seed),
    ):
        made = CHANGES[change](graph, data) if change else graph
        with (
            asc.schedule(made if change == "reading" else graph, machine, **options) as plain,
            asc.schedule(made, machine, **options) as schedule,
        ):
            expected = left(plain.run_serial, machine, plain.graph)
            ways = [schedule.run_serial, schedule, schedule]
            if change != "fused":  # whose code calls torch.compile
                ways.append(loaded(schedule))
            for run in ways:
                assert same(left(run, machine, schedule.graph), expected)
            assert not schedule.not_fused


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
    for choose in (None, chosen(data)):
        with asc.schedule(
            graph, machine, policy=policy, costs=COSTS, backend=Virtual(choose)
        ) as schedule:
            assert schedule.profile(**inputs_for(graph)) == schedule.simulate()


class AnyStep(Virtual):
    """Goes on with any stream after each step, where ``Virtual`` ends the instruction first."""

    yields = "step"


@pytest.mark.parametrize("policy", ["heft", "round_robin"])
@given(graph=graphs(GPUS), machine=machines(GPUS), data=st.data())
def test_law_5_threads_that_are_switched_between_any_two_steps_give_the_timeline_of_the_simulator(
    policy: str, graph: asc.Graph, machine: asc.Machine, data: st.DataObject
) -> None:
    """So no thread is let go before what it waits for was issued; a copy between GPUs holds a stream of each."""
    backend = AnyStep(chosen(data))
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

    spy = graph.snapshot()
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
        schedule._executor.local = None  # whose variables Python clears itself
        memory = schedule._executor.memory
        at_the_end: list[set[int]] = []

        def outputs() -> dict[str, object]:
            at_the_end.append({slot for slot, item in enumerate(memory.data) if item is not None})
            return type(memory).outputs(memory)

        memory.outputs = outputs
        schedule(**inputs_for(graph))
        kept = [*memory.homes.values(), *(slot for _, slot in memory.outputs_at)]
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
