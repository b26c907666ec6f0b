"""What recordings need of CUDA's libraries and leave behind: handles, workspaces, memory, generators.

On simulated GPUs, which keep such state as torch 2.11 and CUDA do, and note its misuse as a fault.
"""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch

import autosched as asc
from autosched.simulated_gpus import playing
from autosched.simulated_gpus.allocator import ORDINARY
from autosched.simulated_gpus.streams import new_generator

SEEDS = range(8)
KIB = 1024


@pytest.fixture
def played():
    """Two simulated GPUs, which run nothing before they have to."""
    with playing(gpus=2, seed=1) as gpus:
        gpus.eagerness = 0.0
        yield gpus


def behind_the_host(on_gpu):
    """A task of the CPU, and one of the GPU that needs its result and so is issued by another thread."""
    graph = asc.Graph()
    early = graph.add(torch.sin, graph.input("x"), on="cpu", name="early")
    graph.output(y=graph.add(on_gpu, early, on="cuda:0", name="late"))
    return graph


def squared(a):
    return a @ a


def convolved(a):
    return torch.nn.functional.conv2d(a[None, None], a[None, None])


def reads(a):
    return a * a.sum().item()


def failing(schedule, **inputs):
    """Run twice; the second run cannot be recorded."""
    schedule(**inputs)
    with pytest.warns(RuntimeWarning, match="runs are not replayed"):
        return schedule(**inputs)


# ---- handles and workspaces of cuBLAS and cuDNN


@pytest.mark.parametrize("task", [squared, convolved])
def test_a_thread_has_handles_before_it_records(played, task):
    x = torch.rand(4, 4)
    with asc.schedule(behind_the_host(task), asc.Machine.local(), replay=True) as schedule:
        for _ in range(4):
            assert torch.equal(schedule(x=x)["y"].cpu(), task(torch.sin(x)))
        assert schedule.not_replayed is None


def test_another_thread_than_the_one_of_the_first_run_may_record(played):
    graph = asc.Graph()
    graph.output(y=graph.add(squared, graph.input("x"), on="cuda:0"))
    x = torch.rand(4, 4)
    with asc.schedule(graph, asc.Machine.local(), replay=True) as schedule:
        may_end, ran = threading.Event(), threading.Event()

        def first():
            schedule(x=x)
            ran.set()
            may_end.wait(10)  # it keeps its handles

        thread = threading.Thread(target=first)
        thread.start()
        assert ran.wait(10)
        assert torch.equal(schedule(x=x)["y"].cpu(), x @ x)
        may_end.set()
        thread.join()
        assert schedule.not_replayed is None


def product(name="x"):
    graph = asc.Graph()
    graph.output(y=graph.add(squared, graph.input(name), on="cuda:0"))
    return graph


def test_recordings_do_not_share_a_workspace():
    for seed in SEEDS:
        with playing(seed=seed) as gpus:
            x = torch.rand(4, 4)
            moved, machine = x.to("cuda:0"), asc.Machine.local()
            schedules = [
                asc.schedule(product(), machine, replay=True, inputs="cuda:0") for _ in "ab"
            ]
            for _ in range(3):
                for schedule in schedules:
                    schedule(x=moved)
            torch.cuda.synchronize()
            outputs = []
            for schedule in schedules:  # at the same time
                with torch.Stream("cuda:0"):
                    outputs.append(schedule(x=moved)["y"])
            torch.cuda.synchronize()
            assert all(torch.equal(y.cpu(), x @ x) for y in outputs)
            assert not gpus.faults
            schedules[0].close()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            assert torch.equal(schedules[1](x=moved)["y"].cpu(), x @ x)
            schedules[1].close()


def with_a_stream_of_its_own(side):
    """A product on a stream that the task brings along, behind a CPU task that uses that stream, too."""

    def on_side(a):
        own, made = torch.accelerator.current_stream(), torch.empty_like(a)
        side.wait_stream(own)
        with side:
            torch.mm(a, a, out=made)
        own.wait_stream(side)
        return made

    def meanwhile(a):
        with side:
            torch.ones(2, 2, device="cuda:0") @ torch.ones(2, 2, device="cuda:0")
        return torch.sin(a)

    graph = asc.Graph()
    first = graph.add(torch.mul, graph.input("x"), 2, on="cuda:0")
    middle = graph.add(meanwhile, first, on="cpu")
    graph.output(y=graph.add(on_side, middle, on="cuda:0"))
    return graph


