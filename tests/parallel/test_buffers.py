"""Buffers with which replicas begin a step: those that the first one has left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def trained(model: nn.Module) -> asc.parallel.Step:
    machine = asc.Machine.emulated(gpus=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, backend="host", reduction="sum"
    )


def by_hand(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Train by one step on one device."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Centred(nn.Module):
    """Subtracts a running mean, and counts in another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4)
        self.register_buffer("centre", torch.zeros(5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x - self.centre)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.count.add_(1)
        return result


def test_a_step_begins_with_what_the_first_replica_has_left():
    torch.manual_seed(0)
    model, rows = Centred(), 5
    inner, centre = copy.deepcopy(model.inner), torch.zeros(5)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    with trained(model) as step:
        for _ in range(4):
            x, y = torch.randn(rows, 5) + 2, torch.randint(0, 4, (rows,))
            loss = step(x, y)
            expected = by_hand(inner, x - centre, y, optimizer)
            torch.testing.assert_close(loss, expected)
            centre = 0.9 * centre + 0.1 * x[:3].mean(0)  # of the first replica's share
        torch.testing.assert_close(model.centre, centre)
        torch.testing.assert_close(model.inner.weight, inner.weight)
        inputs, tasks = step.inputs(x, y), [task.name for task in step.schedule(x, y).graph.tasks]
    assert torch.equal(inputs["r1.centre"], model.centre)
    assert [name for name in tasks if "copy_" in name] == ["r1.centre.copy_"]


def test_buffers_of_norms_and_counters_are_not_broadcast():
    x, y = torch.randn(4, 5), torch.randint(0, 4, (4,))
    with trained(mlp()) as step:
        names = [task.name for task in step.schedule(x, y).graph.tasks]
    assert not [name for name in names if "copy_" in name]


def test_spectral_norms_are_equal_on_all_replicas():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 4)
    )
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    with trained(model) as step:
        for _ in range(4):
            x, y = torch.randn(5, 5), torch.randint(0, 4, (5,))
            torch.testing.assert_close(step(x, y), by_hand(plain, x, y, optimizer))
        inputs = step.inputs(x, y)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)
        assert torch.equal(inputs[f"r1.{name}"], inputs[f"r0.{name}"])


def test_a_cumulative_average_is_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None))
    with (
        trained(model) as step,
        pytest.raises(asc.CaptureError, match="batch norm '1' has momentum=None"),
    ):
        step(torch.randn(4, 5), torch.randint(0, 4, (4,)))
