"""Captured steps of RAdam are eager ones, before and after it begins to rectify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autosched as asc
from tests.frontends.steps import assert_trains_as_eager, stepper

CPU = asc.Machine.local(gpus=0)


@pytest.mark.parametrize(
    ("foreach", "decoupled", "beta2", "cycles"),
    [
        (False, True, 0.999, True),
        (True, False, 0.999, False),
        (True, True, 0.6, True),  # never rectifies
        (False, False, 0.6, False),
    ],
)
def test_one_capture_makes_the_steps_of_eager_mode(
    foreach: bool, decoupled: bool, beta2: float, cycles: bool
) -> None:
    options = {"maximize": foreach, "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    rates: dict[int, Any] = {}

    def make() -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        optimizer = optim.RAdam(model.parameters(), 0.1, (0.9, beta2), foreach=foreach, **options)
        if cycles:
            rates[id(optimizer)] = optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
        return model, optimizer

    def then(optimizer: Any, _: Tensor) -> None:
        if cycles:
            rates[id(optimizer)].step()

    # The first step creates state, and the sixth is the first that rectifies.
    misses = 3 if beta2 > 0.9 else 2
    batches = torch.randn(8, 2, 4)
    assert_trains_as_eager(make, batches, then=then, misses=misses, machine=CPU)


def test_a_graph_is_refused_when_the_step_would_take_another_path() -> None:
    model = nn.Linear(4, 3)
    step = stepper(model, optim.RAdam(model.parameters(), 0.1))
    step(x := torch.ones(2, 4))
    graph = asc.capture(step, x)
    with asc.schedule(graph, CPU) as schedule:
        for _ in range(4):
            schedule(x)
        with pytest.raises(asc.GraphError, match=r"\.step.* takes another path"):
            schedule(x)


class Halving(optim.Optimizer):
    """Halves its rate from the fourth step on, which it counts in a tensor."""

    def __init__(self, parameters: Any, count: Callable[[Tensor], object]):
        super().__init__(parameters, {"lr": 0.1})
        self.count = count

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for parameter in group["params"]:
            counter = self.state[parameter].setdefault("step", torch.tensor(0.0))
            self.count(counter)
            rate = group["lr"] if counter.item() < 4 else group["lr"] / 2
            parameter.add_(parameter.grad, alpha=-rate)


@pytest.mark.parametrize(
    "count", [lambda counter: counter.data.add_(1), lambda counter: counter.copy_(counter + 1)]
)
def test_a_counter_that_is_written_otherwise_is_refused(count: Callable[[Tensor], object]) -> None:
    model = nn.Linear(4, 3)
    step = stepper(model, Halving(model.parameters(), count))
    step(x := torch.ones(2, 4))
    with pytest.raises(asc.CaptureError, match="reads elements of a tensor"):
        asc.capture(step, x)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, optim.NAdam])
def test_what_torch_checks_of_a_power_is_no_condition(kind: Any, foreach: bool) -> None:
    """Or each call would read all counters, and wait for the call before."""
    model = nn.Linear(4, 3)
    step = stepper(model, kind(model.parameters(), 0.1, foreach=foreach))
    step(x := torch.ones(2, 4))
    graph = asc.capture(step, x)
    assert not graph.settings.conditions
    assert not graph.settings.counters
