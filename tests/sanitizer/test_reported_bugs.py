"""Bugs that users have reported, as small programs before and after their correction.

Each program takes ``fixed``. Without it the sanitizer must find the bug, of the kind and in the tensor
given; with it, nothing. docs/howto/sanitizing.md has the table with the sources.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosched.sanitizer import sanitize

BUGS: dict[str, tuple[Callable[[bool], Any], str, str]] = {}


def bug(name: str, kind: str, tensor: str) -> Callable[[Callable[[bool], Any]], Any]:
    def add(program: Callable[[bool], Any]) -> Any:
        BUGS[name] = program, kind, tensor
        return program

    return add


def main() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def rows(value: float = 1.0) -> torch.Tensor:
    return torch.full((8, 4), value, device="cuda")


@bug("R1", "race", "hidden")
def experts_write_in_place_what_shared_experts_read(fixed: bool) -> torch.Tensor:
    hidden, weight = rows(), torch.ones(4, 4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        shared = hidden @ weight
    if fixed:
        main().wait_stream(side)
    hidden.mul_(2)  # the routed experts
    main().wait_stream(side)
    return hidden + shared


@bug("R2", "lifetime", "copied")
def a_clone_on_one_stream_is_used_on_another(fixed: bool) -> torch.Tensor:
    hidden, side = rows(), torch.cuda.Stream()
    copied = hidden.clone()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        shared = copied * 2
    if fixed:
        copied.record_stream(side)
    del copied
    routed = hidden + 1
    main().wait_stream(side)
    return routed + shared


@bug("R3", "lifetime", "partial")
def memory_of_a_side_stream_is_overwritten(fixed: bool) -> torch.Tensor:
    x, side = rows(), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        partial = x * 2
    main().wait_stream(side)
    y = partial + 1
    if fixed:
        side.wait_stream(main())
    del partial
    with torch.cuda.stream(side):
        z = torch.zeros(8, 4, device="cuda")
    main().wait_stream(side)
    return y + z


class Kernel:
    """Has a workspace that all its calls write."""

    def __init__(self) -> None:
        self.workspace = torch.empty(8, 4, device="cuda")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=self.workspace)
        return self.workspace.sum()


@bug("R4", "race", "self.workspace")
def two_streams_use_the_workspace_of_a_kernel(fixed: bool) -> torch.Tensor:
    x, side = rows(), torch.cuda.Stream()
    kernel = Kernel()
    other = Kernel() if fixed else kernel
    side.wait_stream(main())
    with torch.cuda.stream(side):
        a = kernel(x)
    b = other(x)
    main().wait_stream(side)
    return a + b


@bug("R5", "host", "tokens")
def the_host_reads_a_copy_at_once(fixed: bool) -> list[float]:
    logits = rows()
    tokens = logits.argmax(-1).to("cpu", non_blocking=True)
    if fixed:
        main().synchronize()
    return tokens.tolist()


@bug("R6", "race", "buffer")
def a_row_is_used_again_while_another_stream_reads_it(fixed: bool) -> torch.Tensor:
    buffer, side, outputs = torch.zeros(2, 4, device="cuda"), torch.cuda.Stream(), []
    for step in range(3):
        row = buffer[step % 2]
        if fixed and step >= 2:
            main().wait_stream(side)
        row.fill_(step)
        side.wait_stream(main())
        with torch.cuda.stream(side):
            outputs.append(row * 2)
    main().wait_stream(side)
    return torch.stack(outputs)


@bug("R7", "host", "state")
def optimizer_states_are_offloaded_and_changed_on_the_host_too_early(fixed: bool) -> torch.Tensor:
    gradient, state = rows(), torch.zeros(8, 4).pin_memory()
    copies, event = torch.cuda.Stream(), torch.cuda.Event()
    copies.wait_stream(main())
    with torch.cuda.stream(copies):
        state.copy_(gradient, non_blocking=True)
        gradient.record_stream(copies)
        event.record()
    if fixed:
        event.synchronize()
    state.mul_(0.9)
    return state.to("cuda", non_blocking=True)


@bug("R8", "race", "x")
def an_input_is_written_back_after_the_join(fixed: bool) -> torch.Tensor:
    x, side = rows(), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        y = x * 2
        if fixed:
            x.copy_(y)
    main().wait_stream(side)
    with torch.cuda.stream(side):
        if not fixed:
            x.copy_(y)
    return x + 1


class Engine:
    """Runs on a private stream, as inference engines do."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def __call__(self, x: torch.Tensor, *, waits: bool) -> torch.Tensor:
        if waits:
            self.stream.wait_stream(main())
        with torch.cuda.stream(self.stream):
            y = x * 2
        main().wait_stream(self.stream)
        return y


