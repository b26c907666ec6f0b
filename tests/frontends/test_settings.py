"""Learning rates and other settings of optimizers may change from call to call, without recaptures."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

import autosched as asc
from tests.frontends import steps
from tests.frontends import test_capture as capturing
from tests.frontends.steps import assert_same, held

HERE = asc.Machine([asc.Device("cpu")])
Step = Callable[[Tensor], Any]

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    **capturing.OPTIMIZERS,
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "adam, foreach": lambda p: optim.Adam(p, lr=0.01, foreach=True, weight_decay=1e-2),
    "adam, fused": lambda p: optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "two groups": lambda p: optim.AdamW(
        [{"params": list(p)[:2]}, {"params": list(p)[2:], "lr": 0.05, "betas": (0.8, 0.99)}]
    ),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01, lr_decay=0.1),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=20, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "steps": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1e9),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step_of(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def assert_trains_as_eager(
    make: Callable[[Any], optim.Optimizer], schedule: Callable[[Any], Any], **options: Any
) -> None:
    """Train a model and its twin, one eagerly, with a scheduler for each."""
    schedulers: dict[int, Any] = {}

    def made() -> tuple[nn.Module, optim.Optimizer]:
        model = net()
        optimizer = make(model.parameters())
        schedulers[id(optimizer)] = schedule(optimizer)
        return model, optimizer

    def then(optimizer: optim.Optimizer, loss: Tensor) -> None:
        scheduler = schedulers[id(optimizer)]
        plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*[loss] if plateau else [])

    how = {"machine": asc.Machine.emulated(gpus=2), "policy": "round_robin", "backend": "virtual"}
    steps.assert_trains_as_eager(made, torch.randn(6, 3, 4), step_of, then, **how | options)


QUICK = {
    *[
        (name, "one cycle")
        for name in (
            "nesterov",
            "adam, amsgrad",
            "adamw, fused",
            "nadam",
            "adam, its rate a tensor",
            "sgd, fused",
        )
    ],
    ("adam", "plateau"),
}
PAIRS = [(name, "one cycle") for name in OPTIMIZERS] + [("adam", name) for name in SCHEDULERS]


@pytest.mark.filterwarnings("ignore:Detected call of", "error:no estimate")
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
def test_a_scheduler_needs_no_recapture(optimizer: str, scheduler: str) -> None:
    """It was captured anew for each rate."""
    assert_trains_as_eager(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])


def trained(
    make: Callable[[Any], optim.Optimizer], **options: Any
) -> tuple[Any, optim.Optimizer, nn.Module]:
    model = net()
    optimizer = make(model.parameters())
    return asc.compile(step_of(model, optimizer), HERE, **options), optimizer, model


def test_what_changes_by_hand_becomes_an_input(caplog: pytest.LogCaptureFixture) -> None:
    run, optimizer, _ = trained(OPTIMIZERS["nesterov"], backend="host")
    with run, warnings.catch_warnings(), caplog.at_level(logging.INFO, "autosched"):
        warnings.simplefilter("error")
        for rate in (0.1, 0.1, 0.1, 0.05, 0.025, 0.0125):
            optimizer.param_groups[0]["lr"] = rate
            run(torch.ones(1, 4))
        assert run.cache_info().misses == 3
    assert "is captured again, with inputs optimizer.lr" in caplog.text


def test_each_branch_that_depends_on_a_setting_is_a_capture() -> None:
    run, optimizer, model = trained(OPTIMIZERS["nesterov"], backend="host")
    twin = copy.deepcopy(model)
    other = OPTIMIZERS["nesterov"](twin.parameters())
    step = step_of(twin, other)
    with run:
        for decay in (0.1, 0.2, 0.3, 0.0, 0.4, 0.0, 0.5):
            for one in (optimizer, other):
                one.param_groups[0]["weight_decay"] = decay
            x = torch.randn(3, 4)
            assert torch.equal(run(x), step(x))
            assert_same(held(model, optimizer), held(twin, other), decay)
        # Without moments, with them and decay as an input, and without decay.
        assert run.cache_info().misses == 3


def test_a_setting_whose_value_code_needs_is_a_constant() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    lr_scheduler.StepLR(optimizer, 1)

    def step(x: Tensor) -> Any:
        rate = optimizer.param_groups[0]["lr"]
        return model(x).sum() * math.sqrt(rate), f"{rate}", rate * 2

    with asc.compile(step, HERE, backend="host") as run:
        for rate in (0.5, 0.25, 0.5, 0.125):
            optimizer.param_groups[0]["lr"] = rate
            x = torch.ones(1, 4)
            found = run(x)
            assert torch.equal(found[0], step(x)[0])
            assert found[1:] == (f"{rate}", rate * 2)
        assert run.cache_info().misses == 3


def test_what_cannot_be_traced_with_settings_is_traced_with_constants() -> None:
    optimizer = optim.SGD(net().parameters(), lr=0.5)
    lr_scheduler.StepLR(optimizer, 1)

    def step(x: Tensor) -> Any:
        return x * torch.tensor([optimizer.param_groups[0]["lr"]] * 2)

    with asc.compile(step, HERE, backend="host") as run:
        for rate in (0.5, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            assert torch.equal(run(torch.ones(2)), torch.full([2], rate))


def test_settings_and_their_arithmetic_are_not_repeated_for_each_parameter() -> None:
    run, optimizer, _ = trained(OPTIMIZERS["sgd"], backend="host")
    lr_scheduler.StepLR(optimizer, 1)
    with run:
        names = [task.name for task in run.schedule(torch.ones(1, 4)).graph.tasks]
    assert sum("neg" in name for name in names) == 1


def test_a_number_is_not_computed_from_constants_of_the_trace() -> None:
    """torch computes the elements of small constants while it traces, and took NaN for the number."""

    def step(x: Tensor) -> Any:
        one = torch.tensor(1.0)
        one.mul_(x.sum().item())
        return x * one.item()

    with asc.compile(step, HERE, backend="host") as run:
        assert torch.equal(run(torch.ones(2)), torch.full([2], 2.0))


def test_code_that_holds_a_group_reads_its_settings_in_each_call() -> None:
    optimizer = optim.SGD(net().parameters(), lr=0.5)
    lr_scheduler.StepLR(optimizer, 1)
    group, groups = optimizer.param_groups[0], optimizer.param_groups

    def step(x: Tensor) -> Any:
        return x * group["lr"], x * groups[0]["lr"], optimizer.param_groups[0]["lr"]

    with asc.compile(step, HERE, backend="host") as run:
        for rate in (0.5, 0.25):
            group["lr"] = rate
            found, expected = run(torch.ones(2)), step(torch.ones(2))
            assert all(map(torch.equal, found[:2], expected[:2]))
            assert found[2] == rate
        assert run.cache_info().misses == 1
