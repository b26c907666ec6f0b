"""Buffers with which replicas begin a step: those that the first one has left."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosched as asc


def trained(model: nn.Module) -> asc.parallel.Step:
    machine = asc.Machine.emulated(gpus=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    how = {"backend": "host", "reduction": "sum"}
    return asc.parallel.data_parallel(model, functional.cross_entropy, optimizer, machine, **how)


def test_buffers_of_norms_and_counters_are_not_broadcast():
    x, y = torch.randn(4, 5), torch.randint(0, 4, (4,))
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    with trained(model) as step:
        tasks = step.schedule(x, y).graph.tasks
    assert not [task.name for task in tasks if "copy_" in task.name]


def test_a_cumulative_average_of_a_batch_norm_is_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None))
    with (
        trained(model) as step,
        pytest.raises(asc.CaptureError, match="batch norm '1' has momentum=None"),
    ):
        step(torch.randn(4, 5), torch.randint(0, 4, (4,)))
