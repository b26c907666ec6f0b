"""The state of optimizers: of parameters, of tensors that were parameters before, and of no tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autosched as asc
from tests.frontends import steps
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


@pytest.mark.filterwarnings("ignore:.*is captured again, capture 3")
@pytest.mark.parametrize("name", some(OPTIMIZERS, "SGD"))
def test_state_of_a_replaced_head_stays_and_hurts_nobody(name: str) -> None:
    expected = train(OPTIMIZERS[name], stepper)
    with contextlib.ExitStack() as stack:
        for wrap in (
            lambda *parts: asc.compile(stepper(*parts), MACHINE, policy="single"),
            lambda *parts: asc.parallel.data_parallel(*parts, MACHINE),
        ):
            closed = lambda *parts, wrap=wrap: stack.enter_context(wrap(*parts))  # noqa: E731
            assert all(map(torch.equal, train(OPTIMIZERS[name], closed), expected))


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


# ---- optimizers around others


class Around(optim.Optimizer):
    """Moves parameters towards slow ones, which are in the state of the optimizer within."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.within = optimizer
        self.param_groups = optimizer.param_groups
        self.state = self.fast = optimizer.state
        for parameter in optimizer.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.within.step()
        for parameter in self.param_groups[0]["params"]:
            slow = self.fast[parameter]["slow"]
            parameter.copy_(slow.lerp_(parameter, self.param_groups[0]["rate"]))