def test_other_work_does_not_use_the_workspace_of_a_recording(played):
    side = torch.Stream("cuda:0")
    with asc.schedule(with_a_stream_of_its_own(side), asc.Machine.local(), replay=True) as schedule:
        for _ in range(2):
            schedule(x=torch.rand(4, 4))
        assert schedule.not_replayed is None
        with side:
            torch.cuda.current_blas_handle()
        workspaces = played.libraries.workspaces.values()
        assert [block.pool for _, block in workspaces] == [ORDINARY]


# ---- what a failed capture leaves


def synchronizing(*tasks):
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        for task in tasks:
            x = graph.add(task, x)
        graph.output(y=graph.add(reads, x, name="reads"))
    return graph


def test_the_memory_of_a_failed_capture_can_be_released(played):
    def large(a):
        return a + torch.zeros(100 * KIB, device=a.device)[0]

    with asc.schedule(synchronizing(large), asc.Machine.local(), replay=True) as schedule:
        failing(schedule, x=torch.ones(2))
    del schedule
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_after_a_failed_capture_page_locked_memory_is_allocated_in_captures(played):
    with asc.schedule(synchronizing(), asc.Machine.local(), replay=True) as schedule:
        failing(schedule, x=torch.ones(2))
    del schedule
    gc.collect()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.empty(8, pin_memory=True).is_pinned()
    assert not played.faults


