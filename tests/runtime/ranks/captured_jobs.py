"""Captured steps on ranks: each function runs in a process of its own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import autosched as asc


def error_of(do: Callable[[], Any]) -> str:
    """Return what a function raises."""
    try:
        do()
    except asc.AutoschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refuse(what: str) -> str:
    """Capture or call together what is refused; return the error, or the warning of Dynamo."""
    x = torch.ones(4)
    if what in ("all_reduce", "dynamo"):
        with contextlib.nullcontext(dist.group.WORLD) as group:

            def step(x: torch.Tensor) -> torch.Tensor:
                y = x * 2
                return functional.wait_tensor(functional.all_reduce(y, "sum", group)) + 1

            if what == "dynamo":
                compiled = torch.compile(step, backend=asc.TorchBackend(asc.Machine.local(0)))
                with warnings.catch_warnings(record=True) as found:
                    compiled(x)
                return " ".join(str(each.message) for each in found)
            return error_of(lambda: asc.capture(step, x))
    if what in ("ddp", "fsdp2"):
        with contextlib.nullcontext(dist.group.WORLD) as group:
            model = wrapped(what, group)
            return error_of(lambda: asc.capture(lambda x: model(x), x))
    machine = asc.Machine.cluster()
    if what == "backend":
        return error_of(lambda: asc.TorchBackend(machine))
    if what == "gradient":
        run = asc.compile(nn.Linear(4, 1), machine, policy="single")
        return error_of(run(x).sum().backward)
    if what == "generator":
        own = torch.Generator()
        return error_of(lambda: asc.compile(lambda x: x + torch.rand(4, generator=own), machine)(x))
    return error_of(lambda: asc.compile(lambda a, b: a.mul_(b), machine)(x[1:], x[:3]))


# ---- DistributedDataParallel and fully_shard


def wrapped(kind: str, group: Any) -> nn.Module:
    """Return a module that communicates in its hooks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    return model


# ---- functions of all ranks


def training(model: nn.Module) -> Callable[..., Any]:
    """Return a training step that draws random numbers and writes statistics."""
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def a_model() -> nn.Module:
    """Return a model with dropout and a batch norm, the same in all processes."""
    torch.manual_seed(0)
    parts = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
    return nn.Sequential(*parts)


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters, buffers and gradients of a model, and the state of the generator."""
    grads = [item.grad for item in model.parameters() if item.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, torch.get_rng_state()]


def train_together(policy: str) -> list[bool]:
    """Train on all ranks by one program; return whether each call equals an eager one."""
    model, twin = a_model(), a_model()
    expected = training(twin)
    same = []
    with asc.compile(training(model), asc.Machine.cluster(), policy=policy) as run:
        for number in range(4):
            batch = torch.full((6, 4), number / 3).cumsum(0), torch.ones(6, 2)
            torch.manual_seed(number)
            losses = [expected(*batch), None]
            wanted = state_of(twin)
            torch.manual_seed(number)
            losses[1] = run(*batch)
            found = state_of(model)
            same.append(torch.equal(*losses) and all(map(torch.equal, found, wanted)))
    return same


def halves(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Return two products, and write an argument."""
    first, second = x[:2] @ w, x[2:] @ w
    x.mul_(2)
    return first, {"second": second.relu()}


def call_together(outputs: str | None) -> tuple[Any, torch.Tensor, tuple[str, ...]]:
    """Return the result of a function of all ranks, the argument afterwards, and what was sent."""
    x, w = torch.arange(16.0).view(4, 4), torch.eye(4)
    machine = asc.Machine.cluster()
    options = {} if outputs is None else {"outputs": outputs}
    with asc.compile(halves, machine, policy="round_robin", **options) as run:
        run(x, w)
        result = run(x, w)
        program = run.schedule(x, w).program
    return result, x, tuple(str(item) for item in program if "copy w" in str(item))


def call_differently(how: str) -> list[str]:
    """Let rank 1 call a function in another way than the others; return what each call raises."""
    machine = asc.Machine.cluster(timeout=10)
    other = machine.rank == 1
    model = nn.Linear(4, 4)
    scale = 3.0 if other and how == "constant" else 2.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        if other and how == "capture":
            assert x.sum() > 0
        return model(x) * scale

    shape = (3, 4) if other and how == "first shape" else (2, 4)
    found = []
    with torch.no_grad(), asc.compile(fn, machine, policy="single") as run:
        found.append(error_of(lambda: run(torch.ones(shape))))
        if other and how == "mode":
            model.eval()
        shape = (3, 4) if other and how == "later shape" else shape
        if other and how == "arguments":
            found.append(error_of(lambda: run(torch.ones(shape), 1)))
        else:
            found.append(error_of(lambda: run(torch.ones(shape))))
        model.train()
        found.append(error_of(lambda: run(torch.ones(2, 4))))  # goes on
    return found


def overlap_on_one_rank() -> list[str]:
    """Let rank 1 pass arguments that share memory, of which one is written; return the errors."""
    x = torch.ones(8)
    found = []
    machine = asc.Machine.cluster()
    with asc.compile(lambda a, b: a.mul_(b), machine, policy="single") as run:
        for number in range(3):
            both = number == 1 and machine.rank == 1
            a, b = (x[1:4], x[:3]) if both else (x[:3], torch.ones(3))
            found.append(error_of(lambda a=a, b=b: run(a, b)))
    return found


def schedule_captured() -> list[Any]:
    """Schedule a captured function; return outputs, and the error for a step with new state."""
    machine = asc.Machine.cluster()
    x = torch.arange(4.0)
    graph = asc.capture(lambda x: x + 1, x)
    with asc.schedule(graph, machine, policy="single") as schedule:
        found: list[Any] = [schedule(x)]
    model = nn.Linear(4, 1)
    step = asc.capture(lambda x: model(x).sum().backward(), x)
    with asc.schedule(step, machine, policy="single") as schedule:
        return [*found, error_of(lambda: schedule(x))]
