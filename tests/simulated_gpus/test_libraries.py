"""Simulated GPUs misbehave where torch and CUDA keep state beside streams: libraries, memory, generators, clocks."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from autosched.simulated_gpus import Hardware, playing
from autosched.simulated_gpus.streams import new_generator
from tests.simulated_gpus.timing import Timing


@pytest.fixture
def gpus() -> Iterator[Hardware]:
    """Two, which run nothing before they have to."""
    with playing(2, seed=1) as played:
        played.eagerness = 0.0
        yield played


def captured(
    work: Callable[[], object],
    stream: torch.cuda.Stream | None = None,
    graph: torch.cuda.CUDAGraph | None = None,
    **options: object,
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    with torch.cuda.graph(graph, stream=stream, **options):
        work()
    return graph


def faults(gpus: Hardware) -> str:
    """Return what was noted, and forget it."""
    torch.cuda.synchronize()
    text = "\n".join(gpus.faults)
    gpus.faults.clear()
    return text


# ---- handles and workspaces


def test_a_handle_is_created_at_its_first_use_and_not_in_a_capture(gpus: Hardware) -> None:
    x = torch.ones(2, 2, device="cuda:0")
    for kernel in (lambda: x @ x, lambda: torch.conv2d(x[None, None], x[None, None])):
        with pytest.raises(RuntimeError, match=r"cublasCreate|cudnnCreate"):
            captured(kernel)
        kernel()
        captured(kernel)


@pytest.mark.parametrize("released", [True, False])
def test_a_graph_keeps_the_address_of_a_workspace_of_others(gpus: Hardware, released: bool) -> None:
    x, side = torch.ones(2, 2, device="cuda:0"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x @ x
    if released:
        torch._C._cuda_clearCublasWorkspaces()
    graph = captured(lambda: x @ x, side)
    graph.replay()
    assert not faults(gpus)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    graph.replay()
    match = "illegal memory access was encountered: the workspace of cuBLAS"
    with contextlib.nullcontext() if released else pytest.raises(RuntimeError, match=match):
        torch.cuda.synchronize()


def test_graphs_that_were_captured_on_one_stream_share_a_workspace() -> None:
    def found(streams: int) -> bool:
        wrong = False
        for seed in range(8):
            with playing(seed=seed) as gpus:
                x = torch.ones(2, 2, device="cuda:0")
                torch.cuda.current_blas_handle()
                pool = [torch.cuda.Stream() for _ in range(streams)]
                square = partial(torch.matmul, x, x)
                graphs = [captured(square, pool[n % streams]) for n in range(2)]
                for graph in graphs:
                    with torch.Stream("cuda:0"):
                        graph.replay()
                wrong |= "another kernel wrote the workspace" in faults(gpus)
        return wrong

    assert found(1)
    assert not found(2)


# ---- memory


def test_cached_memory_is_released_when_asked_and_when_there_is_no_other() -> None:
    with playing(nbytes=2048) as gpus:
        torch.ones(256, device="cuda:0")
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (0, 1024)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        torch.ones(256, device="cuda:0")
        assert torch.ones(384, device="cuda:0").sum().item() == 384
        torch.cuda.empty_cache()
        torch.ones(256, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError, match="0 of 2048 bytes are allocated, and 1024"):
            captured_without_emptying(lambda: torch.ones(384, device="cuda:0"))
        assert not gpus.faults


def captured_without_emptying(work: Callable[[], object]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.Stream("cuda:0"):
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()


# ---- captures that fail


def failed(used: torch.Generator | None = None) -> tuple[torch.cuda.CUDAGraph, tuple[int, int]]:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    if used is not None:
        graph.register_generator_state(used)
    x = torch.ones(3, device="cuda:0")
    with pytest.raises(RuntimeError, match="previous error during capture"):  # noqa: SIM117, PT012
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            torch.ones(256, device="cuda:0")
            with pytest.raises(RuntimeError, match="operation not permitted"):
                x.sum().item()
    return graph, pool


def test_a_failed_capture_leaves_its_pool_in_use_and_allocators_in_doubt(gpus: Hardware) -> None:
    graph, pool = failed()
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() > 0
    assert gpus.allocators[0].underway
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        captured(lambda: None, pool=pool)
    del graph
    gc.collect()
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_a_failed_capture_leaves_its_generators_capturing(gpus: Hardware) -> None:
    generator = new_generator("cuda:0")
    failed(generator)
    for draw in (
        lambda: torch.rand(3, device="cuda:0"),
        lambda: torch.rand(3, device="cuda:0", generator=generator),
    ):
        with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
            draw()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    captured(lambda: torch.rand(3, device="cuda:0", generator=generator), graph=graph)
    assert torch.rand(3, device="cuda:0", generator=generator).shape == (3,)


def test_a_graph_draws_only_from_generators_that_are_registered(gpus: Hardware) -> None:
    generator = new_generator("cuda:0")
    with pytest.raises(RuntimeError, match="not in capture mode"):
        captured(lambda: torch.rand(3, device="cuda:0", generator=generator))


def test_another_thread_that_synchronizes_the_device_breaks_a_capture(gpus: Hardware) -> None:
    def work() -> None:
        thread = threading.Thread(target=synchronized)
        thread.start()
        thread.join()

    def synchronized() -> None:
        torch.cuda.synchronize("cuda:1")
        with pytest.raises(RuntimeError, match="operation not permitted"):
            torch.cuda.synchronize("cuda:0")

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured(work, capture_error_mode="thread_local")


# ---- streams and clocks


def test_durations_can_be_computed(gpus: Hardware) -> None:
    """The second waits for a long kernel of the first; the third waits for nobody."""
    gpus.timing = Timing(issue=0.0, kernel=4.0, idle_rate=1.0, busy_rate=1.0)
    first, second, third = (torch.Stream("cuda:0") for _ in range(3))
    with first:
        torch.cuda._sleep(100)
    second.wait_stream(first)
    ends = []
    for stream in (third, second):
        with stream:
            torch.zeros(1, device="cuda:0")
        ends.append(stream.record_event())
    torch.cuda.synchronize()
    assert [event.mark.seconds for event in ends] == [4, 104]