def test_generators_of_a_failed_capture_draw_again(played):
    def draws(a, generator):
        drawn = a + torch.rand(a.shape, device=a.device, generator=generator)
        return drawn * (drawn.sum().item() > 0)

    generator, found = new_generator("cuda:0"), []
    for replay in (False, True):
        graph = asc.Graph()
        x = graph.input("x")
        graph.output(y=graph.add(draws, x, generator, on="cuda:0"))
        generator.manual_seed(5)
        with (
            asc.schedule(graph, asc.Machine.local(), replay=replay) as schedule,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            found.append([schedule(x=torch.ones(3))["y"].tolist() for _ in range(4)])
            assert not replay or "task 'draws' failed" in schedule.not_replayed
    assert found[0] == found[1]


def test_a_recording_leaves_graphs_in_flight_their_random_numbers():
    """The capture that keeps a pool alive writes the generator's offset, which they read."""

    def found(seed, records):
        with playing(seed=seed):
            torch.cuda.manual_seed(3)
            graph, own, noise = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.Tensor()
            with torch.cuda.graph(graph, stream=own):
                torch.cuda._sleep(1)
                noise = torch.rand(3, device="cuda:0")
            torch.cuda.manual_seed(3)
            torch.rand(3, device="cuda:0")
            with asc.schedule(product(), asc.Machine.local(), replay=records) as schedule:
                schedule(x=torch.rand(4, 4))
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # which would wait for the graph later
                with torch.cuda.stream(own):
                    graph.replay()
                schedule(x=torch.rand(4, 4))
                torch.cuda.synchronize()
            return noise.tolist()

    for seed in SEEDS:
        assert found(seed, True) == found(seed, False)


# ---- memory


def grown(a):
    return torch.ones(16 * KIB // 4, device=a.device) * a[0]  # two blocks of 16 KiB


def growing(count):
    graph = asc.Graph()
    x = graph.input("x")
    with graph.on("cuda:0"):
        for _ in range(count):
            x = graph.add(grown, x)
        graph.output(y=graph.add(lambda a: a[:2] * 1, x))
    return graph


def test_a_recording_needs_no_memory_beside_what_ordinary_runs_have_cached():
    with playing(seed=1, nbytes=80 * KIB) as gpus:
        with asc.schedule(growing(3), asc.Machine.local(), replay=True) as schedule:
            for number in range(4):
                assert schedule(x=torch.full((2,), float(number)))["y"].tolist() == [number] * 2
            assert schedule.not_replayed is None
        assert gpus.peak[0] > 40 * KIB


@pytest.mark.parametrize("moves", [False, True])
def test_a_run_that_does_not_fit_while_it_is_recorded_is_an_ordinary_one(moves):
    """Segments, the copies between them, buffers of inputs and copies of outputs need memory."""
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    first = graph.add(torch.add, x, w, on="cuda:0")
    middle = graph.add(torch.sin, first, on="cpu")
    graph.output(y=graph.add(torch.mul, middle, 2, on="cuda:0"))
    x, w = torch.rand(4 * KIB), torch.rand(4 * KIB)

    def failures(room, replay):
        with (
            playing(seed=1) as gpus,
            asc.schedule(
                graph, asc.Machine.local(), replay=replay, inputs={"w": "cuda:0"}
            ) as schedule,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            gpus.nbytes = room
            given = []
            for number in range(2):  # an ordinary run, and one that is recorded
                try:
                    if moves or not given:  # at another address, so that it needs a buffer
                        given.append(w.to("cuda:0"))
                    y = schedule(x=x, w=given[-1])["y"]
                except (asc.TaskError, torch.OutOfMemoryError):
                    return True, None
                assert torch.equal(y.cpu(), torch.sin(x + w) * 2), number
                del y
            return False, schedule.not_replayed or not schedule._executor.recordings.by_kind

    rooms = range(32 * KIB, 104 * KIB, 8 * KIB)
    ordinary = [failures(room, False)[0] for room in rooms]
    # A little is in use, and the buffer of an input that moves stays until the end of the run.
    spare = 24 * KIB if moves else 8 * KIB
    recorded = [failures(room + spare, True) for room in rooms]
    assert [failed for failed, _ in recorded] == ordinary
    assert {reason for failed, reason in recorded if not failed} == {True, False}


def test_a_copy_that_does_not_fit_while_it_is_recorded_finds_the_memory_of_the_recording():
    """Between segments; what these have freed is the recording's until it is given up."""
    graph = asc.Graph()
    first = graph.add(torch.add, graph.input("x"), 1, on="cuda:0")
    middle = graph.add(lambda a: torch.cat([a, a]), first, on="cpu")
    graph.output(y=graph.add(torch.sum, middle, on="cuda:0"))
    with (
        playing(seed=1) as gpus,
        asc.schedule(graph, asc.Machine.local(), replay=True) as schedule,
    ):
        gpus.nbytes = 52 * KIB  # for a tensor of 16 KiB, and one of 32 KiB
        for number in range(3):
            assert schedule(x=torch.full((4 * KIB,), 1.0 * number))["y"].item() == 8 * KIB * (
                number + 1
            )
        assert not schedule._executor.recordings.by_kind


def test_a_recording_keeps_no_memory_longer_than_the_program():
    """What one segment made and the next frees is free there, in the recording as in its replays."""

    def reserved(replay):
        graph = asc.Graph()
        a = graph.input("a")
        with graph.on("cuda:0"):
            for _ in range(4):
                a = graph.add(torch.add, a, 1)
                small = graph.add(lambda a: a[:1] * 1, a)
                number = graph.add(torch.sin, small, on="cpu")
                a = graph.add(torch.mul, a, number)
            graph.output(y=graph.add(lambda a: a[:1] * 1, a))
        with (
            playing(seed=1) as gpus,
            asc.schedule(graph, asc.Machine.local(), replay=replay, inputs="cuda:0") as schedule,
        ):
            given = torch.ones(16 * KIB, device="cuda:0")
            for _ in range(3):
                schedule(a=given)
                torch.cuda.synchronize()
            assert not replay or schedule.not_replayed is None
            torch.cuda.empty_cache() if not replay else None
            return gpus.peak[0]

    assert reserved(True) <= reserved(False) + 4 * KIB


# ---- what passes


def test_a_recording_that_another_thread_broke_is_tried_again(played):
    breaks = [False, True]

    def broken(a):
        if breaks and breaks.pop(0):
            other = threading.Thread(target=_synchronize)
            other.start()
            other.join()
        return a + 1

    graph = asc.Graph()
    graph.output(y=graph.add(broken, graph.input("x"), on="cuda:0"))
    with asc.schedule(graph, asc.Machine.local(), replay=True) as schedule:
        for number in range(5):
            assert schedule(x=torch.full((2,), float(number)))["y"].tolist() == [number + 1] * 2
        assert schedule.not_replayed is None
        assert schedule._executor.recordings.by_kind


def _synchronize():
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        torch.cuda.synchronize("cuda:0")
