"""Seeds and states of torch's generator within a step are operators: the numbers are those of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import checkpoint

import autosched as asc
from autosched._lib.tree import flatten

MODEL = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 3))


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(42)
        noise = torch.randn(3)
    return x + noise + torch.rand(3)


def puts_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    torch.manual_seed(42)
    noise = torch.randn(3)
    torch.set_rng_state(state)
    return x + noise


def draws_again(x: Tensor) -> tuple[Tensor, Tensor]:
    state = torch.get_rng_state()
    first = torch.randn(3)
    torch.set_rng_state(state)
    return x + first - torch.randn(3), state


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(-3)
    return x + torch.randn(3)


def seeds_and_draws_nothing(x: Tensor) -> Tensor:
    torch.manual_seed(2**64 - 5)
    return x * 2


def draws_from_what_a_seed_returns(x: Tensor) -> Tensor:
    return x + torch.randn(3, generator=torch.manual_seed(5))


def drops_under_a_checkpoint(x: Tensor, reentrant: bool = False) -> Any:
    MODEL.zero_grad()
    loss = checkpoint(MODEL, x.clone().requires_grad_(), use_reentrant=reentrant).sum()
    loss.backward()
    return loss, torch.rand(1), [parameter.grad.clone() for parameter in MODEL.parameters()]


def drops_under_a_reentrant_checkpoint(x: Tensor) -> Any:
    return drops_under_a_checkpoint(x, True)


STEPS = [
    forks,
    puts_back,
    draws_again,
    seeds,
    seeds_and_draws_nothing,
    draws_from_what_a_seed_returns,
    drops_under_a_checkpoint,
    drops_under_a_reentrant_checkpoint,
]


def three(fn: Callable[[Tensor], Any]) -> tuple[list[Tensor], Tensor]:
    """Return what three calls give, and the state of the generator afterwards."""
    torch.manual_seed(0)
    found = [leaf for _ in range(3) for leaf in flatten(fn(torch.zeros(3)))]
    return found, torch.get_rng_state()


@pytest.mark.filterwarnings("error:no estimate")
@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("step", STEPS)
def test_numbers_and_the_state_afterwards_are_those_of_eager_steps(
    step: Callable[[Tensor], Any], gpus: int
) -> None:
    expected, state = three(step)
    with asc.compile(
        step, asc.Machine.emulated(gpus=gpus), policy="round_robin", backend="virtual"
    ) as run:
        found, after = three(run)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(after, state)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda x: x + torch.seed(), r"torch\.seed\(\) returns another seed in each call"),
        (lambda x: x + torch.initial_seed(), r"torch\.initial_seed\(\) is called"),
        (
            lambda x: x + torch.randn(3, generator=torch.Generator().manual_seed(0)),
            "the step creates a torch.Generator",
        ),
    ],
)
def test_what_is_not_followed_is_refused(step: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(asc.CaptureError, match=said):
        asc.capture(step, torch.zeros(3))


def test_where_there_are_accelerators_seeds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(
        asc.CaptureError,
        match=r"calls torch\.manual_seed, which also changes .*\n    at .*test_random_state",
    ):
        asc.capture(seeds, torch.zeros(3))


def test_a_generator_that_is_seeded_in_the_step_is_refused_and_put_back() -> None:
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()

    def step(x: Tensor) -> Tensor:
        generator.manual_seed(0)
        return x + torch.randn(3, generator=generator)

    with pytest.raises(
        asc.CaptureError,
        match="variable 'generator', a Generator, may not be as it was after the step",
    ):
        asc.capture(step, torch.zeros(3))
    assert torch.equal(generator.get_state(), state)


def test_a_state_that_cannot_be_traced_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        with no_dispatch():
            state = torch.get_rng_state()
        return x + state.numel()

    with pytest.raises(asc.CaptureError, match=r"no_dispatch.*fork_rng"):
        asc.capture(step, torch.ones(2))
