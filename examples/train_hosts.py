"""Train on several processes, on one host or many: each has rows of its own.

Run it with ``torchrun --nproc-per-node=2 examples/train_hosts.py``. Gradients are sent to all
processes and added in the order of ranks, so each has the parameters of a serial run, bit for bit:
that of all shares in one process, one after another. Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc

ROWS = 32


def new_model() -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(ROWS, 8, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def train_serially(steps: int, ranks: int) -> nn.Module:
    """Train on the rows of all ranks, one rank after another."""
    model = new_model()
    optimizer = optim.Adam(model.parameters(), 0.01)
    for step in range(steps):
        total: list[Tensor] = []
        for rank in range(ranks):
            x, y = batch(step, rank)
            loss = functional.mse_loss(model(x), y) / ranks
            own = torch.autograd.grad(loss, [*model.parameters()])
            total = [a + b for a, b in zip(total, own, strict=True)] if total else [*own]
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)

    machine = asc.Machine.cluster()  # joins the processes that torchrun started
    rank = machine.rank
    assert rank is not None
    model = new_model()
    optimizer = optim.Adam(model.parameters(), 0.01)
    with asc.parallel.data_parallel(model, functional.mse_loss, optimizer, machine) as train:
        losses = [train(*batch(step, rank)) for step in range(steps)]

    ranks = len(machine.names)
    serial = train_serially(steps, ranks).state_dict()
    holds = all(torch.equal(tensor, serial[name]) for name, tensor in model.state_dict().items())
    if rank == 0:
        print(f"{ranks} ranks, {steps} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        print(
            f"    parameters equal the serial ones, bit for bit: {'holds' if holds else 'BROKEN'}"
        )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