@bug("R9", "race", "x")
def an_engine_on_a_private_stream_reads_its_input_too_early(fixed: bool) -> torch.Tensor:
    return Engine()(rows(), waits=fixed)


@bug("R10", "race", "weights")
def weights_are_returned_before_the_side_stream_has_written_them(fixed: bool) -> torch.Tensor:
    weights, side = rows(), torch.cuda.Stream()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        weights.add_(1)
    if fixed:
        main().wait_stream(side)
    return weights


@bug("R11", "stream", "")
def a_worker_thread_is_on_the_default_stream(fixed: bool) -> list[torch.Tensor]:
    own, found = torch.cuda.Stream(), []
    with torch.cuda.stream(own):
        x = rows()

        def work() -> None:
            with torch.cuda.stream(own) if fixed else contextlib.nullcontext():
                found.append(x * 2)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        y = found[0] + 1
    main().wait_stream(own)
    return y


@bug("R12", "race", "moved")
def a_group_of_weights_is_loaded_without_waits(fixed: bool) -> torch.Tensor:
    weight, x = torch.ones(4, 4).pin_memory(), rows()
    loads = torch.cuda.Stream()
    with torch.cuda.stream(loads):
        moved = weight.to("cuda", non_blocking=True)
    if fixed:
        main().wait_stream(loads)
    y = x @ moved
    if fixed:
        moved.record_stream(main())
    return y


@bug("R13", "event", "moved")
def the_event_of_the_wrong_stream_is_awaited(fixed: bool) -> torch.Tensor:
    weight = torch.ones(8, 4).pin_memory()
    loads, loaded = torch.cuda.Stream(), torch.cuda.Event()
    if not fixed:
        loaded.record(loads)
    with torch.cuda.stream(loads):
        moved = weight.to("cuda", non_blocking=True)
    if fixed:
        loaded.record(loads)
    main().wait_event(loaded)
    y = moved * 2
    moved.record_stream(main())
    return y


@bug("R14", "graph", "x")
def a_graph_is_replayed_while_its_input_is_written(fixed: bool) -> torch.Tensor:
    x, y, side = rows(), rows(0.0), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(x, 2, out=y)
    with torch.cuda.stream(side):
        if fixed:
            side.wait_stream(main())
        x.fill_(3)
    if fixed:
        main().wait_stream(side)
    graph.replay()
    main().synchronize()
    return y


@bug("R15", "lifetime", "batch")
def a_prefetched_batch_is_not_recorded(fixed: bool) -> torch.Tensor:
    host, loads = torch.ones(8, 4).pin_memory(), torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    for _ in range(2):
        with torch.cuda.stream(loads):
            batch = host.to("cuda", non_blocking=True)
        main().wait_stream(loads)
        if fixed:
            batch.record_stream(main())
        total = total + batch.sum()
        del batch
    return total


@bug("R16", "host", "image")
def a_pinned_source_is_changed_before_it_was_copied(fixed: bool) -> torch.Tensor:
    image, found = torch.zeros(4).pin_memory(), []
    for step in range(2):
        if fixed and step:
            main().synchronize()
        image.fill_(step)
        found.append(image.to("cuda", non_blocking=True))
    return torch.stack(found)


@bug("R17", "race", "second")
def gpus_exchange_halves_and_one_reads_too_early(fixed: bool) -> torch.Tensor:
    first, second = torch.ones(4, device="cuda:0"), torch.zeros(4, device="cuda:0")
    peer = torch.full((4,), 2.0, device="cuda:1")
    copies = torch.cuda.Stream("cuda:1"), torch.cuda.Stream("cuda:0")
    copies[0].wait_stream(torch.cuda.current_stream("cuda:1"))
    copies[1].wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(copies[0]), torch.cuda.stream(copies[1]):
        second.copy_(peer)
    if fixed:
        torch.cuda.current_stream("cuda:0").wait_stream(copies[1])
    total = first + second
    torch.cuda.current_stream("cuda:0").wait_stream(copies[1])
    torch.cuda.current_stream("cuda:1").wait_stream(copies[0])
    return total


@pytest.mark.parametrize("name", BUGS)
def test_a_reported_bug_is_found_and_its_correction_is_not(name: str) -> None:
    program, kind, tensor = BUGS[name]
    wrong = sanitize(program, False, gpus=2)
    found = [(finding.kind, finding.names) for finding in wrong.findings]
    assert any(k == kind and (tensor in names or not tensor) for k, names in found), (
        f"{found}\n{wrong}"
    )
    right = sanitize(program, True, gpus=2)
    assert not right.findings, str(right)
    assert isinstance(wrong.to_json()["findings"], list)
