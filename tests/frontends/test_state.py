"""The state of optimizers: of parameters, of tensors that were parameters before, and of no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autosched as asc
from tests.serial import some

MACHINE = asc.Machine.emulated(gpus=1)
X = torch.arange(6.0).view(2, 3)
READ_ELEMENTS = (optim.Adafactor, optim.ASGD, optim.LBFGS, optim.RAdam, optim.SparseAdam)
OPTIMIZERS = {
    kind.__name__: kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind not in READ_ELEMENTS
}
del OPTIMIZERS["Optimizer"]


def head() -> nn.Module:
    return nn.Linear(4, 2, bias=False)


def train(kind: type[optim.Optimizer], wrap: Callable[..., Any]) -> list[Tensor]:
    """Train for two steps, replace the head and its place in the optimizer, and train on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), head())
    optimizer = kind(model.parameters(), lr=0.1)
    loss_fn = nn.MSELoss()
    step = wrap(model, loss_fn, optimizer)
    for number in range(4):
        if number == 2:
            model[1] = head()
            optimizer.param_groups[0]["params"] = list(model.parameters())
        step(X, torch.ones(2, 2))
    return [*model.parameters()]


def stepper(model: nn.Module, loss_fn: Any, optimizer: optim.Optimizer) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.filterwarnings("ignore:.*is captured for the 3rd time")
@pytest.mark.parametrize("name", some(OPTIMIZERS, "SGD"))
def test_state_of_a_replaced_head_stays_and_hurts_nobody(name: str) -> None:
    expected = train(OPTIMIZERS[name], stepper)
    for wrap in (
        lambda *parts: asc.compile(stepper(*parts), MACHINE),
        lambda *parts: asc.parallel.data_parallel(*parts, MACHINE),
    ):
        assert all(map(torch.equal, train(OPTIMIZERS[name], wrap), expected))


class Own(optim.SGD):
    """Keeps something beside the state of its parameters, and changes it."""

    change: Callable[[Own], Any]

    def step(self, closure: Any = None) -> None:
        super().step()
        self.change()


def own(name: str, start: Any, change: Callable[[Own], Any]) -> tuple[Own, Callable[[Tensor], Any]]:
    model = nn.Linear(3, 2)
    optimizer = Own(model.parameters(), 0.1, momentum=0.9)
    optimizer.state[name] = start
    optimizer.change = change.__get__(optimizer)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum() * optimizer.state["factor"]
        model(x).sum().backward()
        optimizer.step()
        return loss

    return optimizer, step


def test_state_of_no_tensor_is_a_constant() -> None:
    optimizer, step = own("factor", 2.0, lambda self: None)
    with asc.compile(step, MACHINE) as run:
        for factor in (2.0, 3.0, 3.0):
            optimizer.state["factor"] = factor
            before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
            loss = nn.functional.linear(X, *before).sum()
            assert torch.equal(run(X), loss * factor)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda self: self.state.update(factor=2), r"\['factor'\] is 2 after the step"),
        (lambda self: self.state["m"].update(n=1), r"\['n'\] is 1 after the step"),
        (lambda self: self.state.update(m=X), r"\['m'\] is a tensor after the step"),
    ],
)
def test_state_of_no_tensor_that_changes_is_named(change: Any, said: str) -> None:
    optimizer, step = own("factor", 1, change)
    optimizer.state["m"] = {}
    with pytest.raises(asc.CaptureError, match=said):
        asc.capture(step, X)
    assert optimizer.state == {"factor": 1, "m": {}}


def test_state_that_is_no_dict_is_named() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.bias] = torch.zeros(2)
    with pytest.raises(asc.CaptureError, match=r"state of 'bias' in SGD is a Tensor; keep it in a"):
        asc.capture(stepper(model, nn.functional.mse_loss, optimizer), X, torch.ones(2, 2))
