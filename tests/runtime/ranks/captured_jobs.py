"""Captured steps on ranks: each function runs in a process of its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import autosched as asc
from autosched.machine.cluster import joined


@contextlib.contextmanager
def process_group() -> Iterator[Any]:
    """Initialise torch.distributed among the ranks of a job."""
    member = joined()
    dist.init_process_group("gloo", store=member.store, rank=member.rank, world_size=member.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def example(*shape: int) -> torch.Tensor:
    """Return numbers that differ between ranks."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1 + joined().rank, count).reshape(shape)


# ---- functional collectives


def collect_all(group: Any) -> Callable[..., Any]:
    """Return a function with three collectives, which nothing but their order keeps apart."""

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x @ w
        total = functional.all_reduce(h, "sum", group)
        parts = functional.all_gather_tensor(h.relu(), 0, group)
        mine = functional.reduce_scatter_tensor(h.tanh(), "sum", 0, group)
        return functional.wait_tensor(total) * 2, parts.sum(0), mine + 1

    return step


def overwrite(group: Any) -> Callable[..., Any]:
    """Return a function that overwrites what a collective has read."""

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x @ w
        total = functional.wait_tensor(functional.all_gather_tensor(h, 0, group))
        h.mul_(0)
        return total, h

    return step


def on_dtensors(group: Any) -> Callable[..., Any]:
    """Return a function that makes DTensors, and redistributes them."""
    mesh = init_device_mesh("cpu", (group.size(),))

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        rows = DTensor.from_local(x, mesh, [Shard(0)])
        product = rows @ DTensor.from_local(w, mesh, [Replicate()])
        return product.redistribute(mesh, [Replicate()]).to_local() + 1

    return step


def compare_collectives(name: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether calls equal eager ones, and the names of the tasks."""
    with process_group() as group:
        step = globals()[name](group)
        x, w = example(4, 4), example(4, 4)
        expected = step(x, w)
        with asc.compile(step, asc.Machine.local(0, 3), policy="round_robin") as run:
            same = [equal(run(x, w), expected) for _ in range(3)]
            tasks = tuple(task.name for task in run.schedule(x, w).graph.tasks)
    return all(same), tasks


def equal(found: Any, expected: Any) -> bool:
    """Whether tensors, or tuples of them, are the same, bit for bit."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    return all(map(torch.equal, found, expected))


def train_with_collectives() -> bool:
    """Train a model whose gradients are reduced in the step; compare with eager training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    with process_group() as group:

        def training(model: nn.Module) -> Callable[..., Any]:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = model(x).square().sum()
                loss.backward()
                for item in model.parameters():
                    assert item.grad is not None
                    item.grad.copy_(functional.all_reduce(item.grad, "sum", group) / group.size())
                optimizer.step()
                optimizer.zero_grad()
                return loss

            return step

        expected = training(twin)
        with asc.compile(training(model), asc.Machine.local(0, 2), policy="m_etf") as run:
            same = [torch.equal(run(example(3, 4)), expected(example(3, 4))) for _ in range(3)]
    return all(same) and all(map(torch.equal, model.parameters(), twin.parameters()))


def refuse_collective() -> str:
    """Capture a collective that is not functional; return the error."""
    with process_group():

        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)
            return y

        return error_of(lambda: asc.capture(step, torch.ones(3)))


def error_of(do: Callable[[], Any]) -> str:
    """Return what a function raises."""
    try:
        do()
    except asc.AutoschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- DistributedDataParallel and fully_shard


def wrapped(kind: str, group: Any) -> nn.Module:
    """Return a module that communicates in its hooks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    return model


def refuse_wrapped(kind: str) -> str:
    """Capture such a module; return the error."""
    with process_group() as group:
        model = wrapped(kind, group)
        return error_of(lambda: asc.capture(lambda x: model(x), torch.ones(2, 4)))


def train_wrapped(kind: str) -> bool:
    """Train two such modules, each in one task; compare with eager training."""
    with process_group() as group:
        found, expected = ([wrapped(kind, group) for _ in range(2)] for _ in range(2))

        def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                loss = model(x).square().sum()
                loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        graph = asc.Graph()
        x = graph.input("x")
        losses = [graph.add(step, model, x, name=f"loss{i}") for i, model in enumerate(found)]
        graph.output(first=losses[0], second=losses[1])
        rounds = []
        with asc.schedule(graph, asc.Machine.local(0, 2), policy="round_robin") as schedule:
            for _ in range(3):
                outputs = schedule(x=example(2, 4))
                wanted = [step(model, example(2, 4)) for model in expected]
                rounds.append(all(map(torch.equal, outputs.values(), wanted)))
        return all(rounds) and all(
            torch.equal(local(a.grad), local(b.grad))
            for one, other in zip(found, expected, strict=True)
            for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
