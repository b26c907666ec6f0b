"""Fused training steps of every optimizer of torch, compared with eager ones.

A combination is an optimizer with some of its options, a network, a precision, and how the rate
changes. Five fused steps of it are as close to eager ones as those of a model that
``torch.compile`` compiles, with an eager optimizer; no kernel differs from its operators, and most
tasks are fused.
"""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.fusion.region import Region
from tests.fusion.regions import needs_compiler

CPU = asc.Machine.local(gpus=0)
CLASSES = 4
STEPS = 5

# By precision, the part of a change that rounding can be; more is compared with torch.compile.
FLOOR = {"float32": 1e-4, "bfloat16": 2e-2}
NOISE = 4.0  # times the deviation of torch.compile, and of weights changed by a unit in last place
LEAST_SHARE = 0.5  # of the tasks, that is fused
LEAST = 1e-7  # a difference that is always small

State = dict[str, Any]

# ---- networks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 24)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts)
        return self.head((x + mixed.transpose(1, 2).flatten(-2)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, cells: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cells, self.head = cells(5, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).tanh().mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, CLASSES)),
        lambda: torch.randn(8, 6),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, CLASSES),
        ),
        lambda: torch.randn(8, 3, 6, 6),
    ),
    "attention": (Attention, lambda: torch.randn(4, 5, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(6, 3, 5)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(6, 3, 5)),
    "embedding": (Embedded, lambda: torch.randint(9, (8, 4))),
}

# ---- options

# What an option is besides its default, by the parameter's name; an optimizer can have its own.
VALUES: dict[str, tuple[Any, ...]] = {
    "lr": (0.02, torch.tensor(0.005)),
    "betas": ((0.6, 0.9),),
    "eps": (1e-3,),
    "Adafactor.eps": ((1e-6, 1e-2),),
    "weight_decay": (0.1,),
    "Muon.weight_decay": (0.0,),
    "AdamW.weight_decay": (0.0,),
    "foreach": (True,),
    "fused": (True,),
    "capturable": (True,),
    "differentiable": (True,),
    "maximize": (True,),
    "amsgrad": (True,),
    "centered": (True,),
    "decoupled_weight_decay": (True,),
    "nesterov": (True,),
    "Muon.nesterov": (False,),
    "momentum": (0.8,),
    "dampening": (0.5,),
    "momentum_decay": (0.1,),
    "alpha": (0.6,),
    "rho": (0.6,),
    "beta2_decay": (-0.5,),
    "d": (1.5,),
    "lr_decay": (0.1,),
    "initial_accumulator_value": (0.5,),
    "lambd": (0.1,),
    "t0": (2.0,),
    "etas": ((0.4, 1.4),),
    "step_sizes": ((1e-4, 0.1),),
    "ns_coefficients": ((1.875, -1.25, 0.375),),
    "ns_steps": (2,),
    "adjust_lr_fn": ("match_rms_adamw",),
}
# Optimizers whose steps are not captured, fused or not, with what the error says.
REFUSED = {
    "Adafactor": "data-dependent",  # compares norms of weights and gradients with constants
    "ASGD": "data-dependent",  # chooses by its counter whether to average
    "LBFGS": "LBFGS reads the elements of tensors",
    "SparseAdam": "use an optimizer that keeps it in a tensor",  # its counter is a number
}
OPTIMIZERS: dict[str, Any] = {
    name: item
    for name in torch.optim.__all__
    if inspect.isclass(item := getattr(torch.optim, name)) and name not in ("Optimizer", *REFUSED)
}


class Combination(NamedTuple):
    optimizer: str
    network: str
    precision: str = "float32"
    rate: str = "constant"
    groups: str = "one"
    options: Mapping[str, Any] = {}

    def make(self, parameters: list[Tensor]) -> tuple[Any, list[Any]]:
        """Return an optimizer, and what changes its rates."""
        kind = OPTIMIZERS[self.optimizer]
        values = {name: _fresh(value) for name, value in self.options.items()}
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if self.groups == "two":
            rate = _fresh(values.get("lr", inspect.signature(kind).parameters["lr"].default))
            groups = [
                {"params": parameters[::2]},
                {"params": parameters[1::2], "lr": rate * 0.5, "weight_decay": 0.02},
            ]
        optimizer = kind(groups, **values)
        return optimizer, [_cycle(optimizer)] if self.rate == "cycle" else []

    def is_possible(self) -> bool:
        """Whether torch itself takes three eager steps with these options."""
        parameters = [torch.ones(2, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)]
        try:
            optimizer, cycles = self.make(parameters)
            for _ in range(3):
                for each in parameters:
                    each.grad = each.detach() * 0.1
                optimizer.step()
                for cycle in cycles:
                    cycle.step()
        except (RuntimeError, ValueError, AssertionError):
            return False
        return True


