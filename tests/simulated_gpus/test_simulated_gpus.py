"""Played GPUs bite where CUDA does: whoever does not wait is too early for some seed, and whoever waits for none."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from autosched.simulated_gpus import Hardware, playing

SEEDS = range(20)


def outcomes(run: Callable[[], object], gpus: int = 1) -> list[object]:
    """Return what a function returns under each seed; "fault" where memory was touched after it had gone back."""
    found = []
    for seed in SEEDS:
        with playing(gpus, seed) as played:
            found.append(run())
            if played.faults:
                found[-1] = "fault"
                played.faults.clear()
    return found


def goes_wrong(run: Callable[[], object], right: object, gpus: int = 1) -> bool:
    return any(result != right for result in outcomes(run, gpus))


@pytest.fixture
def played():
    """One that runs nothing before it has to, and then all else first."""
    with playing(2, seed=1) as gpus:
        gpus.eagerness = 0.0
        yield gpus


def slow(value: float, device: str = "cuda:0") -> torch.Tensor:
    torch.cuda._sleep(1)
    return torch.full((3,), value, device=device)


# ---- streams and events


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_shows(waits: bool) -> None:
    def run() -> object:
        other = torch.Stream("cuda:0")
        x = torch.full((3,), 2.0, device="cuda:0")
        if waits:
            other.wait_stream(torch.accelerator.current_stream())
        with other:
            y = x + 1
        torch.accelerator.current_stream().wait_stream(other)
        return y.tolist()

    assert goes_wrong(run, [3.0] * 3) != waits


@pytest.mark.parametrize("joins", [True, False])
def test_a_stream_that_is_not_joined_shows(joins: bool) -> None:
    def run() -> object:
        other = torch.Stream("cuda:0")
        with other:
            y = torch.full((3,), 2.0, device="cuda:0")
        if joins:
            torch.accelerator.current_stream().wait_stream(other)
        result = y.tolist()
        other.synchronize()
        return result

    assert goes_wrong(run, [2.0] * 3) != joins


def test_a_wait_for_what_was_never_recorded_is_none() -> None:
    def run() -> object:
        event, other = torch.Event("cuda:0"), torch.Stream("cuda:0")
        x = torch.full((3,), 2.0, device="cuda:0")
        other.wait_event(event)
        event.record(torch.accelerator.current_stream())
        with other:
            y = x + 1
        torch.accelerator.current_stream().wait_stream(other)
        return y.tolist()

    assert goes_wrong(run, [3.0] * 3)


def test_a_wait_keeps_the_record_that_it_found(played: Hardware) -> None:
    first, second, third = (torch.Stream("cuda:0") for _ in range(3))
    event = torch.Event("cuda:0")
    event.record(first)
    third.wait_event(event)
    with second:
        torch.cuda._sleep(1)
    event.record(second)
    third.synchronize()
    assert not event.mark.past
    event.synchronize()
    assert event.query()


def test_what_fails_on_the_gpu_is_told_when_the_host_waits(played: Hardware) -> None:
    rows = torch.ones(3, device="cuda:0")[torch.tensor([7])]
    with pytest.raises(RuntimeError, match="CUDA error: a kernel failed: index 7 is out of bounds"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert rows.shape == (1,)


# ---- memory


@pytest.mark.parametrize("guard", ["wait", "record_stream", ""])
def test_memory_that_goes_back_too_early_shows(guard: str) -> None:
    def run() -> object:
        other, event = torch.Stream("cuda:0"), torch.Event("cuda:0")
        x = torch.full((3,), 2.0, device="cuda:0")
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            torch.cuda._sleep(1)
            y = x + 1
        if guard == "wait":
            torch.accelerator.current_stream().wait_stream(other)
        elif guard:
            x.record_stream(other)
        del x
        event.record(other)
        event.synchronize()
        torch.accelerator.current_stream().wait_stream(other)
        return y.tolist()

    assert goes_wrong(run, [3.0] * 3) == (not guard)


def test_memory_that_went_back_is_nan_and_its_use_a_fault(played: Hardware) -> None:
    x = torch.ones(3, device="cuda:0")
    other = torch.Stream("cuda:0")
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        torch.cuda._sleep(1)
        y = x + 1
    del x
    torch.accelerator.current_stream().synchronize()
    with other:
        assert y.cpu().isnan().all()
    assert played.faults == [
        "aten.add.Tensor on cuda:0/1 touches memory that went back before: aten.ones.default of (3,) on cuda:0/0"
    ]
    played.faults.clear()


def test_there_is_only_so_much_memory() -> None:
    with playing(1, nbytes=2000):
        kept = [torch.ones(1, device="cuda:0") for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError, match="1536 of 2000 bytes are allocated"):
            torch.ones(1, device="cuda:0")
        kept.pop()
        assert torch.ones(1, device="cuda:0").item() == 1


# ---- copies


def test_the_host_reads_what_it_did_not_wait_for(played: Hardware) -> None:
    x = torch.full((3,), 2.0, device="cuda:0").to("cpu", non_blocking=True)
    assert x.is_pinned()
    assert x.isnan().all()
    torch.accelerator.synchronize()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_source_may_not_be_written_over_before_the_copy_is_done(pinned: bool) -> None:
    def run() -> object:
        x = torch.ones(3).pin_memory() if pinned else torch.ones(3)
        y = x.to("cuda:0", non_blocking=True)
        x.zero_()
        return y.tolist()

    assert goes_wrong(run, [1.0] * 3) == pinned


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_to_pageable_memory_and_one_that_blocks_are_done_when_they_return(
    non_blocking: bool,
) -> None:
    def run() -> object:
        x = torch.zeros(3) if non_blocking else torch.zeros(3).pin_memory()
        return x.copy_(torch.ones(3, device="cuda:0"), non_blocking=non_blocking).tolist()

    assert not goes_wrong(run, [1.0] * 3)


def test_a_copy_between_gpus_is_a_barrier_between_their_current_streams_and_no_others() -> None:
    def run(consumer: int) -> object:
        streams = [torch.Stream("cuda:1") for _ in range(2)]
        x = slow(2.0)
        with streams[0]:
            y = x.to("cuda:1")
        with streams[consumer]:
            return (y + 1).tolist()

    assert not goes_wrong(lambda: run(0), [3.0] * 3, gpus=2)
    assert goes_wrong(lambda: run(1), [3.0] * 3, gpus=2)


def test_a_pinned_source_that_is_no_row_of_bytes_is_staged_as_if_it_were_not() -> None:
    def run() -> object:
        x = torch.ones(3, 2).pin_memory()
        y = x[:, 1].to("cuda:0", non_blocking=True)
        x.zero_()
        return y.tolist()

    assert not goes_wrong(run, [1.0] * 3)


# ---- captured graphs


def captured(work: Callable[[torch.Stream], object], mode: str = "global") -> torch.cuda.CUDAGraph:
    """Capture what a function puts on a stream and on a second one."""
    graph, other = torch.cuda.CUDAGraph(), torch.Stream("cuda:0")
    with torch.cuda.graph(graph, capture_error_mode=mode):
        work(other)
    return graph


def fork_and_join(
    x: torch.Tensor, y: torch.Tensor, other: torch.Stream, waits: bool = True
) -> None:
    """Write ``2 * (x + 1)`` to y, the sum on a second stream."""
    own, z = torch.cuda.current_stream(), torch.empty_like(x)
    other.wait_stream(own)
    with other:
        torch.cuda._sleep(1)
        torch.add(x, 1, out=z)
    if waits:
        own.wait_stream(other)
    torch.mul(z, 2, out=y)
    if not waits:
        own.wait_stream(other)


@pytest.mark.parametrize("waits", [True, False])
def test_a_replay_runs_again_in_any_order_that_its_dependencies_allow(waits: bool) -> None:
    def run() -> object:
        x, y = torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:0")
        graph = captured(lambda other: fork_and_join(x, y, other, waits))
        found = [y.tolist()]
        for i in range(3):
            x.fill_(i)
            graph.replay()
            found.append(y.tolist())
        return found

    assert goes_wrong(run, [[0.0] * 3, [2.0] * 3, [4.0] * 3, [6.0] * 3]) != waits


def test_memory_of_a_graph_goes_back_within_it() -> None:
    def run() -> object:
        x, y = torch.ones(3, device="cuda:0"), torch.zeros(3, device="cuda:0")

        def work(other: torch.Stream) -> None:
            own = torch.cuda.current_stream()
            z = x + 1
            other.wait_stream(own)
            with other:
                torch.mul(z, 2, out=y)
            del z
            own.wait_stream(other)

        captured(work).replay()
        return y.tolist()

    assert goes_wrong(run, [4.0] * 3)


def test_a_replay_draws_the_numbers_that_come_next(played: Hardware) -> None:
    torch.manual_seed(3)
    expected = [torch.rand(3, device="cuda:0").tolist() for _ in range(5)]
    x, y = torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:0")
    graph = captured(lambda other: (x.uniform_(), y.uniform_()))
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        graph.replay()
        found += [x.tolist(), y.tolist()]
    assert [*found, torch.rand(3, device="cuda:0").tolist()] == expected


@pytest.mark.parametrize(
    ("work", "refusal"),
    [
        (
            lambda other: torch.cuda.synchronize(),
            "operation not permitted when stream is capturing: the host waits for",
        ),
        (
            lambda other: torch.ones(1, device="cuda:0").item(),
            "operation not permitted when stream is capturing",
        ),
        (
            lambda other: torch.ones(2).to("cuda:0", non_blocking=True),
            "a copy from pageable memory",
        ),
        (lambda other: torch.ones(2, device="cuda:0").to("cpu"), "a copy to pageable memory"),
        (lambda other: torch.cuda.Event().query(), "an event is queried"),
        (lambda other: fork(other, joins=False), "capturing stream has unjoined work: cuda:0/1"),
        (lambda other: on(other), "on cuda:0/1, which is no part of the capture"),
        (
            lambda other: torch.cuda.current_stream().wait_stream(other),
            "dependency created on uncaptured work",
        ),
    ],
    ids=[
        "synchronize",
        "item",
        "from pageable",
        "to pageable",
        "query",
        "unjoined",
        "outside",
        "wait for outside",
    ],
)
def test_what_a_capture_does_not_permit(
    work: Callable[[torch.Stream], object], refusal: str
) -> None:
    with playing(1, seed=0):
        with pytest.raises(RuntimeError, match=refusal):
            captured(work)
        x = torch.zeros(3, device="cuda:0")
        captured(lambda other: x.add_(1)).replay()
        assert x.tolist() == [1, 1, 1]


def on(other: torch.Stream) -> None:
    with other:
        torch.ones(2, device="cuda:0")


def fork(other: torch.Stream, joins: bool) -> None:
    other.wait_stream(torch.cuda.current_stream())
    on(other)
    if joins:
        torch.cuda.current_stream().wait_stream(other)


def test_an_event_of_a_capture_is_no_event_for_others(played: Hardware) -> None:
    event = torch.Event("cuda:0")
    captured(lambda other: event.record(torch.cuda.current_stream()))
    with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
        torch.cuda.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
        event.synchronize()


def test_nothing_is_played_afterwards() -> None:
    before = torch.Stream, torch.Event, torch.accelerator.current_stream, threading.Thread.run
    with playing(3):
        assert torch.accelerator.device_count() == 3
    assert (
        torch.Stream,
        torch.Event,
        torch.accelerator.current_stream,
        threading.Thread.run,
    ) == before
