"""Training steps of twins, of which one is eager: what they return and leave must be the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn, optim

import autosched as asc

Make = Callable[[], tuple[nn.Module, Any]]  # a model and its optimizer


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def stepper(
    model: nn.Module, optimizer: Any, loss_of: Callable[..., Tensor] = square
) -> Callable[..., Any]:
    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def held(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """All that a step changes."""
    found = {f"state {name}": tensor for name, tensor in model.state_dict().items()}
    found |= {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    moments = optimizer.state_dict()["state"]
    return found | {
        f"moment {i} {name}": item for i, own in moments.items() for name, item in own.items()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], when: object) -> None:
    assert found.keys() == expected.keys(), when
    for name, item in expected.items():
        same = torch.equal(found[name], item) if isinstance(item, Tensor) else found[name] == item
        assert same, f"{name} differs in step {when}"


def assert_trains_as_eager(
    make: Make,
    batches: Iterable[Any],
    step_of: Callable[[nn.Module, Any], Callable[..., Any]] = stepper,
    then: Callable[..., Any] = lambda optimizer, result: None,
    misses: int | None = 2,  # with the optimizer's state, and without
    **options: Any,
) -> int:
    """Train a model and its twin, one eagerly, on the same batches with the same seeds.

    ``then`` is called with each optimizer and the result of the eager step. Return how many
    captures there were.
    """
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(make())
    steps = [step_of(*each) for each in twins]
    with asc.compile(steps[1], **options) as run:
        for number, batch in enumerate(batches):
            given = batch if isinstance(batch, tuple) else (batch,)
            other = [item.clone() for item in given]
            torch.manual_seed(number)
            expected = steps[0](*given)
            torch.manual_seed(number)
            found = run(*other)
            assert_same(numbered(found, other), numbered(expected, given), number)
            assert_same(held(*twins[1]), held(*twins[0]), number)
            assert_same(attributes(twins[1][0]), attributes(twins[0][0]), number)
            for _, optimizer in twins:
                then(optimizer, expected)
        captures: int = run.cache_info().misses
    assert captures == misses or misses is None
    return captures


def attributes(model: nn.Module) -> dict[str, Any]:
    """Return what modules have in attributes of their own."""
    kinds = Tensor, str, bool, SimpleNamespace, type(None)
    return {
        f"{name}.{attribute}": item
        for name, module in model.named_modules()
        for attribute, item in vars(module).items()
        if isinstance(item, kinds)
    }


def numbered(*trees: Any) -> dict[str, Any]:
    """Return the leaves of trees."""
    return {f"leaf {i}": leaf for i, leaf in enumerate(torch.utils._pytree.tree_leaves(trees))}
