"""The accelerator backend on a GPU: a real one where there is one (``pytest -m cuda``), and everywhere a played one.

Two devices are that GPU in two parts. What a missing wait would let happen is made to happen: what
should be waited for sleeps, and memory that goes back is overwritten at once.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched._lib.tree import flatten
from autosched.program.program import Program, Record, Stream, Wait
from autosched.runtime.backends import Step
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.execute import Executor
from autosched.simulated_gpus import Hardware
from autosched.simulation.footprint import footprint
from tests.gpu import sanitized
from tests.gpu.for_gpus import chain, loaded, on_gpus, there
from tests.strategies import graphs, inputs_for

ROOT = Path(__file__).parents[2]
SLEEP = 50_000_000  # GPU clock cycles: some hundredths of a second, so that whoever does not wait comes too early
IS_REAL = torch.accelerator.is_available()
RUNS = 3 if IS_REAL else 2

on_gpu = pytest.mark.usefixtures("gpu")


@pytest.fixture(autouse=True)
def small_where_played(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_REAL:
        monkeypatch.setattr(sanitized, "N", 1 << 10)


def slow(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(SLEEP)
    return x + 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# ---- the law


def assert_runs_as_serially(data: st.DataObject, policy: str) -> None:
    machine = asc.Machine.local(gpus=2)
    streams = data.draw(st.integers(1, 3))
    machine = asc.Machine(
        [replace(device, streams=streams) for device in machine.devices], machine.links
    )
    graph = on_gpus(data.draw(graphs(machine.names)))
    with asc.schedule(graph, machine, policy=policy) as schedule:
        torch.manual_seed(3)
        expected_inputs = there(machine, schedule.graph, inputs_for(graph))
        expected = schedule.run_serial(**expected_inputs)
        step = loaded(schedule)
        for run in (schedule, schedule, step):
            torch.manual_seed(3)
            inputs = there(machine, schedule.graph, inputs_for(graph))
            outputs = run(**inputs)
            assert all(torch.equal(outputs[label], expected[label]) for label in expected)
            assert all(torch.equal(inputs[name], expected_inputs[name]) for name in inputs)


@on_gpu
@pytest.mark.parametrize("policy", ["round_robin", "heft"])
@settings(max_examples=40 if IS_REAL else 3)
@given(data=st.data())
def test_a_scheduled_run_equals_the_serial_run(policy: str, data: st.DataObject) -> None:
    assert_runs_as_serially(data, policy)


@pytest.mark.usefixtures("two_gpus")
@settings(max_examples=40 if IS_REAL else 3)
@given(data=st.data())
def test_a_scheduled_run_equals_the_serial_run_on_two(data: st.DataObject) -> None:
    assert_runs_as_serially(data, "round_robin")


# ---- every wait is needed


def across(machine: asc.Machine) -> asc.Schedule:
    """Return a program: slowly on the first GPU, then on the second, then on the CPU."""
    graph = chain(slow, double, double)
    _, first, second = machine.names
    placement = asc.Placement(
        {"slow": first, "double": second, "double_1": "cpu"}, ("slow", "double", "double_1")
    )
    return asc.schedule(graph, machine, policy=lambda *_: placement)


def assert_readers_wait() -> None:
    with across(asc.Machine.local(gpus=2)) as schedule:
        for run in (schedule, loaded(schedule)):
            for i in range(5):
                assert run(x=torch.full((1000,), float(i)))["y"].tolist() == [4.0 * (i + 1)] * 1000


@on_gpu
def test_readers_wait_for_slow_producers() -> None:
    assert_readers_wait()


@pytest.mark.usefixtures("two_gpus")
def test_readers_on_another_gpu_wait_for_slow_producers() -> None:
    assert_readers_wait()


class Contrary(Accelerator):
    """Lets a stream sleep before all that it does, and overwrites memory as soon as it goes back."""

    def __init__(self, sleeper: Stream):
        super().__init__()
        self.sleeper = sleeper

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        step = super().launch(streams, seconds, call)
        if self.sleeper not in streams:
            return step

        def late() -> None:
            with self.streams[self.sleeper]:
                torch.cuda._sleep(SLEEP)
            step()

        return late

    def free(self, stream: Stream) -> Callable[[Any], None]:
        def overwrite(value: Any) -> None:
            with self.streams[stream]:
                for leaf in flatten(value):
                    leaf.fill_(torch.nan)

        return overwrite


def results(schedule: asc.Schedule, program: Program, sleeper: Stream) -> list[tuple[float, float]]:
    """Return the smallest and the largest number of each run's result, which are equal."""
    executor = Executor(
        program, schedule.graph, schedule.machine, Contrary(sleeper), [0.0] * len(program)
    )
    executor.checked = True
    ran = (executor(sanitized.inputs(run))["y"].cpu() for run in range(RUNS))
    found = [(float(y.min()), float(y.max())) for y in ran]
    torch.accelerator.synchronize()
    executor.close()
    return found


