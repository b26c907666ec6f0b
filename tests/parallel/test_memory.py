"""Steps whose memory is limited: operators are repeated, and the results are those of the serial run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosched as asc
from autosched.errors import MemoryLimitError
from autosched.frontends import capture
from autosched.simulated_gpus import playing
from tests.recomputation.test_training import Block
from tests.serial import (
    Make,
    among,
    assert_trains_as_serially,
    data_parallel,
    model_parallel,
    momentum,
    pipeline,
    some,
)

GPUS = asc.Machine.emulated(gpus=2, bytes_per_second=1e8).slower(1000)
Job = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]


def perceptron() -> Job:
    """Layers with dropout whose activations take most of the memory."""
    torch.manual_seed(0)
    hidden = [(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    model = nn.Sequential(*sum(hidden, ()), nn.Linear(16, 10))
    return model, (torch.rand(256, 16), torch.randint(10, (256,)))


def transformer() -> Job:
    torch.manual_seed(0)
    blocks = [Block(16) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(20, 16), *blocks, nn.Flatten(1), nn.Linear(512, 10))
    return model, (torch.randint(20, (16, 32)), torch.randint(10, (16,)))


SYSTEMS: dict[str, tuple[Callable[..., Make], int, int]] = {  # replicas, and their micro-batches
    "data parallel": (data_parallel, 2, 1),
    "accumulated": (functools.partial(data_parallel, accumulate=2), 2, 2),
    "model parallel": (model_parallel, 1, 1),
    "1f1b": (functools.partial(pipeline, chunks=4, schedule="1f1b"), 1, 4),
    "zb-h1": (functools.partial(pipeline, chunks=4, schedule="zb-h1"), 1, 4),
    "interleaved": (functools.partial(pipeline, chunks=2, schedule="interleaved"), 1, 2),
    "auto": (functools.partial(pipeline, chunks=2, schedule="auto"), 1, 2),
}


def schedule_of(make: Callable[..., Make], job: Callable[[], Job], limit: float) -> asc.Schedule:
    model, batch = job()
    machine = GPUS.limited(limit)
    trained = model, functional.cross_entropy, momentum(model.parameters())
    return make(machine=machine)(*trained).schedule(*batch)


def peak(schedule: asc.Schedule) -> float:
    return max(schedule.peak_bytes[name] for name in GPUS.accelerators)


@pytest.mark.parametrize(
    ("name", "job"),
    some(
        [(name, job) for name in SYSTEMS for job in (perceptron, transformer)],
        ("1f1b", perceptron),
        ("zb-h1", perceptron),
        ("data parallel", perceptron),
    ),
)
def test_within_their_limits_steps_equal_the_serial_run(name: str, job: Any) -> None:
    make, replicas, chunks = SYSTEMS[name]
    free = schedule_of(make, job, 1e12)
    seconds = []
    assert not free.recomputed
    for part in (0.8, 0.5):
        limit = part * peak(free)
        made = schedule_of(make, job, limit)
        assert peak(made) <= limit
        assert len(made.graph) > len(free.graph)  # operators are tasks
        seconds.append(made.makespan)
        model, batch = job()
        limited = make(machine=GPUS.limited(limit))
        assert_trains_as_serially(limited, among(replicas, chunks), model, [batch])
    assert sorted(seconds) == seconds


HOSTS = asc.Machine.emulated(gpus=1, hosts=2, bytes_per_second=1e8).slower(1000)


@pytest.mark.parametrize("name", some(["data parallel", "1f1b"], "data parallel"))
def test_limits_hold_on_each_of_several_hosts(name: str) -> None:
    make, replicas, chunks = SYSTEMS[name]
    torch.manual_seed(0)
    hidden = [(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]  # hosts draw numbers of their own
    model, batch = nn.Sequential(*sum(hidden, ())), (torch.rand(256, 16), torch.arange(256) % 16)
    trained = model, functional.cross_entropy, momentum(model.parameters())
    free = make(machine=HOSTS)(*trained).schedule(*batch)
    limit = 0.7 * max(free.peak_bytes[name] for name in HOSTS.accelerators)
    limited = make(machine=HOSTS.limited(limit))
    made = limited(*trained).schedule(*batch)
    assert len(made.graph) > len(free.graph)  # operators are tasks
    assert all(made.peak_bytes[name] <= limit for name in HOSTS.accelerators)
    assert_trains_as_serially(limited, among(replicas, chunks), model, [batch] * 2)


def test_what_fits_nowhere_is_told_a_limit_that_suffices() -> None:
    make, _, _ = SYSTEMS["1f1b"]
    most = peak(schedule_of(make, perceptron, 1e12))
    assert schedule_of(make, perceptron, 0.5 * most).recomputed
    with pytest.raises(MemoryLimitError, match=r"A plan exists with [\d,]+ B on cuda:0"):
        schedule_of(make, perceptron, 0.15 * most)


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_played_gpus_take_no_more_than_is_predicted(monkeypatch: Any, drop: float) -> None:
    monkeypatch.setattr(capture, "check_modes", lambda: None)
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(drop)) for _ in range(4)]
    model, batch = nn.Sequential(*sum(layers, ())), (torch.rand(256, 16), torch.arange(256) % 16)
    how: dict[str, Any] = {"schedule": "1f1b", "chunks": 4}
    with playing(gpus=2):
        machine = asc.Machine.local(gpus=2).limited(limit := 24_000.0)
        trained = model, functional.cross_entropy, momentum(model.parameters()), machine
        with asc.parallel.pipeline(*trained, **how) as step:
            for _ in range(2):  # both are planned: the optimizer makes its state in the first
                step(*batch)
            for gpu in range(2):
                torch.cuda.synchronize(gpu)
                torch.cuda.reset_peak_memory_stats(gpu)
            step(*batch)
            for gpu in range(2):
                torch.cuda.synchronize(gpu)
            taken = [torch.cuda.max_memory_allocated(gpu) for gpu in range(2)]
            made = step.schedule(*batch)
    assert peak(made) <= limit
    sizes = {value.name: made.costs.value_nbytes(value) for value in made.graph.values}
    blocks = {name: -(-nbytes // 512) * 512 for name, nbytes in sizes.items()}
    costs = made.costs.override(nbytes=blocks)
    rounded = dataclasses.replace(made, problem=dataclasses.replace(made.problem, costs=costs))
    scratch = 4096  # of running tasks, which is not counted
    for gpu in range(2):
        assert 0 < taken[gpu] <= rounded.peak_bytes[f"cuda:{gpu}"] + scratch
