"""Training steps on two processes, compared with PyTorch's own, on one host over gloo.

Data parallelism against DistributedDataParallel, and pipelines against torch.distributed.pipelining
with the same stages, order and micro-batches. Contestants take turns in the same processes, and a
round of all is repeated. Each trains its own copy of a model with Adam on the same batches. The
losses of autosched must be those of one process that computes the same shares, bit for bit.

A step of a pipeline is also predicted, from the seconds that its tasks take in these processes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from _ranks import launch
from _report import options, publish, table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel

import autosched as asc

RANKS = 2
CHUNKS = 8
RATE = 1e-3
ROUNDS = 40
LARGE, SMALL = ((768, 1024, 1024, 512), 64), ((16, 32, 32, 8), 8)
CASES: dict[str, tuple[Any, Any]] = {  # widths of a model's layers, and rows of a rank; options
    "9 MiB of gradients": (LARGE, {}),
    "6 KiB of gradients": (SMALL, {}),
}
PIPELINE = ((512,) * 9, 256)
SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
MSE = nn.MSELoss()

Step = Callable[[Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class Result:
    """Seconds of each round, by contestant, and the predicted ones; whether losses are equal."""

    seconds: dict[str, list[float]]
    is_equal: bool
    predicted: float = 0.0


def network(widths: Sequence[int]) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model, always the same, and its optimizer."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths))
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), RATE)


def batches(widths: Sequence[int], rows: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return batches, always the same."""
    generator = torch.Generator().manual_seed(1)
    sizes = (rows, widths[0]), (rows, widths[-1])
    return [
        (torch.rand(sizes[0], generator=generator), torch.rand(sizes[1], generator=generator))
        for _ in range(count)
    ]


