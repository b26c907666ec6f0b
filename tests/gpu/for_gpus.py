"""What tests on GPUs, real or played, have in common: inputs where they must live, random tasks, generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import autosched as asc
from autosched.placement import home
from autosched.testing.strategies import noisy


def noisy_there(a: torch.Tensor) -> torch.Tensor:
    """Draw random numbers where the argument is."""
    return a * 0.5 + torch.rand_like(a) * 0.5


def on_gpus(graph: asc.Graph) -> asc.Graph:
    """Return a drawn graph whose random tasks draw where they run."""
    found = graph.pinned()
    found.tasks[:] = [
        replace(task, fn=noisy_there) if task.fn is noisy else task for task in graph.tasks
    ]
    return found


def there(
    machine: asc.Machine, graph: asc.Graph, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Move inputs to where they must live."""
    device = {name: machine.device(home(graph, machine, graph.value(name))) for name in inputs}
    return {name: tensor.to(device[name].physical or "cpu") for name, tensor in inputs.items()}


def loaded(schedule: asc.Schedule) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the generated code of a schedule as a function."""
    names: dict[str, Any] = {}
    exec(schedule.code, names)
    return lambda **inputs: names["step"](**inputs, **schedule.code.given)


def chain(*fns: Callable[..., Any], on: str = "") -> asc.Graph:
    """Return a graph of tasks in a row, from x to y."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for fn in fns:
        value = graph.add(fn, value, **({"on": on} if on else {}))
    graph.output(y=value)
    return graph