def test_each_wait_that_is_left_out_shows(gpu: Hardware | None) -> None:
    """Those that hold back frees, too. In a first run on a real GPU memory is allocated, which makes streams wait."""
    schedule = sanitized.plan()
    program = schedule.program
    recorder = {i.event: i.stream for i in program if isinstance(i, Record)}
    waits = [i for i, instruction in enumerate(program) if isinstance(instruction, Wait)]
    right = [(number, number) for number in sanitized.run(times=RUNS)]
    assert len(set(right)) == RUNS  # what is stale is wrong
    for at in waits:
        sleeper = recorder[program.instructions[at].event]  # type: ignore[union-attr]
        less = replace(
            program, instructions=program.instructions[:at] + program.instructions[at + 1 :]
        )
        with pytest.raises(asc.ProgramError):
            asc.verify(less, schedule.graph)
        assert results(schedule, program, sleeper) == right
        assert results(schedule, less, sleeper) != right, (
            f"without {program.instructions[at]} of line {at}:\n{program}"
        )
        if gpu is not None:
            gpu.faults.clear()


@on_gpu
@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_a_missing_wait_shows_where_the_host_takes_part(left_out: int) -> None:
    """Waits 0 to 4: compute for the input, copy-out, compute, copy-out, the CPU; those for what is slow matter."""
    machine = asc.Machine.local(gpus=2)
    with across(machine) as schedule:
        schedule(
            x=torch.zeros(1000)
        )  # so that memory is allocated, which would make all streams wait
        program = schedule.program
        at = [i for i, instruction in enumerate(program) if isinstance(instruction, Wait)][left_out]
        less = replace(
            program, instructions=program.instructions[:at] + program.instructions[at + 1 :]
        )
        executor = Executor(less, schedule.graph, machine, Accelerator(), [0.0] * len(less))
        executor.checked = True
        wrong = [
            executor({"x": torch.full((1000,), float(i))})["y"].tolist() != [4.0 * (i + 1)] * 1000
            for i in (1, 2, 3)
        ]
        torch.accelerator.synchronize()
        executor.close()
    assert any(wrong)


# ---- the host and the caller


@on_gpu
def test_the_callers_stream_is_waited_for_and_made_to_wait() -> None:
    machine = asc.Machine.local(gpus=1)
    name = machine.names[1]
    with asc.schedule(chain(slow), machine, inputs={"x": name}, outputs={"y": name}) as schedule:
        callers = torch.accelerator.current_stream(), torch.Stream(name), torch.Stream(name)
        for own, run in itertools.product(callers, (schedule, loaded(schedule))):
            with own:
                x = torch.full((1000,), 1.0, device=name)
                torch.cuda._sleep(SLEEP)
                x += 1
                y = run(x=x)["y"] * 2
                assert y.tolist() == [6.0] * 1000
                assert torch.accelerator.current_stream() == own


@on_gpu
def test_an_input_written_there_is_back_in_the_callers_memory_when_the_call_returns() -> None:
    machine = asc.Machine.local(gpus=1)
    graph = asc.Graph()
    w = graph.input("w")

    def slowly_add(w: torch.Tensor) -> None:
        torch.cuda._sleep(SLEEP)
        w.add_(1)

    graph.add(slowly_add, w, writes=[w], outputs=(), on=machine.names[1])
    with asc.schedule(graph, machine) as schedule:
        for mine in (torch.zeros(1000), torch.zeros(1000).pin_memory(), torch.zeros(1000, 2)[:, 1]):
            for i in range(3):
                schedule(w=mine)
                assert mine.tolist() == [i + 1.0] * 1000


@on_gpu
def test_the_callers_memory_is_its_own_again_when_the_call_returns() -> None:
    """Pinned memory, which a copy reads when it runs, is written over at once; and no output changes any more."""
    machine = asc.Machine.local(gpus=1)
    graph = asc.Graph()
    graph.output(y=graph.add(slow, graph.input("x"), on=machine.names[1]))
    name = machine.names[1]
    with asc.schedule(graph, machine, outputs={"y": name}) as schedule:
        x = torch.zeros(1 << 20).pin_memory()
        kept = []
        for i in range(3):
            x.fill_(i)
            kept.append(schedule(x=x)["y"])
        x.fill_(torch.nan)
        assert [float(y.min()) for y in kept] == [float(y.max()) for y in kept] == [1, 2, 3]


