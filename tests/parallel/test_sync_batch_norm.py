"""Batch norms that normalise by the statistics of all replicas, and buffers that replicas go on with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.parallel.micro_batch import level_of
from autosched.parallel.sync_batch_norm import combined_moments, moments
from tests.models import ResNet
from tests.serial import some

Rounds = Sequence[Sequence[int]]  # the rows that make one statistic, batch by batch


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 4),
        nn.BatchNorm1d(4, affine=False),
    )


class Volume(nn.Module):
    """A norm of each dimension, one of which keeps no statistics, and one that is called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3, momentum=0.3, eps=1e-3)
        self.flat, self.head = nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.batch_norm(x, None, None, training=True)
        return self.head(self.flat(self.norm(self.conv(x)).flatten(2)).mean(2))


class Watched(nn.Module):
    """Keeps statistics of what it does not learn from, deeper than its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.aside = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        result = self.norm(self.inner(x))
        self.aside(result.detach())
        return result


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "resnet": (lambda: ResNet((1, 1)), (3, 6, 6)),
    "volume": (Volume, (2, 3, 3, 3)),
    "watched": (Watched, (5,)),
}


def trained(model: nn.Module, devices: int, **options: object) -> asc.parallel.Step:
    machine = asc.Machine.emulated(gpus=devices)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"backend": "host", "batch_norm": "synchronised", "reduction": "sum", **options}
    return asc.parallel.data_parallel(
        model, functional.cross_entropy, optimizer, machine, **options
    )


def by_hand(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, rounds: Rounds
) -> Tensor:
    """Train by one step on one device, on some rows after others."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=x.dtype)
    for rows in rounds:
        loss = functional.cross_entropy(model(x[rows]), y[rows]) * (len(rows) / len(x))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def held_to_one_device(
    kind: str,
    devices: int,
    rows: int,
    rounds: Rounds = (),
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> float:
    """Train as synchronised and as by hand, and return the largest difference in what losses and models hold."""
    torch.manual_seed(rows)
    make, shape = KINDS[kind]
    model = make().to(dtype)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    worst = 0.0
    with trained(model, devices, **options) as step:
        for _ in range(3):
            x, y = torch.randn(rows, *shape, dtype=dtype) + 1, torch.randint(0, 4, (rows,))
            loss = step(x, y)
            expected = by_hand(plain, x, y, optimizer, rounds or [range(rows)])
            worst = max(worst, float((loss - expected).abs()))
        inputs = step.inputs(x, y)
    for (name, own), other in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        worst = max(worst, float((own - other).abs().max()))
        if name in dict(model.named_parameters()) and devices > 1:
            copies = [inputs[f"r{replica}.{name}"] for replica in range(devices)]
            assert all(torch.equal(replica, own) for replica in copies), name
    return worst


@pytest.mark.parametrize(
    ("kind", "rows", "devices"),
    some(
        [
            *(("mlp", 7, 1), ("mlp", 4, 2), ("mlp", 7, 3), ("mlp", 5, 4)),
            *(("resnet", 5, 3), ("resnet", 2, 4), ("volume", 4, 2), ("watched", 4, 2)),
        ],
        *(("mlp", 7, 3), ("resnet", 2, 4), ("volume", 4, 2), ("watched", 4, 2)),
    ),
)
def test_synchronised_replicas_equal_one_device_with_the_whole_batch(kind, rows, devices):
    assert held_to_one_device(kind, devices, rows) < 1e-10


@pytest.mark.parametrize("reduction", ["sum", "cpu", "ring"])
def test_however_gradients_are_summed(reduction):
    assert held_to_one_device("mlp", 3, 8, reduction=reduction, buckets=(0,)) < 1e-10


def test_each_round_of_micro_batches_has_its_own_statistics():
    assert held_to_one_device("mlp", 2, 7, [[0, 1, 4, 5], [2, 3, 6]], accumulate=2) < 1e-10


def test_replicas_without_rows_take_no_part():
    assert held_to_one_device("volume", 2, 3, [[0, 2], [1]], accumulate=2) < 1e-10


def test_replicas_statistics_are_their_own_unless_they_are_synchronised():
    assert held_to_one_device("mlp", 2, 8, batch_norm="replica") > 1e-3


def test_norms_in_evaluation_are_left_alone():
    model = mlp().eval()
    x, y = torch.randn(4, 5), torch.randint(0, 4, (4,))
    with trained(model, 2) as step:
        assert not [task.name for task in step.schedule(x, y).graph.tasks if "norms" in task.name]


def test_independent_norms_share_one_collective():
    x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))
    with trained(ResNet((1, 1)), 2) as step:
        tasks = [task.name for task in step.schedule(x, y).graph.tasks]
    assert (
        len([name for name in tasks if name.startswith("norms-") and name.count(".") == 0]) == 2 * 5
    )  # of 6 norms
    assert [name for name in tasks if ".pack." in name] == [
        f"norms-{level}.pack.cuda:{device}" for level in (4, 6) for device in (0, 1)
    ]