def in_turn(contestants: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant's calls; all ranks begin a call together."""
    for call in contestants.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            dist.barrier()
            begun = time.perf_counter()
            call()
            dist.barrier()  # a step ends with the last rank's
            found[name].append(time.perf_counter() - begun)
    return found


# ---- data parallelism


def own_rows(batch: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return the rows of a rank."""
    return [part.chunk(RANKS)[rank] for part in batch]


def by_ddp(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Train by a step as users of DistributedDataParallel write it."""
    optimizer.zero_grad()
    loss: Tensor = MSE(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def data_parallel(machine: asc.Machine, _: Any, kind: str, rounds: int) -> Result | None:
    """Let DDP and autosched train in turn; return what rank 0 has measured."""
    rank = machine.rank
    assert rank is not None
    (widths, rows), how = CASES[kind]
    given = batches(widths, RANKS * rows)
    model, optimizer = network(widths)
    ddp = partial(by_ddp, DistributedDataParallel(model), optimizer)
    own, alone = network(widths), network(widths)
    with ExitStack() as stack:
        make = asc.parallel.data_parallel
        step = stack.enter_context(make(own[0], MSE, own[1], machine, **how))
        losses = [step(*own_rows(batch, rank)) for batch in given]
        reduction = step.notes(*own_rows(given[0], rank))["reduction"]  # which all ranks ask for
        equal = True
        if rank == 0:
            emulated = asc.Machine.emulated(gpus=0, hosts=RANKS)
            how = {**how, "backend": "host", "reduction": reduction}
            serial = stack.enter_context(make(alone[0], MSE, alone[1], emulated, **how))
            equal = all(map(torch.equal, losses, [serial(*batch) for batch in given]))
        mine = own_rows(given[0], rank)
        seconds = in_turn({"torch": lambda: ddp(*mine), "autosched": lambda: step(*mine)}, rounds)
    return Result(seconds, equal) if rank == 0 else None


# ---- pipelines


class ByHand:
    """A pipeline of torch.distributed.pipelining; ``step`` trains this rank's stage."""

    def __init__(self, kind: str, rank: int):
        model, _ = network(PIPELINE[0])
        each = len(model) // RANKS
        own = model[rank * each : (rank + 1) * each]
        stage = pipelining.PipelineStage(own, rank, RANKS, torch.device("cpu"))
        self.schedule = SCHEDULES[kind](stage, CHUNKS, loss_fn=MSE)
        self.optimizer = torch.optim.Adam(own.parameters(), RATE)
        self.is_last = rank == RANKS - 1

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Train by a step; return the loss on the last rank."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.is_last:
            self.schedule.step(target=y, losses=losses)
        else:
            self.schedule.step(x)
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None


def pipeline(machine: asc.Machine, _: Any, kind: str, rounds: int) -> Result | None:
    """Let both pipelines train in turn; return what rank 0 has measured."""
    assert machine.rank is not None
    widths, rows = PIPELINE
    given = batches(widths, rows)
    by_hand = ByHand(kind, machine.rank)
    own, alone = network(widths), network(widths)
    each = (len(widths) - 1) // RANKS
    split = {f"{layer}": f"cpu:{layer // each}" for layer in range(len(widths) - 1)}
    how: Any = {"schedule": kind, "chunks": CHUNKS, "split": split}
    with ExitStack() as stack:
        make = asc.parallel.pipeline
        step = stack.enter_context(make(own[0], MSE, own[1], machine, **how))
        losses = [step(*batch) for batch in given]
        equal = True
        if machine.rank == 0:
            how |= {"machine": asc.Machine.emulated(gpus=0, hosts=RANKS), "backend": "host"}
            serial = stack.enter_context(make(alone[0], MSE, alone[1], **how))
            equal = all(map(torch.equal, losses, [serial(*batch) for batch in given]))
        batch = given[0]
        calls = {"torch": lambda: by_hand.step(*batch), "autosched": lambda: step(*batch)}
        seconds = in_turn(calls, rounds)
        foreseen = predicted(step, batch, rounds)
    return Result(seconds, equal, foreseen) if machine.rank == 0 else None


def predicted(step: Any, batch: Sequence[Tensor], rounds: int) -> float:
    """Return the predicted seconds of a step, from those that its tasks take on all ranks."""
    schedule = step.schedule(*batch)
    timeline = schedule.profile(**step.inputs(*batch), repeat=rounds)
    own = {span.name: span.seconds for span in timeline.spans if span.kind == "run"}
    ranks: list[dict[str, float]] = [{}] * RANKS
    dist.all_gather_object(ranks, own)
    costs = schedule.costs.override({name: t for one in ranks for name, t in one.items()}, {})
    makespan: float = replace(schedule, problem=replace(schedule.problem, costs=costs)).makespan
    return makespan


# ---- reports


def measured(job: Callable[..., Any], kind: str, rounds: int) -> Result:
    """Return what a job measures on new processes."""
    processes, results = launch(RANKS, job, kind, rounds)
    found: Result = results.get(timeout=600)
    for process in processes:
        process.join()
    return found


def row(name: str, found: Result) -> list[str]:
    """Return the cells that all tables have: least and median milliseconds, their ratios."""
    raw, ours = found.seconds["torch"], found.seconds["autosched"]
    pairs = [(f(raw), f(ours)) for f in (min, statistics.median)]
    times = [f"{seconds * 1e3:,.2f}" for pair in pairs for seconds in pair]
    ratios = [f"{ours / raw:.2f}" for raw, ours in pairs]
    return [name, *times, *ratios, "yes" if found.is_equal else "NO"]


def main() -> None:
    chosen = options(__doc__)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rounds = 5 if chosen.quick else ROUNDS
    columns = ["torch, least", "autosched", "torch, median", "autosched", "ratio, least", "median"]
    head = ["ms", *columns, "equal"]
    steps = [row(kind, measured(data_parallel, kind, rounds)) for kind in CASES]
    pipelines = []
    for kind in SCHEDULES:
        found = measured(pipeline, kind, rounds)
        share = found.predicted / min(found.seconds["autosched"])
        facts = [f"{found.predicted * 1e3:.2f}", f"{share:.2f}"]
        pipelines.append([*row(kind, found), *facts])
    publish(
        "hosts_training",
        "Training steps on two processes",
        [
            f"## Data parallelism, and DistributedDataParallel\n\n{table(head, steps)}",
            "Target: ratios of 1.15.",
            f"## Pipelines of {CHUNKS} micro-batches, and torch.distributed.pipelining\n\n"
            f"{table([*head, 'predicted', 'of least'], pipelines)}",
            "Target: the predicted time is 0.95 of the measured one, or more.",
            '"Equal": losses are those of one process, bit for bit.',
        ],
        chosen,
    )


if __name__ == "__main__":
    main()
