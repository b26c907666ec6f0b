"""Networks for training on several devices: with buffers, hooks, in-place writes, ties, shared layers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models import Tied


def chain(layers: int = 8, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    inner = itertools.chain.from_iterable(
        (nn.Linear(width, width), nn.Tanh()) for _ in range(layers - 1)
    )
    return nn.Sequential(*inner, nn.Linear(width, 4))


def deep(blocks: int = 3) -> nn.Module:
    """Batch norm and dropout; three blocks are deep enough for eight stages."""
    torch.manual_seed(0)
    parts = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return nn.Sequential(
        *(copy.deepcopy(part) for _ in range(blocks) for part in parts), nn.Linear(8, 4)
    )


class Shared(nn.Module):
    """One layer, used three times, in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.layer(x))
        return self.head(x)


class InPlace(nn.Module):
    """What crosses the cut is written behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.a(x), inplace=True)
        z = self.b(y)
        z += y
        return self.head(functional.relu(z.mul_(2), inplace=True))


class Past(nn.Module):
    """What it is given is added behind every layer; the first result goes to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = first = torch.tanh(self.layers[0](x))
        for layer in self.layers:
            y = torch.tanh(layer(y)) + x + first.detach()
        return self.head(y), {"first": first}


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.a.register_forward_hook(lambda module, given, out: out * 2)
        self.b.register_forward_pre_hook(lambda module, given: (given[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=False)))


class Spectral(nn.Module):
    """Its buffers change in each forward, which depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Steps(nn.Module):
    """What it returns depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.abs().mean().detach()
        return self.layer(x) / (1 + self.seen)


class Mean(nn.Module):
    """Puts a new tensor into its buffer and its attribute each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.last = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        out = self.layer(x - self.mean) + self.last
        self.last = out.detach().mean(0)
        return out


class Dtypes(nn.Module):
    """Parameters of two dtypes, in turn, and some that lie in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8)]
        self.parts = nn.ModuleList([*parts, nn.Linear(8, 4, dtype=torch.float64)])
        for part in parts:
            part.weight.data = part.weight.data.t().contiguous().t()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x.to(part.weight.dtype)).tanh()
        return x


class Centred(nn.Module):
    """Reads the buffer that it writes, and keeps a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("centre", torch.zeros(8))
        self.seen = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.seen = self.seen * 0.5 + x.mean(0)
        return self.linear(x - self.centre)


def trained_by(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer."""
    return [item for group in optimizer.param_groups for item in group["params"]]


def clip_values(optimizer: optim.Optimizer, *_: Any) -> None:
    """Change gradients before a step, as a hook of it."""
    nn.utils.clip_grad_value_(trained_by(optimizer), 0.01)


def hooked(optimize: Callable[[Any], optim.Optimizer], hook: Any) -> Any:
    """Return what makes an optimizer that has a hook."""

    def made(parameters: Any) -> optim.Optimizer:
        optimizer = optimize(parameters)
        optimizer.register_step_pre_hook(hook)
        return optimizer

    return made


def vectors() -> tuple[Tensor, Tensor]:
    """Return a row, and its class."""
    return torch.randn(6, 16)[:, ::2], torch.randint(0, 4, (6,))


def words() -> tuple[Tensor, Tensor]:
    """Return words, and the same as classes."""
    found = torch.randint(0, 7, (6, 3))
    return found, found


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "chain": (chain, vectors),
    "deep": (deep, vectors),
    "shared": (Shared, vectors),
    "in place": (InPlace, vectors),
    "past": (Past, vectors),
    "hooked": (Hooked, vectors),
    "spectral": (Spectral, vectors),
    "dtypes": (Dtypes, vectors),
    "tied": (Tied, words),
    "counts": (Steps, vectors),
    "means": (Mean, vectors),
    "centred": (Centred, vectors),
}
NORMED = {"mlp", "deep"}  # whose batch norms refuse one row
