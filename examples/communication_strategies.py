"""Communication of data parallel training on four GPUs: reductions, buckets and compression.

The book sums gradients on one GPU and sends the sum to all (``allreduce`` of "Training on Multiple
GPUs"); its chapter "Parameter Servers" and guides to tuning describe alternatives. Here each trains
the same network: bytes sent, seconds, and the loss after some steps. Exit code 1 if an alternative
that only adds in another order changes the loss, if one that should send less does not, or if any
does not learn.
"""

import sys
import time
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any, NamedTuple

import book
import torch
from torch import nn
from torch.nn import functional

import autosched as asc
from autosched.parallel import Half, Int8, TopK
from autosched.program.program import Copy

GPUS, BATCH, WIDTH = 4, 256, 512
LOSS = functional.cross_entropy
SLOW = 500
MICRO = 4  # batches that are trained on before gradients are summed

# Alternatives that only change the order of additions, and those that change the numbers.
EXACT: Mapping[str, Mapping[str, Any]] = {
    "sum on one GPU": {"reduction": "sum"},
    "sum on the CPU": {"reduction": "cpu"},
    "ring": {"reduction": "ring"},
    "ring, buckets of 64 KiB": {"reduction": "ring", "buckets": (2**16, 2**16)},
    "ring, one bucket": {"reduction": "ring", "buckets": (2**30, 2**30)},
    "chosen by simulation": {"reduction": "auto"},
}
LOSSY: Mapping[str, Mapping[str, Any]] = {
    "half precision": {"compression": Half()},
    "8 bits": {"compression": Int8()},
    "the largest 1%": {"compression": TopK(share=0.01)},
}
RARE: Mapping[str, Mapping[str, Any]] = {
    f"ring, every {MICRO} batches": {"reduction": "ring", "accumulate": MICRO}
}


class Result(NamedTuple):
    """Bytes sent for a batch, seconds, and the loss after all batches."""

    nbytes: float
    measured: book.Seconds
    predicted: float
    loss: float


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network with many parameters and little work, so that communication dominates."""
    torch.manual_seed(0)
    sizes = (64, WIDTH, WIDTH, WIDTH, 10)
    layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
    net = nn.Sequential(nn.Flatten(), *(part for layer in layers for part in (layer, nn.ReLU())))[
        :-1
    ]
    return net, torch.optim.SGD(net.parameters(), lr=0.05)


def train(machine: asc.Machine, images: book.Images, steps: int, how: Mapping[str, Any]) -> Result:
    """Train with as many batches by each alternative; numbers are for one batch."""
    model, optimizer = make()
    count, seconds = how.get("accumulate", 1), []
    with asc.parallel.data_parallel(model, LOSS, optimizer, machine, **how) as step:
        batches = list(islice(book.batches(images, count * BATCH), steps // count))
        schedule = step.schedule(*batches[0])
        for batch in batches:
            start = time.perf_counter()
            float(step(*batch))
            seconds.append((time.perf_counter() - start) / count)
    measured = book.Seconds.of(seconds[1:] or seconds)
    return Result(
        sent(schedule) / count, measured, schedule.makespan / count, loss_of(model, images)
    )


@torch.no_grad()
def loss_of(model: nn.Module, images: book.Images) -> float:
    return float(LOSS(model(images.x), images.y))


def sent(schedule: asc.Schedule) -> float:
    """Return the bytes that are copied between devices, including the batch's."""
    values = {value.name: value for value in schedule.graph.values}
    copied = (
        values[instruction.value]
        for instruction in schedule.program
        if isinstance(instruction, Copy)
    )
    return sum(schedule.costs.value_nbytes(value) for value in copied)


def main() -> int:
    options = book.parser("Communication of data parallel training.").parse_args()
    machine, kind = book.machine_with(GPUS, slow=SLOW / 5 if options.quick else SLOW)
    print(f"machine: {kind}\n{machine}\n", flush=True)
    images, steps = book.digits(8), 4 if options.quick else 20
    results = {
        name: train(machine, images, steps, how) for name, how in {**EXACT, **LOSSY, **RARE}.items()
    }
    print(
        book.table(
            (f"{steps} batches of {BATCH}", "MB/batch", "sec/batch", "predicted", "loss"),
            *(
                (name, f"{r.nbytes / 1e6:.2f}", r.measured, f"{r.predicted:.3f}", f"{r.loss:.4f}")
                for name, r in results.items()
            ),
        )
    )
    times = {name: (r.measured, r.predicted) for name, r in results.items()}
    title = "A training step on four GPUs"
    book.draw_times(options.folder, "communication_seconds", title, times)
    return 0 if promises(results, loss_of(make()[0], images)) else 1


def promises(results: Mapping[str, Result], begun: float) -> bool:
    """Print the conditions, and return whether all hold; ``begun`` is the loss before training."""
    exact = [results[name].loss for name in EXACT]
    small = [results[name].nbytes for name in ("8 bits", "the largest 1%")]
    return all(
        [
            book.verdict(
                "another order changes the loss by less than 0.001", max(exact) - min(exact) < 1e-3
            ),
            book.verdict(
                "8 bits send less than a ring, and so does 1%", max(small) < results["ring"].nbytes
            ),
            book.verdict(
                f"all losses fall from {begun:.4f}",
                max(found.loss for found in results.values()) < begun,
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
