"""Collectives of torch.distributed, as NCCL's process group has them: on streams of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autosched.sanitizer import Report, sanitize
from autosched.simulated_gpus import playing

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized()


def in_a_group(
    work: Callable[[], Any], size: int = 2, rank: int = 0, numbers: bool = False
) -> Report:
    def program() -> Any:
        dist.init_process_group("nccl", rank=rank, world_size=size)
        return work()

    return sanitize(program, numbers=numbers)


def kinds(work: Callable[[], Any], **place: int) -> set[tuple[str, str]]:
    report = in_a_group(work, **place)
    return {(finding.kind, finding.tensor) for finding in report.findings}


@pytest.mark.parametrize("waits", [False, True])
def test_gradients_are_reduced_while_backward_goes_on(waits: bool) -> None:
    def train() -> torch.Tensor:
        net, works = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(0), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def reduce(parameter: torch.Tensor) -> None:
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        for _ in range(2):
            net(torch.ones(2, 4, device=0)).sum().backward()
            for work in works if waits else ():
                work.wait()
            works.clear()
            optimizer.step()
            optimizer.zero_grad()
        return net[0].weight.detach()

    report = in_a_group(train)
    assert bool(report.findings) is not waits
    if not waits:
        assert "call wait() of what the collective returned" in report.findings[0].fix
        assert "the stream of a group" in report.findings[0].message


def used(start: Callable[[torch.Tensor], Any], wait: bool) -> Callable[[], torch.Tensor]:
    """Overwrite a tensor that a collective was given."""

    def work() -> torch.Tensor:
        x = torch.ones(4, device=0)
        done = start(x)
        if wait:
            done.wait()
        x.zero_()
        return x

    return work


ASYNC: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 0, async_op=True),
    "reduce": lambda x: dist.reduce(x, 0, async_op=True),
    "all_gather": lambda x: dist.all_gather(
        [torch.empty(4, device=0) for _ in range(2)], x, async_op=True
    ),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(
        torch.empty(8, device=0), x, async_op=True
    ),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(
        torch.empty(2, device=0), x, async_op=True
    ),
    "all_to_all_single": lambda x: dist.all_to_all_single(
        torch.empty(4, device=0), x, async_op=True
    ),
    "isend": lambda x: dist.isend(x, 1),
    "irecv": lambda x: dist.irecv(x, 1),
}


@pytest.mark.parametrize("name", ASYNC)
def test_what_does_not_block_must_be_waited_for(name: str) -> None:
    assert ("race", "x") in kinds(used(ASYNC[name], wait=False))
    assert not kinds(used(ASYNC[name], wait=True))


@pytest.mark.parametrize(
    ("start", "rank", "writes"),
    [
        (ASYNC["broadcast"], 0, False),
        (ASYNC["broadcast"], 1, True),
        (ASYNC["reduce"], 0, True),
        (ASYNC["reduce"], 1, False),
        (ASYNC["isend"], 0, False),
        (ASYNC["irecv"], 0, True),
        (ASYNC["all_reduce"], 0, True),
        (ASYNC["all_gather_into_tensor"], 0, False),
    ],
)
def test_ranks_write_what_they_receive(start: Any, rank: int, writes: bool) -> None:
    def read() -> torch.Tensor:
        x = torch.ones(4, device=0)
        done = start(x)
        y = x + 1
        done.wait()
        return y

    assert (("race", "x") in kinds(read, rank=rank)) is writes


def test_what_blocks_is_on_the_current_stream_and_a_barrier_waits_on_the_host() -> None:
    def work() -> list[float]:
        x, host = torch.ones(4, device=0), torch.zeros(4).pin_memory()
        dist.all_reduce(x)
        x.add_(1)
        host.copy_(x, non_blocking=True)
        dist.barrier()
        group = dist.new_group([0, 1], backend="nccl")
        done = dist.all_reduce(x, group=group, async_op=True)
        del x
        done.wait()
        while not done.is_completed():
            pass
        return host.tolist()

    assert not kinds(work)


def test_the_stream_of_a_collective_waits_for_the_current_one_alone() -> None:
    def work() -> torch.Tensor:
        side, x = torch.cuda.Stream(), torch.zeros(4, device=0)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        dist.all_reduce(x, async_op=True).wait()
        torch.cuda.synchronize()
        return x

    assert kinds(work) == {("race", "x")}


def test_numbers_are_those_of_ranks_that_have_the_same() -> None:
    def work() -> list[list[float]]:
        x, out = torch.tensor([1.0, 2.0], device=0), torch.zeros(4, device=0)
        dist.all_gather_into_tensor(out, x)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        return [x.tolist(), out.tolist()]

    assert in_a_group(work, numbers=True).result == [[1.0, 2.0], [1.0, 2.0, 1.0, 2.0]]


def test_torchruns_variables_and_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with playing(1, numbers=False):
        dist.init_process_group()
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert dist.get_backend() == "gloo"
        dist.destroy_process_group()
