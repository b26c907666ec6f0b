"""Training steps as they are captured, operator by operator, on emulated GPUs where copies occupy copy streams.

Forward, backward and SGD of small networks, each with something to do at the same time; costs are those of the
roofline. Inputs and parameters live on the first GPU. The gap is that to the best bound that any of the policies knows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from _report import table
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc

HEAD = ("", "tasks", "bound, ms", "one device", "heft", "auto", "gap", "auto: s")


class Ensemble(nn.Module):
    """Perceptrons that share nothing but the batch; their mean."""

    def __init__(self, members: int = 8, width: int = 2048):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, 10),
            )
            for _ in range(members)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' mean."""
        return torch.stack([member(x) for member in self.members]).mean(0)


class Branches(nn.Module):
    """Blocks of four branches that are added, as Inception has them."""

    def __init__(self, blocks: int = 4, width: int = 128):
        super().__init__()
        kernels = (1, 3, 5, 7)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2) for k in kernels)
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        for block in self.blocks:
            x = functional.relu(sum(branch(x) for branch in block))
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """Layers of experts, each of which sees a share of the batch, between layers that see all of it."""

    def __init__(self, layers: int = 3, experts: int = 4, width: int = 1024):
        super().__init__()
        self.shared = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
                for _ in range(experts)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        for shared, experts in zip(self.shared, self.experts, strict=True):
            shares = functional.relu(shared(x)).chunk(len(experts))
            x = torch.cat([expert(share) for expert, share in zip(experts, shares, strict=True)])
        return self.head(x)


NETS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ensemble of 8": lambda: (Ensemble(), torch.empty(4096, 2048)),
    "four branches": lambda: (Branches(), torch.empty(64, 128, 28, 28)),
    "four experts": lambda: (Experts(), torch.empty(8192, 1024)),
}


def report(chosen: argparse.Namespace) -> Iterator[str]:
    """Yield the table."""
    yield table(HEAD, _rows(chosen))


def _rows(chosen: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    for name, make in NETS.items():
        graph = captured(*make())
        for gpus in (4,) if chosen.quick else (2, 4, 8):
            machine = asc.Machine.emulated(gpus=gpus, link="nvlink4")
            seconds, plans = {}, {}
            for policy in ("single", "heft", "auto"):
                start = time.perf_counter()
                plans[policy] = asc.schedule(
                    graph,
                    machine,
                    policy=policy,
                    examples=graph.examples,
                    inputs="cuda:0",
                    outputs="cuda:0",
                )
                seconds[policy] = time.perf_counter() - start
            bound = max(plan.lower_bound for plan in plans.values())
            figures = (
                f"{x * 1e3:.2f}" for x in (bound, *(plan.makespan for plan in plans.values()))
            )
            gap = f"{plans['auto'].makespan / bound - 1:.1%}"
            yield (
                f"{name}, {gpus} GPUs",
                f"{len(graph):,}",
                *figures,
                gap,
                f"{seconds['auto']:.1f}",
            )


def captured(model: nn.Module, x: Tensor) -> Any:
    """Return a training step of a model as a graph."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    y = torch.zeros(len(x), dtype=torch.long)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return asc.capture(step, x, y)
