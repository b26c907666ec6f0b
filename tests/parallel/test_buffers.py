"""Buffers with which replicas begin a step: those that the first one has left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc


def trained(model: nn.Module) -> asc.parallel.Step:
    machine = asc.Machine.emulated(gpus=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    how = {"backend": "host", "reduction": "sum"}
    return asc.parallel.data_parallel(model, functional.cross_entropy, optimizer, machine, **how)


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
            optimizer.zero_grad()
            expected = functional.cross_entropy(inner(x - centre), y)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
            centre = 0.9 * centre + 0.1 * x[:3].mean(0)  # of the first replica's share
        torch.testing.assert_close(model.centre, centre)
        torch.testing.assert_close(model.inner.weight, inner.weight)
        inputs, tasks = step.inputs(x, y), [task.name for task in step.schedule(x, y).graph.tasks]
    assert torch.equal(inputs["r1.centre"], model.centre)
    assert torch.equal(inputs["r1.count"], model.count)
    assert [name for name in tasks if "buffers" in name] == ["buffers.pack", "r1.buffers.unpack"]


def test_a_cumulative_average_of_a_batch_norm_is_refused():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None))
    with (
        trained(model) as step,
        pytest.raises(asc.CaptureError, match="Python reads elements of a tensor"),
    ):
        step(torch.randn(4, 5), torch.randint(0, 4, (4,)))
