"""Captured steps do what eager steps do, bit for bit, on any machine; and what cannot be captured says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.testing import scattered
from tests.codegen.test_codegen import on_cpu
from tests.frontends import steps
from tests.frontends.steps import assert_same, held
from tests.models import DEEP, DISTINCT, KINDS, mlp, vectors
from tests.serial import some

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "momentum, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw, foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "momentum, its rate a tensor": lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam, its rate a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return (
        functional.mse_loss(out, y) if y.is_floating_point() else functional.cross_entropy(out, y)
    )


def stepper(model: nn.Module, optimizer: optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    train = steps.stepper(model, optimizer, loss_of)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return train(x, y)

    return step


def assert_trains_as_eager(kind: str, optimizer: str, count: int = 5, **options: Any) -> None:
    def halve(optimizer: optim.Optimizer, _: Tensor) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)

    def make() -> tuple[nn.Module, optim.Optimizer]:
        model = (KINDS | DEEP)[kind].make()
        return model, OPTIMIZERS[optimizer](model.parameters())

    batches = ((KINDS | DEEP)[kind].batch() for _ in range(count))
    steps.assert_trains_as_eager(make, batches, stepper, halve, **options)


QUICK = {("mlp", policy) for policy in ("heft", "auto", "single", "round_robin")} | {
    ("recurrent", "heft"),
}


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        pytest.param(scattered(0), kind, marks=[] if kind in DISTINCT else pytest.mark.slow)
        for kind in KINDS
    ]
    + [
        pytest.param(policy, kind, marks=[] if (kind, policy) in QUICK else pytest.mark.slow)
        for policy in ("heft", "auto", "single", "round_robin")
        for kind in KINDS
    ],
)
def test_a_captured_step_trains_as_the_eager_one_does(kind: str, policy: Any) -> None:
    optimizer = "momentum" if kind in ("resnet", "lenet") else "adam"
    gpus = list(KINDS).index(kind) % 4
    assert_trains_as_eager(
        kind,
        optimizer,
        count=5 if policy == "auto" else 3,
        policy=policy,
        machine=asc.Machine.emulated(gpus=gpus),
        backend="virtual",
    )


# ---- what is captured


def test_inputs_have_the_names_that_the_user_gave() -> None:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(3, 4))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = stepper(model, optimizer)
    x, y = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    first = asc.capture(step, x, y)
    assert first.input_names == ("fc.weight", "fc.bias", "x", "y")
    assert list(first.outputs) == [
        "result",
        "optimizer.fc.weight.momentum_buffer",
        "optimizer.fc.bias.momentum_buffer",
    ]
    step(x, y)
    second = asc.capture(step, x, y)
    moments = ("optimizer.fc.weight.momentum_buffer", "optimizer.fc.bias.momentum_buffer")
    assert second.input_names == ("fc.weight", "fc.bias", *moments, "x", "y")
    assert list(second.outputs) == ["result"]


def test_arguments_have_the_names_of_parameters_and_paths() -> None:
    def fn(
        pair: tuple[Tensor, dict[str, Tensor]], *more: Tensor, scale: float, **rest: Tensor
    ) -> Tensor:
        return (pair[0] + pair[1]["b"] + more[0] + rest["z"]) * scale

    one = torch.ones(2)
    graph = asc.capture(fn, (one, {"b": one + 1}), one + 2, scale=2.0, z=one + 3)
    assert graph.input_names == ("pair.0", "pair.1.b", "more.0", "z")
    outputs = graph.run_serial(**graph.feed((one, {"b": one}), one, scale=2.0, z=one))
    assert graph.finish(outputs).tolist() == [8.0, 8.0]


def test_capturing_changes_nothing() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step, batch = stepper(model, optimizer), vectors(8)()
    step(*batch)
    loss_of(model, *batch).backward()
    before = {name: copy.deepcopy(item) for name, item in held(model, optimizer).items()}
    random = torch.get_rng_state()
    asc.capture(step, *batch)
    assert_same(held(model, optimizer), before, "none")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(
        group["params"][0] is next(model.parameters()) for group in optimizer.param_groups[:1]
    )


def test_gradients_that_are_left_follow_a_module_to_another_type() -> None:
    """They were views, of which ``double()`` moved the shape and not the base."""
    model = nn.Linear(3, 4)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    with asc.compile(step, asc.Machine.emulated(gpus=1), backend="virtual") as run:
        run(torch.ones(2, 3))
        model.double()
        run(torch.ones(2, 3, dtype=torch.double))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((4, 3), 4.0, dtype=torch.double))


def test_objects_that_answer_to_their_items_names_can_be_read() -> None:
    class Table(dict[str, float]):
        __getattr__ = dict.__getitem__

    table = Table(scale=2.0)
    graph = asc.capture(lambda x: x * table.scale, torch.ones(2))
    assert graph.run_serial(**graph.feed(torch.ones(2)))["result"].tolist() == [2, 2]


def test_a_pattern_that_fits_nothing_is_named() -> None:
    graph = asc.capture(nn.Linear(3, 2), torch.ones(1, 3))
    with pytest.raises(
        asc.GraphError, match="'layer9' in place= fits no task's name and no module"
    ):
        asc.schedule(graph, asc.Machine.emulated(gpus=1), place={"layer9": "cuda:0"})


# ---- what cannot be captured


def test_a_wrong_call_is_named() -> None:
    with pytest.raises(
        asc.CaptureError, match="cannot be called like that: missing a required argument: 'x'"
    ):
        asc.capture(lambda x: x + 1)


# ---- as code


@pytest.mark.parametrize("kind", some(["mlp", "resnet", "recurrent"], "mlp"))
def test_the_code_of_a_captured_step_leaves_what_the_step_leaves(kind: str) -> None:
    torch.manual_seed(0)
    model = KINDS[kind].make()
    graph = asc.capture(
        stepper(model, OPTIMIZERS["adamw, fused"](model.parameters())), *KINDS[kind].batch()
    )
    schedule = asc.schedule(
        graph, asc.Machine.emulated(gpus=2), policy="round_robin", backend="virtual"
    )
    names: dict[str, Any] = {}
    exec(on_cpu(schedule.code), names)
    ours, theirs = (
        {name: item.detach().clone() for name, item in graph.examples.items()} for _ in range(2)
    )
    torch.manual_seed(1)
    found = names["step"](*ours.values(), **schedule.code.given)
    torch.manual_seed(1)
    assert_same(found | ours, schedule.run_serial(**theirs) | theirs, "the only")
