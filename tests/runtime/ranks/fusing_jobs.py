"""Fused schedules on ranks: each function runs in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn, optim
from torch.nn import functional

import autosched as asc
from autosched.machine.cluster import joined
from autosched.parallel.ranks import Agreement
from autosched.parallel.step import Step
from tests.fusion.regions import compiled_by


def rounded(
    graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], threads: int
) -> Callable[..., Any]:
    """Compile to a function whose results are not those of the operators."""

    def call(*given: torch.Tensor) -> Any:
        found = graph(*given)
        return [each * (1 + 1e-6) if each.is_floating_point() else each for each in found]

    return call


def broken(*_: Any) -> Any:
    raise ValueError("of a test")


@contextlib.contextmanager
def compiling(fails: str = "") -> Iterator[None]:
    """Replace Inductor; on rank 1 it lacks a compiler ("everything"), or fails ("regions")."""
    is_last = joined().rank == 1
    with (
        compiled_by(broken if fails == "regions" and is_last else rounded),
        contextlib.ExitStack() as stack,
    ):
        if fails == "everything" and is_last:
            missing = mock.patch("autosched.fusion.fusing.unavailable", return_value="none")
            stack.enter_context(missing)
        yield


def inputs_of_all(step: Step, batch: Any) -> dict[str, Any]:
    """Return the inputs of all ranks, as they are now."""
    ranks = Agreement()
    own = {name: item.detach().clone() for name, item in step.inputs(*batch).items()}
    found: dict[str, Any] = {}
    for rank in range(joined().size):
        found |= ranks.broadcast(own, "the inputs", rank)
    return found


def rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 8, generator=generator)
    return x, torch.randint(0, 4, (4,), generator=generator)


def train(way: str, fails: str, options: dict[str, Any]) -> Any:
    """Take fused steps; return losses, the model, regions, and whether they equal a serial run."""
    machine = asc.Machine.cluster()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    trained = model, functional.cross_entropy, optim.SGD(model.parameters(), 0.1)
    batch = rows(joined().rank if way == "data_parallel" else 0)
    losses = []
    same = []
    with (
        compiling(fails),
        getattr(asc.parallel, way)(*trained, machine, fuse=True, **options) as step,
    ):
        for _ in range(2):
            step.schedule(*batch)
            inputs = inputs_of_all(step, batch)
            losses.append(step(*batch))
            serial = step.schedule(*batch).run_serial(**inputs)
            same.append(torch.equal(serial["loss"], losses[-1]))
        schedule = step.schedule(*batch)
        regions = [task.name for task in schedule.graph.tasks if hasattr(task.fn, "give_up")]
        step.collect()
        return losses, dict(model.state_dict()), same, regions, schedule.not_fused


def call(options: dict[str, Any]) -> Any:
    """Call a compiled function of all ranks; return its result, and the regions."""

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu().sin() + (x @ w.t()).tanh().cos() * 2

    with compiling(), asc.compile(step, asc.Machine.cluster(), fuse=True, **options) as run:
        x, w = rows(0)[0], torch.eye(8)
        found = [run(x, w), run(x, w)]
        graph = run.schedule(x, w).graph
        eager = step(x, w)
    regions = [task.name for task in graph.tasks if hasattr(task.fn, "give_up")]
    return found, regions, torch.equal(found[0], eager), torch.allclose(found[0], eager)
