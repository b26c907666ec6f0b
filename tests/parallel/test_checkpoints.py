"""Checkpoints of steps: what is written is read, on as many devices or on fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.step import Step
from tests.serial import assert_equal


def trained(devices: int, **options: Any) -> Step:
    """Return a step of a model with batch norms, and an optimizer with groups and moments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}]
    machine = asc.Machine.emulated(gpus=devices)
    return asc.parallel.data_parallel(
        model, functional.cross_entropy, optim.AdamW(groups), machine, backend="virtual", **options
    )


def batch(number: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(rows, 8, generator=generator), torch.randint(
        0, 4, (rows,), generator=generator
    )


@pytest.mark.filterwarnings("error")
def test_training_goes_on_from_a_checkpoint_as_without_it(tmp_path: Path) -> None:
    with trained(2, compression=asc.parallel.Int8()) as step:
        for number in range(2):
            step(*batch(number))
        step.save(tmp_path)
        with trained(2, compression=asc.parallel.Int8()) as other:
            other.load(tmp_path)
            assert_equal(other.state_dict(), step.state_dict(), "what was read")
            assert torch.equal(other(*batch(2)), step(*batch(2)))
            assert_equal(other.state_dict(), step.state_dict(), "what was trained")


def test_residuals_of_replicas_that_are_no_more_are_dropped_with_a_warning(tmp_path: Path) -> None:
    with trained(3, compression=asc.parallel.TopK(0.1)) as step:
        step(*batch(0))
        step.save(tmp_path)
        kept = step.state_dict()["residuals"]
    kept.pop("b0.residual.2")
    with trained(2, compression=asc.parallel.TopK(0.1)) as other:
        with pytest.warns(RuntimeWarning, match="2 replicas, and residuals of 3"):
            other.load(tmp_path)
        assert_equal(other.state_dict()["residuals"], kept, "residuals")


def test_a_step_without_moments_is_read_back(tmp_path: Path) -> None:
    with trained(1) as step, trained(1) as other:
        nn.init.ones_(step.model[0].weight)
        step.save(tmp_path)
        other.load(tmp_path)
        assert_equal(other.state_dict(), step.state_dict(), "what was read")
