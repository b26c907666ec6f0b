"""What makes tensors makes them where its task runs, also in steps that were captured on another device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autosched as asc
from autosched.policies import single_on
from autosched.program.program import Copy
from autosched.runtime.backends import Transfer
from autosched.runtime.backends.host import Host

GPU = torch.device("meta")  # which every computer has, and which runs everything


class WithMeta(Host):
    """A host whose accelerators are meta devices."""

    def place(self, device: str) -> torch.device:
        return GPU if device.startswith("cuda") else torch.device("cpu")

    def transfer(self, copy: Copy) -> Transfer:
        device = self.place(copy.destination)
        return lambda source, into: source.to(device) if isinstance(source, Tensor) else source


def positions(x: Tensor) -> list[Tensor]:
    return [
        torch.arange(len(x)),
        torch.arange(len(x), device=x.device),
        torch.zeros(2, device=x.device) + x[0, 0],
    ]


def masks(x: Tensor) -> list[Tensor]:
    mask = torch.triu(torch.full((4, 4), -float("inf"), device=x.device), diagonal=1)
    return [mask, x + mask, torch.tril(torch.ones(4, 4, dtype=torch.bool)), torch.eye(4) @ x]


def constants(x: Tensor) -> list[Tensor]:
    return [
        torch.tensor([1.0, 2.0, 3.0, 4.0]) + x,
        torch.tensor(3.0) * x,
        x.new_tensor([1.0]),
        torch.scalar_tensor(2.0),
    ]


def like_others(x: Tensor) -> list[Tensor]:
    made = [
        x.new_zeros(3),
        x.new_full((2,), 1.0),
        torch.zeros_like(x),
        torch.ones_like(x, device=x.device),
    ]
    return [
        *made,
        x.to(torch.float64),
        x.to(x.device, torch.float64),
        torch.empty_like(x).zero_(),
        torch.full_like(x, 2.0),
    ]


def random(x: Tensor) -> list[Tensor]:
    return [
        torch.randn(3),
        torch.rand(2, device=x.device),
        torch.randint(0, 3, (2,)),
        torch.randn_like(x),
        x.new_empty(2).normal_(),
    ]


FUNCTIONS = [positions, masks, constants, like_others, random]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_factories_run_on_the_device_of_their_task(fn: Callable[[Tensor], list[Tensor]]) -> None:
    graph = asc.capture(fn, torch.randn(4, 4))
    machine = asc.Machine.emulated(gpus=1)
    with asc.schedule(graph, machine, policy=single_on("cuda:0"), backend=WithMeta()) as away:
        assert {task.device for task in graph.tasks} == {None}
        found = graph.finish(away(x=torch.randn(4, 4)))
        assert [item.device for item in found] == [GPU] * len(found)
    with asc.schedule(graph, machine, policy=single_on("cpu"), backend=WithMeta()) as at_home:
        found = graph.finish(at_home(x=torch.randn(4, 4)))
        assert {item.device.type for item in found} == {"cpu"}


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_what_factories_make_is_what_they_make_eagerly_also_in_code(
    fn: Callable[[Tensor], list[Tensor]],
) -> None:
    graph = asc.capture(fn, torch.randn(4, 4))
    one = asc.Machine.emulated(gpus=1)
    code = asc.schedule(graph, one, policy=single_on("cuda:0"), backend="host").code
    assert 'torch.device("cpu")' not in code
    assert ("device=cuda0" in code) == any("device" in task.kwargs for task in graph.tasks)
    names: dict[str, Any] = {}
    exec(re.sub(r'torch\.device\("cuda:\d"\)', 'torch.device("cpu")', code), names)
    runs = [lambda x: graph.finish(names["step"](x, **code.given))]
    for backend in ("virtual", "host"):
        machine = asc.Machine.emulated(gpus=3)
        runs.append(asc.compile(fn, machine, policy="round_robin", backend=backend))
    x = torch.randn(4, 4)
    torch.manual_seed(0)
    expected = fn(x)
    for run in runs:
        torch.manual_seed(0)
        assert all(map(torch.equal, run(x), expected))
    for run in runs[1:]:
        run.close()


# ---- other devices than the usual


def test_a_factory_on_another_device_is_bound_to_it() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.zeros(2, device="meta"), torch.ones(2, device=x.device)

    graph = asc.capture(fn, torch.ones(2, device="meta"))
    assert [task.device for task in graph.tasks] == [None] * 3
    graph = asc.capture(lambda x: (torch.zeros(2), x * 2), torch.ones(2, device="meta"))
    assert {task.name: task.device for task in graph.tasks} == {"zeros": "host", "mul": None}
    graph = asc.capture(lambda x: (torch.zeros(2, device="meta"), x * 2), torch.ones(2))
    assert {task.name: task.device for task in graph.tasks} == {"zeros": "meta", "mul": None}
