"""How data parallelism divides the rows of a batch among devices of different speed and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

import autosched as asc
from autosched.machine.device import slower
from autosched.parallel.batches import shares as equal_shares
from autosched.parallel.ranks import Layout
from tests.serial import (
    Rows,
    among,
    assert_trains_as_serially,
    data_parallel,
    momentum,
    small,
    vectors,
)


def unequal(*speeds: float, nbytes: Any = None) -> asc.Machine:
    """Return GPUs of such speeds, and bytes of memory."""
    machine = asc.Machine.emulated(gpus=len(speeds))
    cpu, *gpus = machine.devices
    gpus = [slower(gpu, 1 / speed) for gpu, speed in zip(gpus, speeds, strict=True)]
    if nbytes is not None:
        gpus = [replace(gpu, nbytes=limit) for gpu, limit in zip(gpus, nbytes, strict=True)]
    return replace(machine, devices=(cpu, *gpus))


def planned(machine: asc.Machine, rows: int = 4096, **options: Any) -> tuple[asc.Schedule, Any]:
    """Return the schedule of a step with a wide network, and the rows of each device."""
    model, x = (
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)),
        torch.zeros(rows, 256),
    )
    trained = model, functional.mse_loss, optim.SGD(model.parameters(), 0.1), machine
    with asc.parallel.data_parallel(*trained, **options) as step:
        return step.schedule(x, x), step.notes(x, x)["shares"]


@pytest.mark.parametrize(
    ("shares", "accumulate", "rows"),
    [
        ((3, 1), 1, {8: [[6], [2]], 1: [[1], []]}),
        ((1, 3), 2, {8: [[1, 1], [3, 3]], 1: [[], [1]]}),
        ((0, 2.5), 1, {8: [[8]], 1: [[1]]}),
        ((1, 0, 1), 1, {8: [[4], [4]], 1: [[1], []]}),
    ],
)
def test_rows_are_divided_as_asked_for(shares: Any, accumulate: int, rows: Any) -> None:
    make = data_parallel(len(shares), shares=shares, accumulate=accumulate)
    assert_trains_as_serially(make, rows.__getitem__, small(), vectors(8, 1, 8))


@pytest.mark.parametrize(
    "shares", ["even", (1,), (1, 2, 3), (0, 0), (1, -1), (1, "a"), 2, (1, None)]
)
def test_invalid_shares_are_rejected(shares: Any) -> None:
    model, machine = small(), asc.Machine.emulated(gpus=2)
    trained = model, functional.mse_loss, momentum(model.parameters()), machine
    with pytest.raises(asc.ScheduleError, match="shares must be 'auto' or a sequence of 2 numbers"):
        asc.parallel.data_parallel(*trained, shares=shares)


def test_each_rank_has_a_share() -> None:
    model, machine = small(), asc.Machine.emulated(gpus=2, hosts=2)
    trained = model, functional.mse_loss, momentum(model.parameters()), machine
    with pytest.raises(asc.ScheduleError, match="while others of its rank do"):
        asc.parallel.data_parallel(*trained, shares=(1, 1, 0, 0))
    with asc.parallel.data_parallel(*trained, shares=(1, 3, 0, 1)) as step:
        found = step.notes(torch.zeros(10, 8), torch.zeros(10, 4))["shares"]
    assert found == {"cuda:0": 2, "cuda:1": 6, "cuda:3": 2}


@pytest.mark.parametrize("speeds", [(1, 0.25), (0.25, 1), (1, 0.01), (0.5, 0.02, 1)])
def test_slow_devices_make_no_step_slower(speeds: tuple[float, ...]) -> None:
    machine = unequal(*speeds)
    made, shares = planned(machine)
    names = sorted(
        (f"cuda:{i}" for i in range(len(speeds))), key=lambda name: -speeds[int(name[-1])]
    )
    for count in range(1, len(names) + 1):
        kept = sorted(names[:count])
        other, _ = planned(machine, devices=kept)
        assert made.makespan <= other.makespan * (1 + 1e-9), kept
    assert sum(shares.values()) == 4096
    assert [shares[name] for name in names if name in shares] == sorted(shares.values())[::-1]


@pytest.mark.parametrize("machine", [unequal(1, 0.95), unequal(1, 1, nbytes=(1e9, 2e9))])
def test_equal_devices_have_equal_shares(machine: asc.Machine) -> None:
    assert planned(machine)[1] == {"cuda:0": 2048, "cuda:1": 2048}


def test_a_device_with_little_memory_has_a_smaller_share() -> None:
    alone, _ = planned(unequal(1))
    limit = 0.45 * alone.peak_bytes["cuda:0"]
    made, shares = planned(unequal(1, 1, nbytes=(1e12, limit)))
    assert made.peak_bytes["cuda:1"] <= limit
    assert 0 < shares["cuda:1"] < shares["cuda:0"]
    assert made.makespan < alone.makespan
    # The parameters do not fit there.
    assert planned(unequal(1, 1, nbytes=(1e12, 1e5)))[1] == {"cuda:0": 4096}


def test_unequal_devices_train_as_serially() -> None:
    """Large batches are divided; small ones are for the fast device, whose replica the model then is."""
    cpu, first, second = (replace(d, flops_per_second=1e8) for d in unequal(1, 1).devices)
    machine = replace(unequal(1, 1), devices=(cpu, replace(first, flops_per_second=4e7), second))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
    batches = [*vectors(64, 4, 4, 64, 4)]
    given = {len(x): (x, y) for x, y in batches}
    steps: list[Any] = []
    replicas = set()

    def make(*trained: Any) -> Any:
        steps.append(data_parallel(machine=machine)(*trained))
        return steps[0]

    def rows(count: int) -> Rows:
        shares = steps[0].notes(*given[count])["shares"].values()
        replicas.add(len(shares))
        return [[share] for share in shares]

    assert_trains_as_serially(make, rows, model, batches)
    assert replicas == {1, 2}


# ---- several ranks


def test_each_rank_has_rows_state_and_a_loss_of_its_own() -> None:
    model = small()
    make = data_parallel(machine=asc.Machine.emulated(gpus=0, hosts=2), clip_grad_norm=1.0)
    with make(model, functional.cross_entropy, optim.Adam(model.parameters(), 0.01)) as step:
        batch = next(vectors(7))
        schedule, feed = step.schedule(*batch), step.inputs(*batch)
        assert [len(feed[name]) for name in ("batch.0", "rank1.batch.0")] == [4, 3]
        ranks = schedule.machine.ranks
        homes = {name: ranks[device] for name, device in schedule.program.inputs}
        assert all(rank == name.startswith(("r1.", "rank1.")) for name, rank in homes.items())
        first, second = (
            {name for name, device in schedule.program.outputs if ranks[device] == rank}
            for rank in (0, 1)
        )
        # Counters and moments of the first step are made on each rank.
        made = first - {"loss", "grad_norm"}
        assert len(made) == 3 * 4 == len(first) - 2
        assert second == {f"r1.{name}" for name in made} | {"rank1.loss", "rank1.grad_norm"}


def test_replicas_of_a_rank_divide_its_rows() -> None:
    machine = asc.Machine.emulated(gpus=2, hosts=2)
    devices = ("cuda:0", "cuda:2", "cuda:1", "cuda:3")  # of ranks 0, 1, 0, 1
    layout = Layout(machine, tuple((device,) for device in devices))
    assert layout.ranks == (0, 1)
    assert [layout.leads(replica, 0) for replica in range(4)] == [True, True, False, False]
    assert layout.other_leads(0, 0) == [1]
    assert layout.other_leads(0, 2) == [0, 1]
    model = small()
    make = data_parallel(machine=machine, devices=devices)
    with make(model, functional.cross_entropy, optim.Adam(model.parameters(), 0.01)) as step:
        feed = step.inputs(*next(vectors(10)))
        assert [len(feed[name]) for name in ("batch.0", "rank1.batch.0")] == [6, 4]
        assert [sum(share) for share in among(4)(10)] == [*equal_shares(6, 2), *equal_shares(4, 2)]
