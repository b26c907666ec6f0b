"""Data parallel over emulated hosts: bit for bit what the shares leave, and what each rank has of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.batches import shares
from autosched.parallel.ranks import Layout
from tests.serial import (
    among,
    data_parallel,
)

HOSTS = asc.Machine.emulated(gpus=0, hosts=2)


def vectors(*sizes: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return iter([(torch.randn(size, 8), torch.randint(0, 4, (size,))) for size in sizes])


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def adam(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, 0.01)


# ---- what each rank has


def outputs_of(schedule: asc.Schedule, rank: int) -> set[str]:
    ranks = schedule.machine.ranks
    return {name for name, device in schedule.program.outputs if ranks[device] == rank}


def test_each_rank_has_rows_state_and_a_loss_of_its_own() -> None:
    model = normed()
    step = data_parallel(machine=HOSTS, clip_grad_norm=1.0)(
        model, functional.cross_entropy, adam(model.parameters())
    )
    with step:
        batch = next(vectors(7))
        schedule, feed = step.schedule(*batch), step.inputs(*batch)
        assert [len(feed[name]) for name in ("batch.0", "rank1.batch.0")] == [4, 3]
        ranks = schedule.machine.ranks
        homes = {name: ranks[device] for name, device in schedule.program.inputs}
        assert all(rank == name.startswith(("r1.", "rank1.")) for name, rank in homes.items())
        assert {"loss", "grad_norm"} < outputs_of(schedule, 0)
        assert {"rank1.loss", "rank1.grad_norm"} < outputs_of(schedule, 1)
        # Counters and moments of the first step are made on each rank.
        made = outputs_of(schedule, 0) - {"loss", "grad_norm"}
        assert len(made) == 3 * 6
        assert outputs_of(schedule, 1) == {f"r1.{name}" for name in made} | {
            "rank1.loss",
            "rank1.grad_norm",
        }


# ---- layouts


def test_replicas_of_a_rank_divide_its_rows() -> None:
    machine = asc.Machine.emulated(gpus=2, hosts=2)
    devices = ("cuda:0", "cuda:2", "cuda:1", "cuda:3")  # of ranks 0, 1, 0, 1
    layout = Layout(machine, tuple((device,) for device in devices))
    assert layout.ranks == (0, 1)
    assert [layout.leads(replica, 0) for replica in range(4)] == [True, True, False, False]
    assert layout.other_leads(0, 0) == [1]
    assert layout.other_leads(0, 2) == [0, 1]
    model = normed()
    make = data_parallel(machine=machine, devices=devices)
    with make(model, functional.cross_entropy, adam(model.parameters())) as step:
        batch = next(vectors(10))
        feed = step.inputs(*batch)
        assert [len(feed[name]) for name in ("batch.0", "rank1.batch.0")] == [6, 4]
        expected = among(4)(10)
        assert [sum(share) for share in expected] == [*shares(6, 2), *shares(4, 2)]
