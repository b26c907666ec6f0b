"""Training of stages that ranks do in tests: each function runs in a process of its own."""

from __future__ import annotations

import copy
import functools
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
    "adam": optim.Adam,
}


def batch(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch, which all ranks have."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def step_on(machine: asc.Machine, way: str, options: dict[str, Any], seed: int = 0) -> Step:
    """Return a step of a model with batch norms; ``way`` is the function that makes it."""
    torch.manual_seed(seed)
    options = dict(options)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 4))
    if options.pop("dropout", False):
        model = nn.Sequential(model[0], nn.Dropout(), model[2], nn.Dropout(0.3), model[3])
    optimizer = OPTIMIZERS[options.pop("optimizer", "momentum")](model.parameters())
    how = dict(options) if machine.rank is not None else {**options, "backend": "virtual"}
    if way == "model_parallel":
        loss_fn = functional.cross_entropy
        return asc.parallel.model_parallel(
            model, machine, loss_fn=loss_fn, optimizer=optimizer, **how
        )
    make = getattr(asc.parallel, way)
    return make(model, functional.cross_entropy, optimizer, machine, **how)


def facts(step: Step) -> Any:
    """Return the state of a step."""
    return dict(step.model.state_dict()), step.optimizer.state_dict()["state"]


def train(way: str, options: dict[str, Any], sizes: list[int], hosts: int | None = None) -> Any:
    """Train on batches of so many rows; return losses, norms and the state that is collected.

    On emulated ``hosts`` in one process, if that is given.
    """
    emulated = asc.Machine.emulated(gpus=0, hosts=hosts) if hosts is not None else None
    machine = asc.Machine.cluster() if emulated is None else emulated
    found = []
    with step_on(machine, way, options, machine.rank or 0) as step:  # rank 0's model counts
        torch.manual_seed(5)
        for number, rows in enumerate(sizes):
            found.append((step(*batch(number, rows)), step.grad_norm))
        step.collect()
        return found, *facts(step)


class Smoothed(nn.Module):
    """Has a buffer that each call replaces, and returns what its first and last layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
        self.last = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        y = self.last(h) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        return {"hidden": h, "y": y}


FORWARD = {"split": {"first": "cpu:0", "last": "cpu:1"}}


def forward(options: dict[str, Any], hosts: int | None = None) -> Any:
    """Call a model without a loss, in several modes; return results, and its buffers.

    On emulated ``hosts`` in one process, if that is given.
    """
    emulated = asc.Machine.emulated(gpus=0, hosts=hosts) if hosts is not None else None
    machine = asc.Machine.cluster() if emulated is None else emulated
    torch.manual_seed(0)
    model = Smoothed()
    found = []
    with asc.parallel.model_parallel(model, machine, **FORWARD, **options) as run:
        for number, rows in enumerate([6, 6, 5, 6]):
            model.train(number < 3)
            with torch.no_grad():
                found.append(run(batch(number, rows)[0]))
        assert run.cuts(batch(3, 6)[0]).devices == ("cpu:0", "cpu:1")
    return found, dict(model.named_buffers())


def refuse() -> list[str]:
    """Do what is refused, and what is not afterwards; return the errors."""
    machine = asc.Machine.cluster()
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    trained = model, functional.cross_entropy, optim.SGD(model.parameters(), 0.1)
    split = {"0": "cpu:0", "1": "cpu:1"}
    step = asc.parallel.pipeline(*trained, machine, split=split, chunks=2, schedule="gpipe")
    run = asc.parallel.model_parallel(model, machine, split=split)
    rank = machine.rank or 0
    errors = []
    for call in (
        lambda: step(*batch(0, 8 + rank)),
        lambda: run(batch(0, 8 + rank)[0]),
        lambda: run(batch(0, 8)[0].to(torch.float64 if rank else torch.float32)),
        lambda: run(batch(0, 8)[0]),
        lambda: asc.parallel.model_parallel(model, machine, in_flight=2),
    ):
        try:
            call()
        except asc.AutoschedError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def change(options: dict[str, Any]) -> Any:
    """Change each stage on the rank that has it, between steps; return the state."""
    machine = asc.Machine.cluster()
    with step_on(machine, "pipeline", options) as step:
        step(*batch(0, 8))
        refused = ""
        try:
            step.state_dict()
        except asc.ScheduleError as error:
            refused = str(error)
        with torch.no_grad():
            for parameter in step.model[0 if machine.rank == 0 else -1].parameters():
                parameter.mul_(0.5)
        step(*batch(1, 8))
        step.collect()
        return refused, step.state_dict()["model"]


def change_everything(hosts: int | None = None) -> Any:
    """Change state and settings between steps, save and load; return losses and the state.

    A rank changes the stages that it has; emulated ``hosts`` in one process change all.
    """
    machine = asc.Machine.cluster() if hosts is None else asc.Machine.emulated(gpus=0, hosts=hosts)
    how = {"split": {"0": "cpu:0", "2": "cpu:1"}, "chunks": 2, "schedule": "1f1b"}
    with step_on(machine, "pipeline", how, machine.rank or 0) as step:
        model, group = step.model, step.optimizer.param_groups[0]
        own = (model[:2], model[2:])
        numbers = iter(range(100))
        losses = []

        def train() -> None:
            losses.append(step(*batch(next(numbers), 8)))

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
        model.eval()
        train()
        model.train()
        added = torch.zeros(3).requires_grad_()  # that no stage has
        step.optimizer.add_param_group({"params": [added], "lr": 0.5})
        train()
        del step.optimizer.param_groups[1]
        step.load_state_dict(saved)
        train()
        train()
        step.collect()
        return losses, *facts(step)


def save(way: str, options: dict[str, Any], folder: str) -> Any:
    """Train for a step, save, and train for another one; return its loss, and what was saved."""
    machine = asc.Machine.cluster()
    with step_on(machine, way, options) as step:
        step(*batch(0, 8))
        step.save(Path(folder))
        step.collect()
        saved = copy.deepcopy(facts(step))
        return step(*batch(1, 8)), *saved


def load(way: str, options: dict[str, Any], folder: str) -> Any:
    """Load, and train for another step; return its loss, and the state that was loaded."""
    machine = asc.Machine.cluster()
    with step_on(machine, way, options, seed=1) as step:
        step.load(Path(folder))
        loaded = copy.deepcopy(facts(step))
        return step(*batch(1, 8)), *loaded
