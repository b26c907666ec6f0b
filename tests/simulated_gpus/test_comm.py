"""Copies of ``torch.nn.parallel``, and devices by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, gather, parallel_apply, replicate

from autosched.sanitizer import sanitize
from autosched.simulated_gpus import playing


def test_copies_are_what_torch_says() -> None:
    with playing(2) as gpus:
        gpus.eagerness = 2.0
        x = torch.arange(6.0).view(3, 2)
        one, other = comm.broadcast(x, [0, 1])
        assert (one.device.index, other.device.index) == (0, 1)
        parts = comm.scatter(x, [0, 1], [1, 2])
        assert [part.tolist() for part in parts] == [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
        stream = torch.cuda.Stream(1)
        again = comm.scatter(x.pin_memory(), [0, 1], dim=1, streams=[None, stream])
        torch.cuda.synchronize(1)
        assert [part.shape for part in again] == [(3, 1), (3, 1)]
        assert comm.gather(parts, destination=1).tolist() == x.tolist()
        assert comm.gather(parts, destination="cpu").tolist() == x.tolist()
        (copies,) = zip(*comm.broadcast_coalesced([one], [0, 1]), strict=True)
        assert copies[0] is one
        assert comm.reduce_add([one, other], 0).tolist() == (2 * x).tolist()
        assert comm.reduce_add_coalesced([[one], [other]], 1)[0].tolist() == (2 * x).tolist()


def test_data_parallel_computes_what_one_gpu_does() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3), torch.rand(5, 4)
    net(x).square().sum().backward()
    expected = net.weight.grad
    net.zero_grad()
    with playing(2, seed=3):
        nn.DataParallel(net.to(0))(x.to(0)).square().sum().backward()
        assert net.weight.grad is not None
        torch.testing.assert_close(net.weight.grad.cpu(), expected)


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_data_parallel_does_not_wait_for(waits: bool) -> None:
    def program() -> torch.Tensor:
        net, load = nn.Linear(4, 4).to(1), torch.cuda.Stream(1)
        with torch.cuda.stream(load):
            batch = torch.ones(2, 4, device=1)
        if waits:
            torch.cuda.current_stream(1).wait_stream(load)
        nets = replicate(net, [1, 0])
        parts = [batch, torch.ones(2, 4, device=0)]
        found = parallel_apply(nets, parts, devices=[1, 0])
        batch.record_stream(torch.cuda.current_stream(1))
        return gather(found, 1)

    found = {(finding.kind, finding.tensor) for finding in sanitize(program, gpus=2).findings}
    assert (("race", "batch") in found) is not waits
    assert bool(found) is not waits


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).to(1),
        lambda: torch.ones(2).to(device=1, dtype=torch.float64),
        lambda: torch.ones(2).cuda(1),
        lambda: torch.zeros(2, device=1),
        lambda: torch.tensor([1.0], device=1),
        lambda: torch.rand(2, device=1),
        lambda: torch.ones(2).cuda().new_zeros(2, device=1),
        lambda: torch.zeros_like(torch.ones(2, device="cuda:0"), device="cuda:1"),
        lambda: nn.Linear(2, 2).to(1).weight,
        lambda: nn.Linear(2, 2).cuda(1).weight,
        lambda: nn.Linear(2, 2, device=1).weight,
    ],
)
def test_devices_are_named_by_numbers(make: Callable[[], Any]) -> None:
    with playing(2, numbers=False):
        assert make().device == torch.device("cuda", 1)
