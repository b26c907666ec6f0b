"""What training on several devices is held to: the same micro-batches one after another, in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.batches import rows_of, shares
from autosched.parallel.step import Step

Loss = Callable[[Any, Any], Tensor]
Rows = Sequence[Sequence[int]]  # of each replica, by micro-batch
Optimize = Callable[[Any], optim.Optimizer]
Make = Callable[[nn.Module, Loss, optim.Optimizer], Step]


def data_parallel(gpus: int = 2, **options: Any) -> Make:
    """Return how to make a step of so many replicas."""
    options = {
        "machine": asc.Machine.emulated(gpus=gpus),
        "backend": "virtual",
        "reduction": "sum",
        **options,
    }
    return lambda *trained: asc.parallel.data_parallel(*trained, **options)


def pipeline(gpus: int = 2, **options: Any) -> Make:
    """Return how to make a pipeline of so many devices."""
    options = {
        "machine": asc.Machine.emulated(gpus=gpus),
        "backend": "virtual",
        "chunks": 2,
        **options,
    }
    return lambda *trained: asc.parallel.pipeline(*trained, **options)


def model_parallel(gpus: int = 2, **options: Any) -> Make:
    """Return how to make a step of a model with its stages on so many devices."""
    options = {"machine": asc.Machine.emulated(gpus=gpus), "backend": "virtual", **options}

    def make(model: nn.Module, loss_fn: Loss, optimizer: optim.Optimizer) -> Step:
        how: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": optimizer}
        return asc.parallel.model_parallel(model, **how, **options)

    return make


def among(replicas: int, chunks: int = 1) -> Callable[[int], Rows]:
    """Return how a batch is cut."""
    return lambda rows: [shares(share, chunks) for share in shares(rows, replicas)]


def some(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Return parameters of a test of which all but some are slow."""
    return [
        name
        if name in quick
        else pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=pytest.mark.slow)
        for name in names
    ]


def small() -> nn.Module:
    """Return a network for ``vectors``."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def vectors(*sizes: int, width: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of so many vectors, with their classes."""
    torch.manual_seed(0)
    return iter([(torch.randn(size, width), torch.randint(0, 4, (size,))) for size in sizes])


def momentum(parameters: Any) -> optim.Optimizer:
    """Return what keeps a state from the first step on."""
    return optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)


def train(
    model: nn.Module,
    loss_fn: Loss,
    optimizer: optim.Optimizer,
    batch: Sequence[Any],
    rows: Rows,
    averages: bool = True,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> Tensor:
    """Train by one step: each replica its micro-batches; then gradients are summed in the order of replicas.

    Other replicas begin with the buffers of the first one with rows, and leave them alone.
    """
    losses, sums, start, total = list[Tensor](), list[Any](), 0, sum(map(sum, rows))
    first = next(number for number, sizes in enumerate(rows) if sizes)
    replicas = [model if i == first else copy.deepcopy(model) for i in range(len(rows))]
    for replica, sizes in zip(replicas, rows, strict=True):
        replica.zero_grad()
        for size in sizes:
            part = rows_cut(tuple(batch), start, start + size)
            loss = loss_fn(replica(*part[:-1]), part[-1])
            loss = loss * (size / total) if averages and size != total else loss
            loss.backward()
            losses.append(loss.detach())
            start += size
        own = [parameter.grad for parameter in replica.parameters()]
        sums = (
            [a if b is None else b if a is None else a + b for a, b in zip(sums, own, strict=True)]
            if sums
            else own
        )
    for parameter, gradient in zip(model.parameters(), sums, strict=True):
        parameter.grad = gradient
    before_step(model)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses[1:], start=losses[0])


def rows_cut(tree: Any, start: int, end: int) -> Any:
    """Return rows of a batch as they lie in it: kernels make other last bits of memory that is aligned otherwise."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(rows_cut(item, start, end) for item in tree)
    if isinstance(tree, dict):
        return {key: rows_cut(item, start, end) for key, item in tree.items()}
    return tree[start:end] if isinstance(tree, Tensor) and tree.dim() else tree


def assert_equal(found: Any, expected: Any, where: str) -> None:
    """Assert that trees of tensors are the same bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{where}[{number}]")
    elif isinstance(expected, Tensor):
        same = torch.equal(found.cpu(), expected.cpu())  # stages have a device each
        assert same, f"{where} differs: {found} is not {expected}"
    else:
        assert found == expected, where


def assert_trains_as_serially(
    make: Make,
    rows: Callable[[int], Rows],
    model: nn.Module,
    batches: Iterable[Sequence[Any]],
    optimize: Optimize = momentum,
    loss_fn: Loss = functional.cross_entropy,
    between: Callable[[nn.Module, optim.Optimizer], object] = lambda model, optimizer: None,
    averages: bool = True,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Train a model by steps and its twin serially; after each step all is the same, and then ``between`` is done."""
    twin = copy.deepcopy(model)
    optimizer, other = optimize(model.parameters()), optimize(twin.parameters())
    with make(model, loss_fn, optimizer) as step:
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            found = step(*batch)
            torch.manual_seed(number)
            expected = train(
                twin, loss_fn, other, batch, rows(rows_of(batch)), averages, before_step
            )
            assert_equal(found, expected, f"loss of step {number}")
            assert_equal(
                dict(model.state_dict()), dict(twin.state_dict()), f"model after step {number}"
            )
            assert_equal(
                optimizer.state_dict()["state"],
                other.state_dict()["state"],
                f"optimizer after step {number}",
            )
            between(model, optimizer)
            between(twin, other)
