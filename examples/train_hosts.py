"""Train on several processes, on one host or many: each has a part of the batch.

Run it with ``torchrun --nproc-per-node=2 examples/train_hosts.py``. The graph is the same on every
rank: a gradient of each rank's rows, which is sent to all others, and a sum in the order of ranks.
So the parameters are those of the serial run, bit for bit. Exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import autosched as asc

RATE = 0.1


def gradient(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the squared error of a linear model."""
    return 2 * x.t() @ (x @ weights - y) / len(x)


def training_step(devices: tuple[str, ...]) -> asc.Graph:
    """Return a step with the inputs ``weights0``, ``x0`` and ``y0`` on the first device, and so on."""
    graph = asc.Graph("training step")
    weights = []
    gradients = []
    for rank, device in enumerate(devices):
        with graph.on(device):
            weights.append(graph.input(f"weights{rank}"))
            rows = graph.inputs(f"x{rank}", f"y{rank}")
            gradients.append(graph.add(gradient, weights[-1], *rows, name=f"gradient{rank}"))
    for device, own in zip(devices, weights, strict=True):
        with graph.on(device):
            total = gradients[0]
            for other in gradients[1:]:
                total = total + other
            own.sub_(total * (RATE / len(devices)))
    graph.output(total=total)
    return graph


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Return the rows of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.rand(64, 8, generator=generator)
    return {f"x{rank}": x, f"y{rank}": x.sum(1, keepdim=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)

    machine = asc.Machine.cluster()  # joins the processes that torchrun started
    graph = training_step(machine.names)
    ranks = range(len(machine.names))
    rank = machine.rank
    assert rank is not None
    weights = torch.zeros(8, 1)
    with asc.schedule(graph, machine) as schedule:
        for step in range(steps):
            schedule(**{f"weights{rank}": weights}, **batch(step, rank))

    serial = {f"weights{other}": torch.zeros(8, 1) for other in ranks}
    for step in range(steps):
        rows = [batch(step, other) for other in ranks]
        graph.run_serial(**serial, **{name: item for part in rows for name, item in part.items()})
    holds = torch.equal(weights, serial[f"weights{rank}"])
    if rank == 0:
        print(
            f"{len(ranks)} ranks, {steps} steps: the largest error is {(weights - 1).abs().max():.4f}"
        )
        print(
            f"    parameters equal the serial ones, bit for bit: {'holds' if holds else 'BROKEN'}"
        )
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
