"""Training that ranks do in tests: each function runs in a process of its own.

Several also run in one process, for emulated ``hosts``.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.step import Step

OPTIMIZERS = {
    "sgd": functools.partial(optim.SGD, lr=0.1),  # without a state
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(optim.Adam, lr=0.01),
}
HALVES = {"0": "cpu:0", "2": "cpu:1"}
OBJECTS = {"half": asc.parallel.Half()}  # options, by the names that cases give them


def batch(number: int, rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a rank."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def whole(number: int, counts: list[int]) -> list[torch.Tensor]:
    """Return the rows of all ranks."""
    parts = [batch(number, rank, rows) for rank, rows in enumerate(counts)]
    return [torch.cat(items) for items in zip(*parts, strict=True)]


def a_model(dropout: bool = False, seed: int = 0) -> nn.Sequential:
    """Return a model with a batch norm, or with dropout."""
    torch.manual_seed(seed)
    first, norm, last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)
    if dropout:
        return nn.Sequential(first, nn.Dropout(), nn.Linear(6, 6), nn.Dropout(0.3), last)
    return nn.Sequential(first, norm, nn.Linear(6, 6), last)


def step_on(machine: asc.Machine, way: str, options: dict[str, Any], seed: int = 0) -> Step:
    """Return a step of a model; ``way`` is the function that makes it."""
    how = {name: OBJECTS.get(str(item), item) for name, item in options.items()}
    model = a_model(how.pop("dropout", False), seed)
    optimizer = OPTIMIZERS[how.pop("optimizer", "momentum")](model.parameters())
    if machine.rank is None:
        how["backend"] = "virtual"
    if way == "model_parallel":
        loss_fn = functional.cross_entropy
        return asc.parallel.model_parallel(
            model, machine, loss_fn=loss_fn, optimizer=optimizer, **how
        )
    make = getattr(asc.parallel, way)
    return make(model, functional.cross_entropy, optimizer, machine, **how)


def machine_of(hosts: int | None) -> asc.Machine:
    """Return the machine of all ranks, or of so many emulated ones."""
    return asc.Machine.cluster() if hosts is None else asc.Machine.emulated(gpus=0, hosts=hosts)


def facts(step: Step) -> Any:
    """Return the state of a step."""
    return dict(step.model.state_dict()), step.optimizer.state_dict()["state"]


def halved(optimizer: optim.Optimizer) -> optim.lr_scheduler.StepLR:
    """Return what halves the rate every other step."""
    return optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(
    way: str, options: dict[str, Any], rows: list[list[int]], hosts: int | None = None
) -> Any:
    """Train on batches of so many rows of each rank; return losses, norms and the state.

    With stages, all ranks pass the same batch, of the rows of rank 0. ``seeds`` of options are those
    of the ranks' generators.
    """
    machine = machine_of(hosts)
    options = dict(options)
    seeds = options.pop("seeds", [5] * len(rows[0]))
    found = []
    with step_on(machine, way, options, machine.rank or 0) as step:  # rank 0's model counts
        torch.manual_seed(seeds[machine.rank or 0])
        scheduler = halved(step.optimizer)
        for number, counts in enumerate(rows):
            if way != "data_parallel":
                given = batch(number, 0, counts[0])
            elif machine.rank is None:
                given = whole(number, counts)
            else:
                given = batch(number, machine.rank, counts[machine.rank])
            found.append((step(*given), step.grad_norm))
            scheduler.step()
        if way != "data_parallel":  # by which all have the same state after each step
            step.collect()
        return found, *facts(step)


class Failing(nn.Module):
    """Raises in forward while it is told to, which no guard watches, and in a run for a NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if sign().exists():
            raise ValueError("of a test")
        return sometimes(x.detach()) + x


def sign() -> Path:
    """Return the file that makes a model of this process fail."""
    return Path(tempfile.gettempdir(), f"autosched-{os.getpid()}-fails")