def test_nothing_of_backward_is_done_before_forward_has_ended():
    x, y = torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))
    with trained(ResNet((1, 1)), 2) as step:
        tasks = [
            task.name for task in step.schedule(x, y).graph.tasks if task.name.startswith("r0.")
        ]
    kinds = [name[3] for name in tasks if name[3:].partition("-")[0] in ("F", "B")]
    assert kinds == sorted(kinds, reverse=True)


def test_delayed_tasks_get_the_level_of_their_successor():
    graph = asc.Graph()
    x = graph.input("x")
    early = x + 1
    graph.add(moments, x, name="exchange")
    graph.add(torch.add, graph.value("exchange"), early, name="late")
    assert level_of(graph) == [0, 0, 1]
    assert level_of(graph, {0, 2}) == [1, 0, 1]


def test_a_single_value_per_channel_is_refused_as_torch_does():
    x, y = torch.randn(3, 5), torch.randint(0, 4, (3,))
    with (
        trained(mlp(), 2, accumulate=2) as step,
        pytest.raises(asc.CaptureError, match="more than 1 value per channel"),
    ):
        step(x, y)


def test_a_cumulative_average_is_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None))
    with (
        trained(model, 2) as step,
        pytest.raises(asc.CaptureError, match="batch norm '1' has momentum=None"),
    ):
        step(torch.randn(4, 5), torch.randint(0, 4, (4,)))


def test_another_word_for_batch_norm_is_refused():
    with pytest.raises(
        asc.ScheduleError, match="batch_norm must be 'replica' or 'synchronised', got 'sync'"
    ):
        trained(mlp(), 2, batch_norm="sync")


class Moody(nn.Module):
    """Normalises large batches twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(self.inner(x))
        return self.norm(once) if len(x) > 2 else once


def test_replicas_that_have_other_norms_are_refused():
    with (
        trained(Moody(), 2) as step,
        pytest.raises(asc.ScheduleError, match="others for 2 rows than for 3"),
    ):
        step(torch.randn(5, 5), torch.randint(0, 4, (5,)))


def test_the_model_is_left_as_it_is():
    model = mlp()
    before = list(model.state_dict()), [dict(vars(module)) for module in model.modules()]
    with trained(model, 2) as step:
        step.schedule(torch.randn(4, 5), torch.randint(0, 4, (4,)))
    assert (list(model.state_dict()), [dict(vars(module)) for module in model.modules()]) == before


def moments_of(x: Tensor) -> Tensor:
    mean = x.mean(0)
    return torch.stack([torch.full_like(mean, len(x)), mean, (x - mean).square().sum(0)])


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e3, -1e6]),
    st.integers(0, 99),
)
def test_moments_of_shares_are_those_of_the_whole(sizes, far, seed):
    x = (
        torch.randn(
            sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        + far
    )
    together = combined_moments([moments_of(share) for share in x.split(sizes)])
    torch.testing.assert_close(together, moments_of(x), rtol=1e-9, atol=1e-9)


# ---- buffers


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
    with trained(model, 2, batch_norm="replica") as step:
        for _ in range(4):
            x, y = torch.randn(rows, 5) + 2, torch.randint(0, 4, (rows,))
            loss = step(x, y)
            expected = by_hand(inner, x - centre, y, optimizer, [range(rows)])
            torch.testing.assert_close(loss, expected)
            centre = 0.9 * centre + 0.1 * x[:3].mean(0)  # of the first replica's share
        torch.testing.assert_close(model.centre, centre)
        torch.testing.assert_close(model.inner.weight, inner.weight)
        inputs, tasks = step.inputs(x, y), [task.name for task in step.schedule(x, y).graph.tasks]
    assert torch.equal(inputs["r1.centre"], model.centre)
    assert [name for name in tasks if "copy_" in name] == ["r1.centre.copy_"]


def test_buffers_of_norms_and_counters_are_not_broadcast():
    x, y = torch.randn(4, 5), torch.randint(0, 4, (4,))
    for batch_norm in ("replica", "synchronised"):
        with trained(mlp(), 2, batch_norm=batch_norm) as step:
            assert not [
                task.name for task in step.schedule(x, y).graph.tasks if "copy_" in task.name
            ]