class Sharp(optim.Optimizer):
    """Computes gradients again where they lead; keeps the way back in a state of its own."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.within = optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.within.param_groups[0]["params"]
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for parameter in parameters:
            parameter.copy_(self.state[parameter]["old"])
        self.within.step()


class Several(optim.Optimizer):
    def __init__(self, *optimizers: optim.Optimizer) -> None:
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.within = optimizers

    def step(self, closure: Any = None) -> None:
        for each in self.within:
            each.step()


class Delegating:
    """Is no optimizer of torch, and has no state, only what leads to one."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.within = optimizer
        self.param_groups = optimizer.param_groups
        self.step = optimizer.step

    def add_param_group(self, group: Any) -> None: ...

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def momentum(model: nn.Module) -> optim.Optimizer:
    group = {"params": list(model.parameters()), "rate": torch.tensor(0.5)}
    return optim.SGD([group], lr=0.1, momentum=0.9)


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "shared state": lambda model: Around(momentum(model)),
    "shared groups": lambda model: Sharp(momentum(model)),
    "several": lambda model: Several(momentum(model[0]), optim.AdamW(model[1].parameters())),
    "another class": lambda model: Delegating(momentum(model)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_an_optimizer_around_others_steps_as_it_does_eagerly(name: str) -> None:
    def train(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = WRAPPED[name](model)

        def loss_of(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        def step(x: Tensor) -> Tensor:
            loss = loss_of(x)
            optimizer.step(*[lambda: loss_of(x)] if isinstance(optimizer, Sharp) else [])
            optimizer.zero_grad()
            return loss

        run = wrap(step)
        return [run(X) for _ in range(3)] + [*model.parameters()]

    expected = train(lambda step: step)
    found = train(lambda step: asc.compile(step, MACHINE, policy="round_robin"))
    assert all(map(torch.equal, found, expected))


# ---- parameters that code holds


class Agent:
    """Holds parameters in lists, tuples and dicts, and a tensor that its own optimizer trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.temperature = torch.zeros(1, requires_grad=True)
        self.optimizer = momentum(self.model)
        self.others = optim.Adam([self.temperature], lr=0.1)
        self.listed = list(self.model.parameters())
        self.named = {"first": tuple(self.model[0].parameters()), "last": self.model[1].bias}

    def update(self, x: Tensor) -> tuple[Tensor, ...]:
        loss = (self.model(x) * self.temperature.exp()).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.listed, 0.1)
        nn.utils.clip_grad_norm_(self.named["first"], 0.01)
        self.optimizer.step()
        self.others.step()
        for optimizer in (self.optimizer, self.others):
            optimizer.zero_grad()
        return loss.detach(), norm, self.named["last"].sum().detach(), self.temperature.detach()


def test_parameters_that_an_object_holds_are_those_of_the_step() -> None:
    eager, agent = Agent(), Agent()
    held = [*agent.listed, *agent.named["first"], agent.temperature]
    with asc.compile(agent.update, MACHINE, policy="single") as run:
        for _ in range(3):
            assert all(map(torch.equal, run(X), eager.update(X)))
        assert run.cache_info().misses == 2
        found = [*agent.listed, *agent.named["first"], agent.temperature]
        assert all(a is b for a, b in zip(found, held, strict=True))
        agent.listed = agent.listed[:1]  # other parameters are another capture
        eager.listed = eager.listed[:1]
        agent.named["last"], eager.named["last"] = agent.model[0].bias, eager.model[0].bias
        assert all(map(torch.equal, run(X), eager.update(X)))
        agent.temperature = torch.ones(1, requires_grad=True)
        with pytest.raises(
            asc.CaptureError, match="attribute 'temperature' of a Agent is a tensor"
        ):
            run(X)


# ---- one tensor under several names, and under none


class Naming(nn.Module):
    """Has two buffers and an attribute, of which a step renames some."""

    def __init__(self, rename: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("one", torch.zeros(3))
        self.register_buffer("two", torch.ones(3))
        self.last: Tensor | None = torch.full((3,), 2.0)
        self.rename = rename

    def forward(self, x: Tensor) -> Tensor:
        found = x + sum(item for item in (self.one, self.two, self.last) if item is not None)
        self.rename(self, found)
        return found + sum(item for item in (self.one, self.two, self.last) if item is not None)

    def names(self) -> list[Tensor | None]:
        return [self.one, self.two, self.last]


RENAMING: dict[str, Callable[[Any, Tensor], Any]] = {
    "an attribute": lambda module, y: setattr(module, "last", module.one),
    "a buffer": lambda module, y: setattr(module, "one", module.two),
    "both": lambda module, y: (setattr(module, "last", y[0]), setattr(module, "one", module.last)),
    "and written": lambda module, y: (setattr(module, "last", module.one), module.last.add_(1)),
    "in turn": lambda module, y: (
        setattr(module, "last", module.two if module.last is module.one else module.one),
        module.one.add_(1),
    ),
    "no buffer": lambda module, y: setattr(module, "one", None),
    "no attribute": lambda module, y: setattr(module, "last", None),
}


@pytest.mark.parametrize("name", RENAMING)
def test_a_tensor_that_gets_another_name_has_it_as_eagerly(name: str) -> None:
    """Where a tensor had a name already, the new one was overlooked, and so was an empty buffer."""
    eager, module = Naming(RENAMING[name]), Naming(RENAMING[name])
    with torch.no_grad(), asc.compile(module, MACHINE, policy="single") as run:
        for number in range(4):
            x = torch.full((2, 3), float(number))
            assert torch.equal(run(x), eager(x))
            found, expected = module.names(), eager.names()
            assert [*map(str, found)] == [*map(str, expected)]
            same = [[a is b for a in each for b in each] for each in (found, expected)]
            assert same[0] == same[1]


def test_a_new_buffer_that_is_not_saved_is_not_saved() -> None:
    def register(module: Any, y: Tensor) -> None:
        module.register_buffer("new", y[0].clone(), persistent=False)

    module = Naming(register)
    with torch.no_grad(), asc.compile(module, MACHINE, policy="single") as run:
        for _ in range(3):
            run(X)
    assert module.new.tolist() == [3, 4, 5]
    assert [*module.state_dict()] == ["one", "two"]


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        (lambda module, _: delattr(module, "one"), "attribute 'one' of module '1' is None"),
        (lambda _, optimizer: optimizer.state.clear(), "momentum_buffer' is gone after the step"),
    ],
)
def test_what_a_step_removes_is_refused(remove: Callable[..., Any], said: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), Naming(lambda module, y: None))
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train = steps.stepper(module, optimizer)
    train(X)

    def step(x: Tensor) -> None:
        train(x)
        remove(module[1], optimizer)

    with pytest.raises(asc.CaptureError, match=said):
        asc.capture(step, X)
    assert module[1].one is not None
    assert len(optimizer.state) == 2