def drawn(optimizer: str, network: str, count: int = 4) -> list[Combination]:
    """Return combinations that torch takes, the same always; at first all options are the default."""
    source = random.Random(f"{optimizer} {network}")
    names = [*inspect.signature(OPTIMIZERS[optimizer]).parameters][1:]
    found = [Combination(optimizer, network)]
    while len(found) < count:
        chosen = source.sample(names, source.randint(1, min(4, len(names))))
        options = {
            name: source.choice(VALUES.get(f"{optimizer}.{name}") or VALUES[name])
            for name in chosen
        }
        traits = map(source.choice, [[*FLOOR], ["constant", "cycle"], ["one", "two"]])
        made = Combination(optimizer, network, *traits, options)
        if made.is_possible():
            found.append(made)
    return found


class Trainer:
    """A network with its optimizers, made anew for a combination."""

    def __init__(self, made: Combination):
        torch.manual_seed(7)
        self.optimizer, self.precision = made.optimizer, made.precision
        self.model = NETWORKS[made.network][0]()
        parameters = [*self.model.parameters()]
        rest: list[Tensor] = []
        if made.optimizer == "Muon":  # it is for matrices alone
            rest = [each for each in parameters if each.ndim != 2]
            parameters = [each for each in parameters if each.ndim == 2]
        own, self.cycles = made.make(parameters)
        self.optimizers = [own]
        if rest:
            self.optimizers.append(torch.optim.SGD(rest, 0.05))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on a batch; return the loss."""
        with torch.autocast("cpu", torch.bfloat16, self.precision == "bfloat16"):
            loss = functional.cross_entropy(self.model(x), y)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def advance(self) -> None:
        """Change rates and betas."""
        for cycle in self.cycles:
            cycle.step()

    def state(self) -> dict[str, Any]:
        """Return copies of all weights, buffers and states of optimizers."""
        found: dict[str, Any] = dict(self.model.state_dict())
        for i, optimizer in enumerate(self.optimizers):
            for j, state in enumerate(optimizer.state_dict()["state"].values()):
                found |= {f"{i}.{j}.{key}": value for key, value in state.items()}
        return {
            name: item.detach().clone() if isinstance(item, Tensor) else item
            for name, item in found.items()
        }


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    return value.clone() if isinstance(value, Tensor) else value


def _cycle(optimizer: Any) -> Any:
    most = [float(group["lr"]) * 4 for group in optimizer.param_groups]
    momentum = bool({"betas", "momentum"} & optimizer.defaults.keys())
    schedules = torch.optim.lr_scheduler
    return schedules.OneCycleLR(optimizer, most, total_steps=12, cycle_momentum=momentum)


def batches(network: str) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(11)
    for _ in range(STEPS):
        x = NETWORKS[network][1]()
        yield x, torch.randint(CLASSES, x.shape[:1])


def trained(made: Combination, wrap: Callable[[Trainer], Callable[..., Tensor]]) -> State:
    """Return the losses and all state after the steps."""
    trainer = Trainer(made)
    step, losses = wrap(trainer), []
    for x, y in batches(made.network):
        losses.append(step(x, y))
        trainer.advance()
    return trainer.state() | {"losses": torch.stack(losses)}


def eager(trainer: Trainer) -> Callable[..., Tensor]:
    return trainer.step


def disturbed(trainer: Trainer) -> Callable[..., Tensor]:
    """Return a step from weights that are changed by a unit in the last place.

    Half precision does not see that, so inputs are changed by one of its units.
    """
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps)
    if trainer.precision != "bfloat16":
        return trainer.step
    generator = torch.Generator().manual_seed(0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if x.is_floating_point():
            signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
            x = x * (1 + signs * torch.finfo(torch.bfloat16).eps)
        return trainer.step(x, y)

    return step


def by_torch(trainer: Trainer) -> Callable[..., Tensor]:
    """Return a step with a compiled model, and an eager optimizer.

    Muon's is compiled, too: it orthogonalizes in bfloat16, which rounds far more than a model does.
    """
    torch._dynamo.reset()  # beyond its limit of compilations, torch would run eagerly
    model = trainer.model
    trainer.model = torch.compile(model)
    if trainer.optimizer == "Muon":
        own = trainer.optimizers[0]
        own.step = torch.compile(own.step)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return trainer.step(x, y)

    trainer.state = functools.partial(_state_of, trainer, model)
    return step


def _state_of(trainer: Trainer, model: nn.Module) -> State:
    trainer.model = model
    return Trainer.state(trainer)


def deviations(found: State, expected: State) -> dict[str, float]:
    """Return by name how far tensors deviate, as the root of the mean square."""
    assert found.keys() == expected.keys()
    return {name: _norm(found[name], item) for name, item in expected.items()}


def _norm(one: Any, other: Any = 0.0) -> float:
    one, other = torch.as_tensor(one).double(), torch.as_tensor(other).double()
    alike = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(alike, 0.0, one - other).square().mean().sqrt())


def differing(made: Combination, found: State) -> list[str]:
    """Return what of the state differs from eager steps more than rounding explains."""
    before = Trainer(made).state()
    expected = trained(made, eager)
    floor = FLOOR[made.precision]
    errors = deviations(found, expected)

    def scale(name: str) -> float:
        return _norm(expected[name], before.get(name, 0.0))

    far = [name for name, error in errors.items() if not error <= floor * scale(name) + LEAST]
    if not far:
        return []
    others = [trained(made, wrap) for wrap in (by_torch, disturbed)]
    noise = [deviations(other, expected) for other in others]
    return [
        f"{name}: {errors[name]:.2g} of {scale(name):.2g}, {[f'{n[name]:.2g}' for n in noise]}"
        for name in far
        if not errors[name] <= NOISE * max(each[name] for each in noise)
    ]


def first(schedules: list[Any], inputs: Mapping[str, Any]) -> list[float]:
    """Return run times of which the first is least: that of a fused graph."""
    return [float(i) for i in range(len(schedules))]


def check(made: Combination) -> None:
    """Raise an AssertionError if fused steps of a combination have a fault."""

    def fused(trainer: Trainer) -> Callable[..., Tensor]:
        runs.append(asc.compile(trainer.step, CPU, fuse=True))
        return runs[0]

    runs: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mock.patch("autosched.fusion.fusing.run_times", first):
            found = trained(made, fused)
            schedule = runs[0]._known.values()[-1].schedule
            tasks = [task for task in schedule.graph.tasks if not task.view]
            runs[0].close()
    texts = [str(item.message) for item in caught]
    assert [text for text in texts if "differ from the operators" in text] == []
    assert differing(made, found) == []
    parts = {task.name: len([part for part in task.parts if not part.view]) or 1 for task in tasks}
    fused_parts = sum(parts[task.name] for task in tasks if isinstance(task.fn, Region))
    assert fused_parts >= LEAST_SHARE * sum(parts.values()), schedule.not_fused


# ---- the steps

SAMPLE = [
    Combination("Adam", "embedding", options={"foreach": True}),
    Combination("AdamW", "mlp", "bfloat16", "cycle"),
    Combination("RMSprop", "mlp", groups="two", options={"weight_decay": 0.1, "centered": True}),
]


@needs_compiler
@pytest.mark.parametrize("made", SAMPLE, ids=str)
def test_fused_steps_are_eager_ones(made: Combination) -> None:
    check(made)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fused_steps_of_all_optimizers_are_eager_ones(optimizer: str, network: str) -> None:
    failed = {}
    for made in drawn(optimizer, network):
        try:
            check(made)
        except Exception as error:
            failed[str(made)] = str(error)
    assert failed == {}


# ---- without fusion


def assert_equal_eager(made: Combination) -> None:
    """Raise an AssertionError if captured steps are not, bit for bit, eager ones."""
    machine = asc.Machine.emulated(gpus=1)
    expected = trained(made, eager)
    found = trained(made, lambda trainer: asc.compile(trainer.step, machine, backend="host"))
    far = {name: error for name, error in deviations(found, expected).items() if error}
    assert not far, str(made)


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_captured_steps_of_all_optimizers_are_eager_ones(optimizer: str, network: str) -> None:
    for made in drawn(optimizer, network):
        assert_equal_eager(made)


# ---- what cannot be captured


def searching(optimizer: Any, loss: Callable[[], Tensor]) -> Tensor:
    found = optimizer.step(loss)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_whose_steps_are_not_captured(name: str) -> None:
    model = nn.Embedding(5, 2, sparse=name == "SparseAdam")
    optimizer = getattr(torch.optim, name)(model.parameters())

    def loss() -> Tensor:
        optimizer.zero_grad()
        made = model(torch.tensor([1, 3])).square().mean()
        made.backward()
        return made

    def steps() -> None:
        with asc.compile(lambda: searching(optimizer, loss), CPU) as run:
            run()
            run()  # with state

    with pytest.raises(asc.CaptureError) as error:
        steps()
    assert REFUSED[name] in str(error.value)


def test_a_weight_decay_that_is_a_tensor_is_not_captured() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=torch.tensor(0.1))

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    with asc.compile(step, CPU) as run, pytest.raises(asc.CaptureError):
        run(torch.ones(1, 3))
