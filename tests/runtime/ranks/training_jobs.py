"""Training that ranks do in tests: each function runs in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autosched as asc


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def batch(number: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a rank."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def train(rows: list[list[int]], options: dict[str, Any]) -> Any:
    """Train on batches of so many rows of each rank; return losses, model, optimizer."""
    machine = asc.Machine.cluster()
    model = normed()
    if machine.rank:
        with torch.no_grad():
            model[0].weight.zero_()  # rank 0's counts
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, **options
    ) as step:
        for number, counts in enumerate(rows):
            losses.append(step(*batch(number, machine.rank, counts[machine.rank])))
    return losses, dict(model.state_dict()), optimizer.state_dict()["state"]
