"""What ordinary PyTorch code does, captured steps do too: three steps, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn, optim

import autosched as asc
from tests.frontends.steps import assert_trains_as_eager, stepper

MACHINE = asc.Machine.emulated(gpus=2)
Step = Callable[[Tensor], Any]
STEPS: dict[str, Callable[[nn.Module, optim.Optimizer], Step]] = {}
MODELS: dict[str, Callable[[], nn.Module]] = {}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def trained(
    loss_of: Callable[[nn.Module, Tensor], Tensor],
) -> Callable[[nn.Module, optim.Optimizer], Step]:
    """Make a step of a loss."""
    return lambda model, optimizer: stepper(model, optimizer, loss_of)


def step_of(make: Callable[[nn.Module, optim.Optimizer], Step]) -> None:
    STEPS[make.__name__] = make


def model_of(make: Callable[[], nn.Module]) -> None:
    MODELS[make.__name__] = make


# ---- steps


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad  # another one than autograd's


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = model(x).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return grad.square().sum() + y


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float().square().mean()


def twice_under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that uses weights several times; autocast casts them once, and adds gradients in half."""
    with torch.autocast("cpu", torch.bfloat16):
        y = model(model(x))
        with torch.autocast("cpu", enabled=False):
            y = model(y.float())
    return y.square().mean()


def casting_each_time(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return model(model(x)).float().square().mean()


def checkpointed_under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpointed(model, model(model(x))).float()


def against_itself(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return (model(x + 1) - target).square().mean()


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()


def chosen(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y[y > 0].sum() + y[y.sum(1).abs().argsort()[:2]].sum()


STEPS["plain"] = stepper
STEPS["double backward"] = trained(penalised)
STEPS["custom function"] = trained(lambda model, x: Cubed.apply(model(x)).mean())
STEPS["autocast"] = trained(under_autocast)
STEPS["autocast twice"] = trained(twice_under_autocast)
STEPS["autocast without cache"] = trained(casting_each_time)
STEPS["autocast and checkpoint"] = trained(checkpointed_under_autocast)
STEPS["no_grad"] = trained(against_itself)
STEPS["checkpoint"] = trained(checkpointed)
STEPS["masks of data"] = trained(chosen)


@step_of
def clipped(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss, norm

    return step


@step_of
def a_number_returned(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    train = STEPS["plain"](model, optimizer)

    def step(x: Tensor) -> tuple[float, Any, dict[str, Any]]:
        loss = train(x)
        return loss.item(), x.argmax().item(), {"scaled": x * loss.item(), "rows": x[:1].tolist()}

    return step


@step_of
def autograd_grad(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        parameters = list(model.parameters())
        loss = model(x).square().mean()
        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@step_of
def by_hand(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.copy_(parameter.data - 0.1 * parameter.grad)
                parameter *= 0.9  # noqa: PLW2901
                parameter.grad = None
        return loss

    return step


@step_of
def functional_gradients(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> dict[str, Tensor]:
        own = dict(model.named_parameters())

        def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (row,)).square().mean()

        grads: dict[str, Tensor] = torch.func.grad(loss)(own, x)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(
            {k: v.detach() for k, v in own.items()}, x
        )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.sub_(grads[name] * 0.1)
        return grads | {f"each {name}": grad for name, grad in each.items()}

    return step


@step_of
def a_closure(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(evaluate)

    return step


@step_of
def an_average_of_weights(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    train, average = STEPS["plain"](model, optimizer), copy.deepcopy(model)

    def step(x: Tensor) -> list[Tensor]:
        train(x)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return [slow.detach().clone() for slow in average.parameters()]

    return step


@step_of
def in_place(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        x[1:3].add_(1)
        y = x.clone()
        y[y > 1] = 0.5
        y.T[0] = 5.0
        y[:, ::2].mul_(3)
        return x, y

    return step


@step_of
def complex_numbers(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        z = torch.fft.fft(model(x) + 1j * x)
        loss = (z.conj() @ z.T).abs().mean() + torch.view_as_real(z).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_what_it_does_eagerly(name: str) -> None:
    assert_does_as_eager(mlp, STEPS[name])


# ---- models


@model_of
def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@model_of
def weight_norm() -> nn.Module:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    return model


@model_of
def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda module, given, result: result * 2)
    model[0].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    model[2].register_full_backward_hook(
        lambda module, to, of: tuple(None if g is None else g * 2 for g in to)
    )
    model[2].weight.register_hook(lambda grad: grad * 3)
    return model


@model_of
def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Remembering(nn.Module):
    """Keeps a state of fixed size, a cache that grows, and a table in which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("state", torch.zeros(5, 4))
        self.register_buffer("cache", torch.zeros(0, 4))
        self.register_buffer("first", None)
        self.register_buffer("table", torch.zeros(20, 4))
        self.register_buffer("used", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state.detach())
        self.cache = torch.cat([self.cache, self.state.detach()])
        self.first = x if self.first is None else self.first
        self.table.index_copy_(0, torch.arange(5) + self.used, self.state.detach())
        self.used += 5
        return self.state * self.cache.mean() + self.first + self.table.sum()


MODELS["buffers that grow"] = Remembering


class Keeping(nn.Module):
    """Leaves tensors in attributes: one that the step adds to its loss, one that is made once, the last activations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.auxiliary: Tensor | None = None
        self.mask: Tensor | None = None
        self.last = torch.zeros(5, 4)
        self.register_buffer("count", torch.zeros(()))
        self.also = self.get_buffer("count")

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.also += 1
        out = self.fc(x) * self.mask + self.last.mean() + self.get_buffer("count")
        self.auxiliary, self.last = out.square().mean(), out.detach()
        return out


def with_auxiliary(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() + model.auxiliary
    model.auxiliary = None
    return loss


class Switching(nn.Module):
    """Does something else the first time, and remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.kind: str | None = None
        self.begun = False
        self.settings = SimpleNamespace(mode=None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x) * (1 if self.begun else 3)
        if self.kind is None:
            self.kind = "plain"
        self.begun, self.settings.mode = True, "run"
        return self.drop(out)


def switching(model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        model.train(not model.training)
        return model(x).detach()

    return step


@model_of
def pruned() -> nn.Module:
    model = nn.Linear(4, 4)
    torch.nn.utils.prune.l1_unstructured(model, "weight", 0.5)
    return model


MODELS["attributes"] = Keeping
MODELS["switches"] = Switching
MODELS["spectral norm"] = lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4))
STEPS_OF = {"attributes": trained(with_auxiliary), "switches": switching}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_trains_as_it_does_eagerly(name: str) -> None:
    captures = assert_does_as_eager(MODELS[name], STEPS_OF.get(name, STEPS["plain"]), steps=4)
    # The first time, with the optimizer's state, and with dropout and without
    assert captures <= (4 if name == "buffers that grow" else 3)


def assert_does_as_eager(
    make: Callable[[], nn.Module],
    step_with: Callable[[nn.Module, optim.Optimizer], Step],
    steps: int = 3,
) -> int:
    """Train a model and its twin, one eagerly; return how many captures there were."""

    def made() -> tuple[nn.Module, optim.Optimizer]:
        model = make()
        return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    how = {"machine": MACHINE, "policy": "round_robin", "backend": "virtual"}
    return assert_trains_as_eager(made, torch.randn(steps, 5, 4), step_with, misses=None, **how)
