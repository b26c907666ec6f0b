"""A function that is captured again and again says so, and why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.frontends.reachability import Reach
from tests.frontends.steps import stepper

HERE = asc.Machine([asc.Device("cpu")])


class Own(torch.optim.SGD):
    """A user's optimizer, whose settings are constants of a capture."""


def scheduled(lr: Any, **options: Any) -> tuple[Callable[[Tensor], Any], Any]:
    model = nn.Linear(3, 1)
    optimizer = Own(model.parameters(), lr=lr, momentum=0.9)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, **options)
    run = asc.compile(stepper(model, optimizer), HERE, backend="host")

    def train(x: Tensor) -> None:
        run(x)
        rates.step()

    return train, run


def test_the_third_capture_warns_of_the_rate_that_changed() -> None:
    """With a user's optimizer each step is captured anew, a thousand times slower."""
    train, run = scheduled(0.1)
    x = torch.ones(2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        for _ in range(5):
            train(x)
    assert run.cache_info().misses == 5
    (warning,) = [item for item in caught if "captured again, capture 3" in str(item.message)]
    text = str(warning.message)
    assert "step' is captured" in text
    assert "lr: 0.0" in text
    assert "momentum: 0.9" in text
    assert "lr=torch.tensor(...)" in text
    assert warning.filename == __file__


FACTORS = {"first": 1.0}


def by_global(x: Tensor) -> Tensor:
    return x * FACTORS["first"]


def by_argument(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * factor


def change_global(run: Any, number: int) -> None:
    FACTORS["first"] = 1.0 + number
    run(torch.ones(2))


def grad_mode(run: Any, number: int) -> None:
    with torch.set_grad_enabled(number != 2), torch.autocast("cpu", enabled=number == 1):
        run(torch.ones(2))


def eval_mode(run: Any, number: int) -> None:
    run.fn.p = 0.25 + number / 10
    run(torch.ones(2))


@pytest.mark.parametrize(
    ("fn", "call", "expected"),
    [
        (by_argument, lambda run, number: run(torch.ones(2 + number)), "x: shape (3,) -> (4,)"),
        (
            by_argument,
            lambda run, number: run(torch.ones(2), 1.5 + number),
            "an argument: 2.5 -> 3.5",
        ),
        (
            by_argument,
            lambda run, number: run(torch.ones(2), factor=1.5 + number),
            "factor: 2.5 -> 3.5",
        ),
        (by_global, change_global, "first: 2.0 -> 3.0"),
        (nn.Dropout(0.0), eval_mode, "p: 0.35 -> 0.45"),
        (by_argument, grad_mode, "a setting of torch, such as no_grad or autocast: "),
    ],
)
def test_what_changed_is_named(
    fn: Any, call: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with asc.compile(fn, HERE, backend="host") as run, caplog.at_level(logging.INFO, "autosched"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            call(run, 0)
            call(run, 1)
        with pytest.warns(RuntimeWarning) as caught:
            call(run, 2)
        assert expected in str(caught[0].message)
        assert expected in caplog.text
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            call(run, 3)  # told once


OPTIMIZERS = [
    kind
    for kind in map(vars(torch.optim).get, torch.optim.__all__)
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_loading_a_state_dict_changes_no_setting(kind: type) -> None:
    """It puts the settings of a group into another order, which was a recapture."""
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    before = list(Reach([optimizer.param_groups]).key)
    optimizer.load_state_dict(optimizer.state_dict())
    assert list(Reach([optimizer.param_groups]).key) == before
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.2
    optimizer.load_state_dict(state)
    after = list(Reach([optimizer.param_groups]).key)
    assert [new[1] for old, new in zip(before, after, strict=True) if old != new] == ["0.2"]


PADS, LENGTHS = "pad to one of few shapes, with a mask", "pass what changes as a tensor, or"
LISTS = "leave a text that no operator reads out"


def extended(x: Tensor, cache: Tensor) -> Tensor:
    return torch.cat([cache, x])


def first_of(x: Tensor, length: int) -> Tensor:
    return x[:length].sum()


def named(x: Tensor, name: Any) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("fn", "argument", "advice"),
    [
        (extended, lambda number: torch.ones(number + 1), PADS),
        (first_of, lambda number: number + 1, LENGTHS),
        (named, lambda number: f"{number}.png", LISTS),
    ],
)
def test_the_advice_fits_what_changes(fn: Any, argument: Any, advice: str) -> None:
    x = torch.ones(9)
    with asc.compile(fn, HERE, backend="host") as run:
        run(x, argument(0))
        run(x, argument(1))
        with pytest.warns(RuntimeWarning, match=f"; {advice}"):
            run(x, argument(2))
