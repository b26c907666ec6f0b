"""Training steps of every optimizer of torch, in combinations of options that cover all pairs."""

from __future__ import annotations

import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]

CLASSES = 4
STEPS = 5


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
RATES = "constant", "cycle"
PRECISIONS = "float32", "bfloat16"
GROUPS = "one", "two"
DEFAULT = "default"


@functools.cache
def optimizers() -> dict[str, Any]:
    """Return the optimizers that torch has and that can be captured, by name."""
    found = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    return {
        name: item
        for name, item in found.items()
        if inspect.isclass(item) and item is not torch.optim.Optimizer and name not in REFUSED
    }


@functools.cache
def options_of(name: str) -> dict[str, tuple[Any, ...]]:
    """Return the options of an optimizer, each with the values that are tried."""
    names = [*inspect.signature(optimizers()[name]).parameters][1:]
    return {each: VALUES.get(f"{name}.{each}") or VALUES[each] for each in names}


class Combination(NamedTuple):
    """A training step; ``options`` are names with positions in the table of values."""

    optimizer: str
    network: str
    precision: str = "float32"
    rate: str = "constant"
    groups: str = "one"
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        named = [f"{key}={shown(value)}" for key, value in self.values().items()]
        traits = [self.network, self.precision, self.rate, f"{self.groups} groups"]
        return f"{self.optimizer}({', '.join(named)}) {' '.join(traits)}"

    def values(self) -> dict[str, Any]:
        """Return the options by name."""
        known = options_of(self.optimizer)
        return {name: known[name][i] for name, i in self.options}

    def traits(self) -> list[tuple[str, Any]]:
        """Return what it has, as names with values; pairs of these are covered."""
        known = options_of(self.optimizer)
        given = dict(self.options)
        own = [
            (name, shown(known[name][given[name]]) if name in given else DEFAULT) for name in known
        ]
        return [*zip(self._fields[:5], self[:5], strict=True), *own]


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    return f"tensor({value.item():g})" if isinstance(value, Tensor) else repr(value)


class Trainer:
    """A network with its optimizers, made anew for a combination."""

    def __init__(self, made: Combination, model: nn.Module | None = None):
        torch.manual_seed(7)
        self.optimizer, self.precision = made.optimizer, made.precision
        self.model = NETWORKS[made.network][0]() if model is None else model
        parameters = [*self.model.parameters()]
        rest: list[Tensor] = []
        if made.optimizer == "Muon":  # it is for matrices alone
            rest = [each for each in parameters if each.ndim != 2]
            parameters = [each for each in parameters if each.ndim == 2]
        own, self.cycles = _optimizer(made, parameters)
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


def _optimizer(made: Combination, parameters: list[Tensor]) -> tuple[Any, list[Any]]:
    """Return an optimizer, and what changes its rates."""
    kind = optimizers()[made.optimizer]
    values = {name: _fresh(value) for name, value in made.values().items()}
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if made.groups == "two":
        rate = _fresh(values.get("lr", inspect.signature(kind).parameters["lr"].default))
        groups = [
            {"params": parameters[::2]},
            {"params": parameters[1::2], "lr": rate * 0.5, "weight_decay": 0.02},
        ]
    optimizer = kind(groups, **values)
    return optimizer, [_cycle(optimizer)] if made.rate == "cycle" else []


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    return value.clone() if isinstance(value, Tensor) else value


def _cycle(optimizer: Any) -> Any:
    most = [float(group["lr"]) * 4 for group in optimizer.param_groups]
    momentum = bool({"betas", "momentum"} & optimizer.defaults.keys())
    schedules = torch.optim.lr_scheduler
    return schedules.OneCycleLR(optimizer, most, total_steps=12, cycle_momentum=momentum)


def batches(network: str) -> Iterator[Batch]:
    torch.manual_seed(11)
    for _ in range(STEPS):
        x = NETWORKS[network][1]()
        yield x, torch.randint(CLASSES, x.shape[:1])


# ---- pairs


@functools.cache
def objection(made: Combination) -> str | None:
    """Return why torch itself refuses these options in three eager steps, or None."""
    parameters = [torch.ones(2, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)]
    try:
        optimizer, cycles = _optimizer(made, parameters)
        for _ in range(3):
            for each in parameters:
                each.grad = each.detach() * 0.1
            optimizer.step()
            for cycle in cycles:
                cycle.step()
    except (RuntimeError, ValueError, AssertionError) as error:
        return str(error)
    return None


