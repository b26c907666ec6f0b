"""Further bugs that users have reported, in training and inference frameworks, before and after their correction.

docs/concepts/sanitizer.md has the table with the sources.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autosched.sanitizer import sanitize
from tests.sanitizer.test_reported_bugs import BUGS, bug, main

OLDER = {*BUGS}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@bug("N1", "lifetime", "")
def an_activation_is_freed_while_it_is_offloaded(fixed: bool) -> torch.Tensor:
    side, net = (
        torch.cuda.Stream(),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(0),
    )
    hosts: list[torch.Tensor] = []

    def pack(item: torch.Tensor) -> torch.Tensor:
        side.wait_stream(main())
        with torch.cuda.stream(side):
            host = item.to("cpu", non_blocking=True)
            if fixed:
                item.record_stream(side)
        hosts.append(host)
        return host

    def unpack(host: torch.Tensor) -> torch.Tensor:
        side.synchronize()
        return host.to("cuda")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = net(torch.ones(2, 4, device=0)).exp().sum()
    loss.backward()
    return net[0].weight.grad


@bug("N2", "lifetime", "copy")
def a_parameter_that_was_brought_is_dropped_while_it_is_used(fixed: bool) -> torch.Tensor:
    bring, x = torch.cuda.Stream(), torch.ones(4, device=0)
    hosts = [torch.full((4,), float(i)).pin_memory() for i in range(3)]
    for host in hosts:
        with torch.cuda.stream(bring):
            copy = host.to("cuda", non_blocking=True)
        main().wait_stream(bring)
        x = x * copy
        if fixed:
            copy.record_stream(main())
        del copy
    return x


@bug("N3", "race", "bucket")
def a_bucket_is_filled_again_while_it_is_reduced(fixed: bool) -> torch.Tensor:
    reduction, bucket = torch.cuda.Stream(), torch.zeros(8, device=0)
    gradients, reduced = [torch.ones(8, device=0) for _ in range(3)], []
    for gradient in gradients:
        bucket.copy_(gradient)
        reduction.wait_stream(main())
        with torch.cuda.stream(reduction):
            reduced.append(bucket / 2)
        if fixed:
            main().wait_stream(reduction)
    main().wait_stream(reduction)
    for item in reduced:
        item.record_stream(main())
    return torch.stack(reduced)


@bug("N4", "race", "bucket")
def a_reduction_waits_for_one_of_the_streams_that_fill_its_bucket(fixed: bool) -> torch.Tensor:
    reduction, other = torch.cuda.Stream(), torch.cuda.Stream()
    bucket = torch.zeros(8, device=0)
    other.wait_stream(main())
    with torch.cuda.stream(other):
        bucket[4:].fill_(2)
    bucket[:4].fill_(1)
    reduction.wait_stream(main())
    if fixed:
        reduction.wait_stream(other)
    with torch.cuda.stream(reduction):
        bucket.div_(2)
    for stream in (reduction, other):
        main().wait_stream(stream)
    return bucket


class Runner:
    """Prepares each step on the host while the GPU works on the last one."""

    def __init__(self, buffers: int):
        self.inputs = [torch.zeros(4).pin_memory() for _ in range(buffers)]
        self.static = torch.zeros(4, device=0)
        self.done: list[torch.cuda.Event] = []

    def step(self, i: int) -> torch.Tensor:
        ready = self.inputs[i % len(self.inputs)].fill_(i)
        self.static.copy_(ready, non_blocking=True)
        result = self.static * 2
        self.done.append(main().record_event())
        return result


@bug("N5", "host", "self.inputs[0]")
def inputs_of_a_step_are_prepared_while_the_last_ones_are_copied(fixed: bool) -> torch.Tensor:
    runner, results = Runner(buffers=1), []
    for i in range(3):
        if fixed and i:
            runner.done[i - 1].synchronize()
        results.append(runner.step(i))
    return torch.stack(results)


@bug("N6", "host", "accepted")
def counts_are_read_in_the_next_step_without_an_event(fixed: bool) -> list[int]:
    accepted, done = torch.zeros(4, dtype=torch.int64).pin_memory(), torch.cuda.Event()
    counts = []
    for i in range(2):
        if i:
            if fixed:
                done.synchronize()
            counts += accepted.numpy().tolist()
        found = torch.full((4,), i, device=0)
        accepted.copy_(found, non_blocking=True)
        done.record()
    done.synchronize()
    return counts


@bug("N7", "host", "self.inputs[0]")
def one_buffer_where_two_are_needed(fixed: bool) -> torch.Tensor:
    """The host waits for the step before the last one, as results come one step late."""
    runner, results = Runner(buffers=2 if fixed else 1), []
    for i in range(4):
        if i > 1:
            runner.done[i - 2].synchronize()
        results.append(runner.step(i))
    return torch.stack(results)


@bug("N8", "race", "shard")
def a_copy_to_the_host_waits_for_its_own_stream_alone(fixed: bool) -> torch.Tensor:
    reduction, gradient = torch.cuda.Stream(), torch.ones(8, device=0)
    reduction.wait_stream(main())
    with torch.cuda.stream(reduction):
        shard = gradient[:4] / 2
    if fixed:
        main().wait_stream(reduction)
    host = shard.cpu()  # it blocks, on the default stream
    main().wait_stream(reduction)
    shard.record_stream(main())
    return host


@bug("N9", "graph", "static")
def a_graph_is_captured_before_the_warm_up_has_ended(fixed: bool) -> torch.Tensor:
    side, static = torch.cuda.Stream(), torch.ones(4, device=0)
    side.wait_stream(main())
    with torch.cuda.stream(side):
        for _ in range(2):
            static.mul_(2)
    graph, capture = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    if fixed:
        main().wait_stream(side)
    with torch.cuda.stream(capture):
        graph.capture_begin()
        result = static + 1
        graph.capture_end()
    graph.replay()
    main().wait_stream(side)
    return result


@bug("N10", "race", "points")
def a_kernel_is_launched_on_stream_zero(fixed: bool) -> torch.Tensor:
    def build(points: torch.Tensor) -> torch.Tensor:
        stream = main() if fixed else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            return points * 2

    side, source = torch.cuda.Stream(), torch.ones(4, device=0)
    side.wait_stream(main())
    with torch.cuda.stream(side):
        points = source + 1
        grid = build(points)
    torch.cuda.synchronize()
    return grid


@bug("N11", "lifetime", "")
def an_output_is_deallocated_while_it_is_sent(fixed: bool) -> torch.Tensor:
    dist.init_process_group("nccl", rank=0, world_size=2)
    output = torch.ones(64, device=0) * 2
    sent = dist.isend(output, 1)
    if fixed:
        sent.wait()
    output.data = torch.empty(1, device=0)  # its graph is kept for backward
    following = torch.zeros(64, device=0)
    sent.wait()
    return following


@bug("N12", "race", "scales")
def one_of_three_gathers_is_waited_for(fixed: bool) -> torch.Tensor:
    dist.init_process_group("nccl", rank=0, world_size=2)
    parts = [torch.ones(4, device=0) for _ in range(3)]
    keys, values, scales = (torch.empty(8, device=0) for _ in range(3))
    handles = [
        dist.all_gather_into_tensor(whole, part, async_op=True)
        for whole, part in zip((keys, values, scales), parts, strict=True)
    ]
    for handle in handles if fixed else handles[:1]:
        handle.wait()
    result = keys + values + scales
    for handle in handles:
        handle.wait()
    return result


@pytest.mark.parametrize("name", [name for name in BUGS if name not in OLDER])
def test_a_bug_is_found_and_its_correction_is_not(name: str) -> None:
    program, kind, tensor = BUGS[name]
    wrong: Any = sanitize(program, False)
    found = [(finding.kind, finding.names) for finding in wrong.findings]
    assert any(k == kind and (tensor in names or not tensor) for k, names in found), (
        f"{found}\n{wrong}"
    )
    right = sanitize(program, True)
    assert not right.findings, str(right)
