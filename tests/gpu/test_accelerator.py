"""The accelerator backend on played GPUs, whose streams go on in the worst order that events allow."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import autosched as asc
from autosched.program.program import Program, Wait
from autosched.runtime.backends.accelerator import Accelerator, check_features
from autosched.runtime.execute import Executor
from autosched.simulated_gpus import Hardware, playing
from autosched.simulated_gpus.streams import Stream
from autosched.verification.verify import verify
from tests.gpu.for_gpus import Left, chain, left, loaded, on_gpus, physical, same
from tests.strategies import graphs, machines

COSTS = asc.Costs(default_seconds=1e-5, default_nbytes=100)
SEEDS = range(20)


# ---- every wait is needed


Case = tuple[Program, asc.Graph, asc.Machine, int]


def without_a_wait(n: int) -> list[Case]:
    """Programs between GPUs, real or logical, that lack a wait, and show all their values: the same always."""
    source, found = random.Random(5), []

    @settings(max_examples=4 * n, derandomize=True, database=None)
    @given(
        graph=graphs(("cuda:0", "cuda:1"), views=False),
        machine=machines(("cuda:0", "cuda:1"), most_streams=2),
    )
    def collect(graph: asc.Graph, machine: asc.Machine) -> None:
        shown = set(graph.outputs.values())
        graph.output(**{f"value{v.index}": v for v in graph.values if v.index not in shown})
        gpus = source.choice([1, 2])
        machine = physical(machine, gpus)
        program = asc.schedule(graph, machine, policy="round_robin", costs=COSTS).program
        waits = [
            i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Wait)
        ]
        if waits and len(found) < n:
            at = source.choice(waits)
            kept = program.instructions[:at] + program.instructions[at + 1 :]
            found.append((replace(program, instructions=kept), on_gpus(graph), machine, gpus))

    collect()
    return found


def ran(case: Case, seed: int, serial: bool = False) -> Left | None:
    """Run a program; None if it touched memory that had gone back."""
    program, graph, machine, gpus = case
    with playing(gpus, seed) as played:
        executor = Executor(program, graph, machine, Accelerator(serial), [0.0] * len(program))
        executor.checked = True
        found = left(lambda **inputs: executor(inputs), machine, graph)
        executor.close()
        faults = played.faults.copy()
        played.faults.clear()
    return None if faults else found


def test_every_wait_left_out_gives_a_wrong_result_for_some_seed() -> None:
    verdicts = []
    for case in without_a_wait(10):
        with pytest.raises(asc.ProgramError) as refusal:
            verify(*case[:2])
        expected = ran(case, 0, serial=True)
        assert expected is not None
        asked = "after which" in str(refusal.value)  # by the user, and no number depends on it
        wrong = any(
            (found := ran(case, seed)) is None or not same(found, expected)
            for seed in range(3 if asked else 60)
        )
        assert wrong or asked, f"{refusal.value}\n{case[1]}\n{case[0]}"
        verdicts.append(wrong)
    assert verdicts.count(True) >= 7


# ---- the caller's streams


def slow(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(1)
    return x + 1


def plus_one(gpu: str = "cuda:0", output: str = "cuda:0") -> asc.Schedule:
    """One task on one GPU, where its input is."""
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=graph.add(slow, x, name="slow", on=gpu))
    machine = asc.Machine.local()
    return asc.schedule(graph, machine, inputs={"x": gpu}, outputs={"y": output})


@contextlib.contextmanager
def without(method: str, number: int) -> Iterator[list[int]]:
    """Leave out one call of a stream's method, by number; the list counts them."""
    count, plain = [0], getattr(Stream, method)

    def call(self: Stream, *args: Any) -> Any:
        count[0] += 1
        return None if count[0] == number + 1 else plain(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, method, call)
        yield count


def test_an_output_may_be_let_go_of_while_the_callers_stream_has_yet_to_read_it() -> None:
    for seed in SEEDS:
        with playing(1, seed), plus_one() as schedule, torch.Stream("cuda:0"):
            x = torch.zeros(3, device="cuda:0")
            for run in (schedule, loaded(schedule)):
                y = run(x=x)["y"] * 2  # fails at the end if it touched memory of another
                assert y.tolist() == [2, 2, 2]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_call_waits_only_for_copies_that_read_the_callers_memory_later(pinned: bool) -> None:
    """Pageable memory was read when its copy was issued: the caller may overwrite it at once."""
    graph = chain(slow, on="cuda:0")
    for seed in SEEDS:
        with (
            playing(1, seed),
            asc.schedule(graph, asc.Machine.local(), outputs="cuda:0") as schedule,
            without("synchronize", -1) as waits,
        ):
            for number in range(3):
                x = torch.full((3,), float(number))
                x = x.pin_memory() if pinned else x
                y = schedule(x=x)["y"]
                x.fill_(9)
                assert y.tolist() == [number + 1] * 3
            assert waits[0] == 3 * pinned