def is_possible(made: Combination) -> bool:
    """Whether torch accepts the options of a combination."""
    return objection(made._replace(network="", precision="")) is None


def pairs_of(made: Combination) -> set[Any]:
    """Return the pairs of traits that a combination has."""
    return {*combinations(made.traits(), 2)}


def impossible() -> dict[str, str]:
    """Return the options that torch refuses on a CPU in any ordinary step, and why."""
    found = {}
    for name in optimizers():
        for option, values in options_of(name).items():
            for i, value in enumerate(values):
                why = _refused(name, option, i)
                if why is not None:
                    found[f"{name}.{option}={shown(value)}"] = why
    return found


@functools.cache
def _refused(optimizer: str, option: str, position: int) -> str | None:
    others = [name for name in options_of(optimizer) if name != option]
    made = Combination(optimizer, "", "", options=((option, position),))
    more = [made._replace(options=((name, 0), (option, position))) for name in others]
    return None if any(map(is_possible, [made, *more])) else objection(made)


NAMED = [
    Combination("SGD", "mlp"),
    Combination("Adam", "lstm"),
    Combination("AdamW", "conv", "bfloat16", "cycle"),
    *(
        Combination(name, "mlp", options=(("weight_decay", 0),))
        for name in "Adam Adagrad RMSprop Adadelta Adamax NAdam RAdam".split()
    ),
    *(
        Combination(name, "mlp", options=(("foreach", 0),))
        for name in "Adam AdamW SGD Adagrad NAdam RAdam".split()
    ),
]
_DRAWN = 8  # combinations with a pair, of which the one with most new pairs is taken


@functools.cache
def covering() -> list[Combination]:
    """Return combinations that have all possible pairs of traits, those of ``NAMED`` first.

    Greedy: for a pair that none has, draw several that have it, and take the one with most new
    pairs.
    """
    draw = random.Random(0)
    found = [*NAMED]
    known = set[Any]().union(*map(pairs_of, found))
    for pair in wanted():
        if pair in known:
            continue
        drawn = [made for _ in range(_DRAWN) if (made := _drawn(draw, dict(pair))) is not None]
        if drawn:
            best = max(drawn, key=lambda made: len(pairs_of(made) - known))
            known |= pairs_of(best)
            found.append(best)
    return found


@functools.cache
def _choices(optimizer: str) -> dict[str, list[str]]:
    """Return by trait its values, as text, those of options that are possible at all."""
    traits = {
        "optimizer": [optimizer],
        "network": [*NETWORKS],
        "precision": [*PRECISIONS],
        "rate": [*RATES],
        "groups": [*GROUPS],
    }
    for name, values in options_of(optimizer).items():
        usable = [shown(v) for i, v in enumerate(values) if _refused(optimizer, name, i) is None]
        if usable:
            traits[name] = [DEFAULT, *usable]
    return traits


def wanted() -> list[Any]:
    """Return all pairs of traits that an optimizer has, rare ones first."""
    count: Counter[Any] = Counter()
    for optimizer in optimizers():
        traits = [[(name, v) for v in values] for name, values in _choices(optimizer).items()]
        for one, other in combinations(traits, 2):
            count.update(product(one, other))
    return sorted(count, key=count.__getitem__)


def _drawn(draw: random.Random, fixed: dict[str, str]) -> Combination | None:
    """Return a random combination with some traits; None if torch refuses many."""
    for _ in range(20):
        optimizer = fixed.get("optimizer") or draw.choice(
            [name for name in optimizers() if fixed.keys() <= _choices(name).keys()]
        )
        choices = _choices(optimizer)
        if any(value not in choices[name] for name, value in fixed.items()):
            continue
        chosen = {name: draw.choice(values) for name, values in choices.items()} | fixed
        known = options_of(optimizer)
        options = [
            (name, [*map(shown, known[name])].index(value))
            for name, value in list(chosen.items())[5:]
            if value != DEFAULT
        ]
        made = Combination(*list(chosen.values())[:5], options=tuple(options))
        if is_possible(made):
            return made
    return None
