"""What tests on GPUs, real or played, have in common: inputs where they must live, random tasks, generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import autosched as asc
from tests.strategies import inputs_for, noisy


def noisy_there(a: torch.Tensor) -> torch.Tensor:
    """Draw random numbers where the argument is."""
    return a * 0.5 + torch.rand_like(a) * 0.5


def on_gpus(graph: asc.Graph) -> asc.Graph:
    """Return a drawn graph whose random tasks draw where they run."""
    found = graph.snapshot()
    found.tasks[:] = [
        replace(task, fn=noisy_there) if task.fn is noisy else task for task in graph.tasks
    ]
    return found


def there(
    machine: asc.Machine, graph: asc.Graph, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Move inputs to where they must live."""
    device = {name: machine.device(graph.value(name).home or machine.host) for name in inputs}
    return {name: tensor.to(device[name].physical or "cpu") for name, tensor in inputs.items()}


def loaded(schedule: asc.Schedule) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the generated code of a schedule as a function."""
    names: dict[str, Any] = {}
    exec(schedule.code, names)
    return lambda **inputs: names["step"](**inputs, **schedule.code.given)


def physical(machine: asc.Machine, gpus: int) -> asc.Machine:
    """Return the machine with its devices on so many played GPUs."""
    devices = [
        replace(device, physical=f"cuda:{int(device.name[5:]) % gpus}", imagined=False)
        if device.kind == "cuda"
        else replace(device, imagined=False)
        for device in machine.devices
    ]
    return asc.Machine(devices, machine.links)


Left = dict[str, torch.Tensor]


def left(run: Callable[..., Left], machine: asc.Machine, graph: asc.Graph) -> Left:
    """Run once; return on the host what is output, and what became of the inputs."""
    torch.manual_seed(3)
    inputs = there(machine, graph, inputs_for(graph))
    outputs = run(**inputs)
    return {
        f"{kind} {name}": item.cpu()
        for kind, d in (("in", inputs), ("out", outputs))
        for name, item in d.items()
    }


def same(a: Left, b: Left) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def chain(*fns: Callable[..., Any], on: str = "") -> asc.Graph:
    """Return a graph of tasks in a row, from x to y."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for fn in fns:
        value = graph.add(fn, value, **({"on": on} if on else {}))
    graph.output(y=value)
    return graph