@on_gpu
def test_inputs_on_another_device_are_refused() -> None:
    machine = asc.Machine.local(gpus=1)
    with (
        asc.schedule(chain(double), machine, inputs={"x": machine.names[1]}) as schedule,
        pytest.raises(
            asc.GraphError,
            match=r"input 'x' is on cpu, and the schedule expects it on .*:0; move it",
        ),
    ):
        schedule(x=torch.ones(1))


@on_gpu
def test_a_failing_task_is_named_and_the_next_run_is_right() -> None:
    machine = asc.Machine.local(gpus=2)
    graph = chain(slow, lambda x: x @ x if x.cpu()[0, 0] else x * 1)
    with asc.schedule(graph, machine, policy="round_robin", outputs={"y": "cpu"}) as schedule:
        for _ in range(3):
            with pytest.raises(asc.TaskError, match=r"task 'lambda' on .* failed: RuntimeError"):
                schedule(x=torch.ones(2, 3))
            assert schedule(x=-torch.ones(2, 3))["y"].tolist() == [[0, 0, 0]] * 2


# ---- what runs at once


@on_gpu
def test_cpu_tasks_and_gpu_tasks_do_not_hold_each_other_up() -> None:
    """The CPU's first task ends when the GPU's first, issued behind it, has run; and so the other way round."""
    quick_ran, last_ran = threading.Event(), threading.Event()
    graph, in_time = asc.Graph(), []
    gpu = asc.Machine.local(gpus=2).names[1]
    graph.add(lambda: in_time.append(quick_ran.wait(10)), name="late", on="cpu")
    graph.add(lambda: quick_ran.set(), name="quick", on=gpu)
    graph.add(lambda: in_time.append(last_ran.wait(10)), name="early", on=gpu)
    graph.add(lambda: last_ran.set(), name="last", on="cpu")
    with asc.schedule(graph, asc.Machine.local(gpus=2), policy="heft") as schedule:
        schedule()
    assert in_time == [True, True]


# ---- memory


@contextmanager
def room(gpu: Hardware | None, nbytes: int) -> Iterator[None]:
    """Leave a GPU so many bytes, and no more."""
    if gpu is not None:
        gpu.nbytes = gpu.allocated[0] + nbytes
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((taken + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@on_gpu
def test_peak_memory_is_as_predicted() -> None:
    schedule = sanitized.plan()
    courses = footprint(schedule.program, schedule.problem)
    predicted = max(map(sum, zip(*courses.values(), strict=True)))  # both devices are one GPU
    sanitized.run(times=1)  # libraries take their workspaces
    before, inputs = torch.cuda.memory_allocated(), sanitized.inputs()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with schedule:
        schedule(**inputs)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(predicted, rel=0.05)


def test_the_allocator_may_be_short_of_memory(gpu: Hardware | None) -> None:
    """Forty results of 32 MiB on streams of two devices, with room for eight: blocks go from stream to stream."""
    machine, count = asc.Machine.local(gpus=2), 1 << (23 if gpu is None else 10)
    names, graph = machine.names, asc.Graph()
    value = graph.input("x")
    for i in range(40):
        value = graph.add(double if i % 2 else slow, value, on=names[1 + i // 5 % 2], name=f"t{i}")
    graph.output(y=value)
    with (
        asc.schedule(graph, machine, policy="heft", outputs={"y": "cpu"}) as schedule,
        room(gpu, 8 * 4 * count),
    ):
        for _ in range(3):
            y = schedule(x=torch.zeros(count))["y"]
            assert float(y.min()) == float(y.max()) == 2.0**21 - 2


# ---- under the eyes of others

MEMCHECK = (
    *("--tool", "memcheck", "--track-stream-ordered-races", "all", "--error-exitcode", "9"),
    *("--report-api-errors", "no"),  # torch asks with calls that may fail
)
WATCHED = 240  # seconds: two of them fit into a part of `make gpu`


def watched(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program for sanitizers in a process of its own."""
    command = (*command, sys.executable, "-m", "tests.gpu.sanitized")
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=WATCHED,
    )


@pytest.mark.cuda
def test_torchs_sanitizer_finds_nothing() -> None:
    done = watched(TORCH_CUDA_SANITIZER="1")
    assert done.returncode == 0, done.stderr
    assert "CSAN" not in done.stderr


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["native", "cudaMallocAsync"])
def test_compute_sanitizer_finds_nothing(allocator: str) -> None:
    """With the second allocator it sees memory that is used before its allocation or after its free in stream order."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    configured = dict.fromkeys(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), f"backend:{allocator}"
    )
    done = watched(tool, *MEMCHECK, **configured)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
