"""Data parallel training steps of a two-layer MLP and of LeNet, on two GPUs, or two logical ones on a single card.

``plain`` is the step as everybody writes it, on one GPU. Two logical devices share one card, so they cannot be faster
than one: there the figure is what the second replica and the sum of gradients cost. Parameters after some steps must
be those of the plain step, but for rounding. What is predicted is so with costs learnt of three profiled runs,
and not for what replays, which no profile shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import networks
import torch
from _record import Case, predicted
from _rig import Rig
from contestants import Entry, entered, linked, raced, replaying
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc

ROUNDS = 50
ROWS = 256
CHECKED = 3  # steps after which parameters are compared
MODELS: dict[str, Callable[[], nn.Module]] = {
    "two-layer MLP": networks.two_layer_mlp,
    "LeNet": networks.lenet,
}


def cases(rig: Rig) -> dict[str, Callable[[], Case]]:
    """Return a case for each network."""
    rehearsed = list(MODELS)[:1] if rig.rehearse else MODELS
    return {name: partial(_case, rig, MODELS[name]) for name in rehearsed}


def _batch(rig: Rig) -> tuple[Tensor, Tensor]:
    rows = 8 if rig.rehearse else ROWS
    generator = torch.Generator().manual_seed(0)
    images, classes = (
        torch.rand(rows, 1, 28, 28, generator=generator),
        torch.randint(10, (rows,), generator=generator),
    )
    return images.to(rig.device), classes.to(rig.device)


def _trained(rig: Rig, make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network, the same each time, and what trains it."""
    torch.manual_seed(0)
    model = make().to(rig.device)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _plain(
    rig: Rig, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]
) -> tuple[nn.Module, Entry]:
    model, optimizer = _trained(rig, make)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return model, Entry(step)


def _ours(
    rig: Rig, make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], gpus: int, **how: Any
) -> tuple[nn.Module, Entry, Any]:
    model, optimizer = _trained(rig, make)
    machine = linked(rig, rig.machine(gpus))
    step = asc.parallel.data_parallel(model, functional.cross_entropy, optimizer, machine, **how)
    return model, Entry(partial(step, *batch), step.schedule(*batch)), step


def _case(rig: Rig, make: Callable[[], nn.Module]) -> Case:
    batch, models, opened = _batch(rig), dict[str, nn.Module](), dict[str, Any]()

    def enter(label: str, gpus: int, replayed: bool = False) -> Entry:
        made = _ours(rig, make, batch, gpus, **(replaying(rig) if replayed else {}))
        models[label], entry, opened[label] = made
        return entry

    def plain() -> Entry:
        models["plain"], entry = _plain(rig, make, batch)
        return entry

    makers = {
        "plain": plain,
        "one GPU": lambda: enter("one GPU", 1),
        "two GPUs": lambda: enter("two GPUs", 2),
        "two GPUs, replay": lambda: enter("two GPUs, replay", 2, True),
    }
    entries, reasons = entered(rig, makers)  # which called each once
    for entry in entries.values():
        for _ in range(CHECKED - 1):
            entry.call()
    rig.settle()
    _check({label: models[label] for label in entries})
    seconds = raced(rig, entries, reasons, ROUNDS)
    timed = {
        label: step for label, step in opened.items() if label in seconds and "replay" not in label
    }
    promises = [
        predicted(_makespan(step, batch), seconds[label], label) for label, step in timed.items()
    ]
    for step in opened.values():
        step.close()
    return Case(seconds, promises, reasons, {"rows": len(batch[1]), "cards": rig.real})


def _makespan(step: Any, batch: tuple[Tensor, Tensor]) -> float:
    """Return what is predicted of a step's program with costs learnt of some runs, which train the model further."""
    schedule = step.schedule(*batch)
    learnt = schedule.profile(repeat=3, warmup=1, **step.inputs(*batch)).costs()
    return float(replace(schedule, problem=replace(schedule.problem, costs=learnt)).makespan)


def _check(models: dict[str, nn.Module]) -> None:
    """Raise unless all have learnt what the plain step has, if it took part."""
    wanted = list(models["plain"].parameters()) if "plain" in models else ()
    for label, model in models.items():
        for ours, theirs in zip(model.parameters(), wanted, strict=bool(wanted)):
            assert torch.allclose(ours, theirs.to(ours.device), rtol=1e-3, atol=1e-5), label