def test_generated_code_leaves_each_thread_its_current_stream(gpus: Hardware) -> None:
    """Two threads call it at once, and the first one leaves its streams last, if it can."""
    second_is_in, first_is_in, found = threading.Event(), threading.Event(), []

    def first(x: torch.Tensor) -> torch.Tensor:
        if not first_is_in.is_set():
            first_is_in.set()
            second_is_in.wait(0.05)
        else:
            second_is_in.set()
        return x + 1

    with asc.schedule(chain(first, on="cuda:0"), asc.Machine.local(), inputs="cuda:0") as schedule:
        step = loaded(schedule)

        def call() -> None:
            y = step(x=torch.zeros(3, device="cuda:0"))["y"]
            found.append((torch.accelerator.current_stream("cuda:0"), y.tolist()))

        threads = [threading.Thread(target=call) for _ in range(2)]
        threads[0].start()
        first_is_in.wait(10)
        threads[1].start()
        for thread in threads:
            thread.join()
    assert found == [(torch.cuda.default_stream("cuda:0"), [1, 1, 1])] * 2


# ---- faults


@pytest.fixture
def gpus() -> Iterator[Hardware]:
    """Two, which run nothing before they have to."""
    with playing(2, seed=1) as played:
        played.eagerness = 0.0
        yield played


MISSING = {
    "streams": (torch.accelerator, "current_stream"),
    "events that streams wait for, recorded repeatedly": (Stream, "wait_event"),
    r"Tensor\.record_stream": (torch.Tensor, "record_stream"),
    "page-locked host memory": (Hardware, "pin"),
}


@pytest.mark.parametrize("feature", MISSING)
def test_what_a_device_lacks_is_told_when_a_schedule_opens_it(
    feature: str, gpus: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any) -> None:
        raise NotImplementedError("not for this device\nCPU: registered at ...")

    check_features.cache_clear()
    owner, name = MISSING[feature]
    monkeypatch.setattr(owner, name, lacking)
    schedule = asc.schedule(chain(slow), asc.Machine.local())
    what = (
        rf"schedules need {feature}, which torch does not have for 'cuda' \(NotImpl.*device\); use"
    )
    with pytest.raises(asc.MachineError, match=what):
        schedule(x=torch.ones(2))


def test_what_fails_on_the_gpu_is_told(gpus: Hardware) -> None:
    graph = chain(lambda x: torch.ones(3, device=x.device)[x], on="cuda:0")
    with asc.schedule(graph, asc.Machine.local(), outputs={"y": "cpu"}) as schedule:
        with pytest.raises(RuntimeError, match="a kernel failed: index 7 is out of bounds"):
            schedule(x=torch.tensor([7]))
        assert schedule(x=torch.tensor([2]))["y"].tolist() == [1]


def test_a_run_that_is_given_up_leaves_nothing_in_memory_and_the_next_is_right(
    gpus: Hardware,
) -> None:
    may_go = threading.Event()

    def late(x: torch.Tensor) -> torch.Tensor:
        may_go.wait(30)
        return x * 1

    graph = asc.Graph()
    x = graph.add(slow, graph.input("x"), on="cuda:0")
    graph.output(y=graph.add(slow, graph.add(late, x, on="cpu"), on="cuda:1"))
    with asc.schedule(graph, asc.Machine.local(), outputs={"y": "cpu"}) as schedule:
        with pytest.raises(asc.RunTimeoutError, match="late"):
            schedule(x=torch.zeros(3), timeout=0.05)
        may_go.set()
        assert schedule(x=torch.ones(3))["y"].tolist() == [3, 3, 3]
    assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 0


def test_schedules_share_their_streams(gpus: Hardware) -> None:
    taken = []
    for _ in range(3):
        graph = chain(slow, slow, slow)
        with asc.schedule(
            graph, asc.Machine.local(gpus=4), policy="round_robin", backend="accelerator"
        ) as schedule:
            schedule(x=torch.zeros(3))
        taken.append(dict(gpus.handed))
    assert taken[0] == taken[1] == taken[2]


# ---- streams and memory


def test_a_run_that_does_not_fit_says_so_and_the_next_one_may() -> None:
    with playing(1, nbytes=3 * 4096):
        graph = chain(*[slow] * 3, on="cuda:0")
        with asc.schedule(graph, asc.Machine.local(), outputs={"y": "cpu"}) as schedule:
            with pytest.raises((asc.TaskError, torch.OutOfMemoryError), match="CUDA out of memory"):
                schedule(x=torch.zeros(2048))
            assert schedule(x=torch.zeros(1024))["y"][0] == 3


def test_a_profile_has_the_devices_time_on_the_hosts_clock(gpus: Hardware) -> None:
    gpus.clock = lambda device, now: now + 1000 * device
    graph = asc.Graph()
    for device in ("cuda:0", "cuda:1"):
        graph.output(
            graph.add(slow, graph.input(f"x{device[5:]}"), on=device, name=f"slow{device[5:]}")
        )
    with asc.schedule(graph, asc.Machine.local()) as schedule:
        inputs = {"x0": torch.zeros(3), "x1": torch.zeros(3)}
        schedule(**inputs)
        timeline = schedule.profile(**inputs)
    assert all(0 < span.start <= span.end < 1 for span in timeline.spans)