@torch.library.custom_op("autosched_tests::sometimes", mutates_args=())
def sometimes(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; raise for a row of NaN."""
    if bool(x.isnan().any()):
        raise ValueError("of a test")
    return x.clone()


@sometimes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Interrupting(list[int]):
    """A setting of an optimizer; Control-C comes when its length is asked for, as by the key of a step."""

    def __len__(self) -> int:
        raise KeyboardInterrupt


def failing(*_: Any) -> Any:
    """Raise, in place of what looks up inputs."""
    raise ValueError("of a test")


def misuse(whats: list[str]) -> list[str]:
    """Take a step for each of these, which rank 1 does in it; return what each step ended with.

    Steps of other names are as any. Those of a capture have another number of rows.
    """
    machine = asc.Machine.cluster()
    model = nn.Sequential(Failing(), nn.Linear(8, 4))
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group: dict[str, Any] = optimizer.param_groups[0]
    ended = []
    with asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, reduction="exchange"
    ) as step:
        for number, name in enumerate(whats):
            what = name if machine.rank == 1 else ""
            x, y = batch(number, machine.rank, 4 + ("capture" in name))
            others = {
                "dtype": (x.double(), y),
                "item": (x,),
                "rows": (x, y[:3]),
                "nan": (x * torch.nan, y),
            }
            model.train(what != "mode")
            model[1].bias.requires_grad_(what != "frozen")
            group["lr"] = 0.2 if what == "rate" else 0.1
            if what == "capture":
                sign().touch()
            if what == "interrupt":
                group["setting"] = Interrupting()
            if what == "inputs":
                step._batch_inputs = failing
            if what == "closed":
                step.close()
            if what == "changed":
                with torch.no_grad():
                    model[1].weight.zero_()
            try:
                step(*others.get(what, (x, y)))
                ended.append(str([p.tolist() for p in model.parameters()]))
            except (Exception, KeyboardInterrupt) as error:
                ended.append(f"{type(error).__name__}: {error}")
            sign().unlink(missing_ok=True)
            group.pop("setting", None)
            vars(step).pop("_batch_inputs", None)
    return ended


# ---- stages


def refuse() -> list[str]:
    """Do what is refused, and what is not; return what each ended with."""
    machine = asc.Machine.cluster()
    step = step_on(machine, "pipeline", {"split": HALVES, "chunks": 2, "schedule": "gpipe"})
    trained = step.model, functional.cross_entropy, step.optimizer
    ended = []
    for call in (
        lambda: step(*batch(0, 0, 8 + (machine.rank or 0))),
        lambda: asc.parallel.pipeline(*trained, machine, in_flight=2),
        lambda: step(*batch(0, 0, 8)),
        step.state_dict,
    ):
        try:
            call()
            ended.append("")
        except asc.AutoschedError as error:
            ended.append(f"{type(error).__name__}: {error}")
    return ended


def change_everything(hosts: int | None = None) -> Any:
    """Change state and settings between steps, save and load; return losses and the state.

    A rank changes the stages that it has; emulated ``hosts`` in one process change all.
    """
    machine = machine_of(hosts)
    how = {"split": HALVES, "chunks": 2, "schedule": "1f1b"}
    with step_on(machine, "pipeline", how, machine.rank or 0) as step:
        model, group = step.model, step.optimizer.param_groups[0]
        own = (model[:2], model[2:])
        numbers = iter(range(100))
        losses = []

        def train() -> None:
            losses.append(step(*batch(next(numbers), 0, 8)))

        train()
        with torch.no_grad():  # the stage of rank 1 alone
            if machine.rank != 0:
                own[1][0].weight.mul_(0.5)
        train()
        group["lr"] = 0.05
        train()
        with torch.no_grad():  # moments of each stage, and a buffer
            for rank, stage in enumerate(own):
                if machine.rank in (None, rank):
                    for parameter in stage.parameters():
                        step.optimizer.state[parameter]["momentum_buffer"].mul_(0.5)
            if machine.rank in (None, 0):
                model[1].running_mean.add_(1.0)
        train()
        step.collect()
        saved = copy.deepcopy(step.state_dict())
        train()
        model[2].weight.requires_grad_(False)
        train()
        model[2].weight.requires_grad_(True)
        step.load_state_dict(saved)
        train()
        train()
        step.collect()
        return losses, *facts(step)


def save(way: str, options: dict[str, Any], folder: str) -> Any:
    """Train for a step, save, and train for another one; return its loss, and what was saved."""
    machine = asc.Machine.cluster()
    with step_on(machine, way, options) as step:
        step(*batch(0, 0, 8))
        step.save(Path(folder))
        step.collect()
        saved = copy.deepcopy(facts(step))
        return step(*batch(1, 0, 8)), *saved


def load(way: str, options: dict[str, Any], folder: str) -> Any:
    """Load, and train for another step; return its loss, and the state that was loaded."""
    machine = asc.Machine.cluster()
    with step_on(machine, way, options, seed=1) as step:
        step.load(Path(folder))
        loaded = copy.deepcopy(facts(step))
        return step(*batch(1, 0, 8)), *loaded
