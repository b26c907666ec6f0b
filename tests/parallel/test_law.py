"""The law of training: on several devices bit for bit what the same micro-batches leave one after another.

A case is a system, a network, an optimizer, an option, what changes between steps, and the rows of
batches. The cases have each pair of these that can be; ``make test`` runs some of them, and ``make
soak`` all.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from tests.frontends.test_capture import OPTIMIZERS
from tests.models import KINDS
from tests.parallel import networks
from tests.serial import (
    Make,
    Rows,
    among,
    assert_trains_as_serially,
    data_parallel,
    model_parallel,
    pipeline,
)


def hosts(count: int, gpus: int = 0) -> Callable[..., Make]:
    machine = asc.Machine.emulated(gpus=gpus, hosts=count)
    return functools.partial(data_parallel, machine=machine)


class System(NamedTuple):
    """How a step is made, how many replicas there are, and how many micro-batches each has."""

    make: Callable[..., Make]
    replicas: int = 1
    chunks: int = 1
    stages: int = 1

    @property
    def is_data(self) -> bool:
        return self.stages == 1


def order(name: str, gpus: int = 2, chunks: int = 3, stages: int = 2, replicas: int = 1) -> System:
    how = {"schedule": name, "chunks": chunks, "replicas": replicas}
    return System(functools.partial(pipeline, gpus, **how), replicas, chunks, stages)


SYSTEMS = {
    "1 device": System(functools.partial(data_parallel, 1)),
    "2 devices": System(functools.partial(data_parallel, 2), 2),
    "3 devices": System(functools.partial(data_parallel, 3), 3),
    "2 hosts": System(hosts(2), 2),
    "3 hosts": System(hosts(3), 3),
    "2 hosts of 2 GPUs": System(hosts(2, 2), 4),
    "gpipe": order("gpipe"),
    "1f1b": order("1f1b", chunks=4),
    "auto": order("auto", chunks=2),
    "interleaved": order("interleaved", stages=4),
    "zb-v": order("zb-v", stages=4),
    "two pipelines": order("1f1b", 4, 2, replicas=2),
    "model parallel": System(model_parallel, stages=2),
}
NETWORKS = {**KINDS, **networks.NETWORKS}
HAVE_RANDOM = {"mlp", "recurrent", "transformer", "deep"}
FEW_BLOCKS = networks.NETWORKS.keys() - {"chain", "deep"}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "clip": {"clip_grad_norm": 0.05, "buckets": (100,)},
    "hook": {},
    "buckets": {"buckets": (100, 300)},
    "accumulate": {"accumulate": 2},
    "accumulate, clip": {"accumulate": 2, "clip_grad_norm": 0.05, "reduction": "cpu"},
    "cpu": {"reduction": "cpu"},
    "gather": {"reduction": "gather"},
}
CHANGES = ("", "rate", "schedule", "weights", "mode", "frozen", "loaded")
BATCHES = {"even": (24, 24, 24), "ragged": (25, 17, 17), "few": (24, 2, 1, 24)}


class Case(NamedTuple):
    system: str
    network: str
    optimizer: str
    option: str
    change: str
    rows: str

    def __str__(self) -> str:
        return ", ".join(filter(None, self))

    @property
    def is_possible(self) -> bool:
        """Whether there is such a case, and serial training can be compared."""
        system = SYSTEMS[self.system]
        if self.network in HAVE_RANDOM and (self.system == "interleaved" or "host" in self.system):
            return False  # another order, which is refused, and generators of each host
        if self.change == "frozen" and self.network == "tied":
            return False  # nothing is left to train
        if system.stages > 2 and self.network in FEW_BLOCKS:
            return False
        if self.rows == "few" and (self.network in networks.NORMED or system.replicas < 2):
            return False  # torch refuses to normalise one row
        if OPTIONS[self.option].get("accumulate") and not system.is_data:
            return False
        return self.option not in ("gather", "cpu", "buckets") or system.replicas > 1


FACTORS = (SYSTEMS, NETWORKS, OPTIMIZERS, OPTIONS, CHANGES, BATCHES)


def pairs(case: Case) -> set[Any]:
    return {*itertools.combinations(enumerate(case), 2)}


# Of three that meet: norms and dropout, and what batches leave in buffers.
NAMED = [
    *(Case(name, "deep", "adam", "", "", "ragged") for name in ("gpipe", "1f1b", "zb-v")),
    *(
        Case("2 devices", name, "adam", "accumulate", "", "even")
        for name in ("mlp", "counts", "means")
    ),
    *(
        Case(name, "dtypes", "momentum", "clip", "", "even")
        for name in ("1 device", "3 devices", "gpipe", "two pipelines")
    ),
]


@functools.cache
def cases() -> list[Case]:
    """Return cases that have all possible pairs, those of ``NAMED`` first; always the same."""
    source = random.Random(0)
    names = [[*factor] for factor in FACTORS]
    wanted = {
        ((i, a), (j, b)): None
        for (i, one), (j, other) in itertools.combinations(enumerate(names), 2)
        for a, b in itertools.product(one, other)
    }
    found = [*NAMED]
    for pair in set().union(*map(pairs, NAMED)):
        wanted.pop(pair, None)
    while wanted:
        (i, a), (j, b) = next(iter(wanted))
        tried = []
        for _ in range(200):
            drawn = [source.choice(factor) for factor in names]
            drawn[i], drawn[j] = a, b
            if (case := Case(*drawn)).is_possible:
                tried.append(case)
            if len(tried) == 12:
                break
        if not tried:
            del wanted[(i, a), (j, b)]  # impossible
            continue
        best = max(tried, key=lambda case: len(pairs(case) & wanted.keys()))
        found.append(best)
        for pair in pairs(best) & wanted.keys():
            del wanted[pair]
    return found


def batches(name: str, counts: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield batches of so many rows."""
    torch.manual_seed(0)
    for count in counts:
        parts: list[tuple[Any, ...]] = []
        while sum(len(part[-1]) for part in parts) < count:
            parts.append(NETWORKS[name][1]())
        yield tuple(torch.cat(items)[:count] for items in zip(*parts, strict=True))


def between(change: str) -> Callable[[nn.Module, optim.Optimizer], None]:
    """Return what changes a model and its optimizer between steps."""

    schedules: dict[optim.Optimizer, Any] = {}

    def do(model: nn.Module, optimizer: optim.Optimizer) -> None:
        first = next(model.parameters())
        if change == "rate":
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        if change == "schedule":
            if optimizer not in schedules:
                schedules[optimizer] = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            schedules[optimizer].step()
        if change == "weights":
            with torch.no_grad():
                first.mul_(0.5)
        if change == "mode":
            model.train(not model.training)
        if change == "frozen":
            first.requires_grad_(not first.requires_grad)
        if change == "loaded":
            model.load_state_dict({n: item.clone() for n, item in model.state_dict().items()})
            optimizer.load_state_dict(optimizer.state_dict())

    return do


def clip(model: nn.Module) -> object:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


QUICK = 40


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if number >= QUICK else [])
        for number, case in enumerate(cases())
    ],
)
def test_training_on_several_devices_equals_serial_training(case: Case) -> None:
    system, options = SYSTEMS[case.system], dict(OPTIONS[case.option])
    if system.make is model_parallel:
        options.pop("buckets", None)  # of which it has none
    torch.manual_seed(0)
    model = NETWORKS[case.network][0]()
    chunks = system.chunks * options.get("accumulate", 1)

    def rows(count: int) -> Rows:
        found = among(system.replicas, chunks)(count)
        return [*found, *[()] * (system.replicas - len(found))]

    optimize = OPTIMIZERS[case.optimizer]
    if case.option == "hook":
        optimize = networks.hooked(optimize, networks.clip_values)
    assert_trains_as_serially(
        system.make(**options),
        rows,
        model,
        batches(case.network, BATCHES[case.rows]),
        optimize,
        loss_of,
        between(case.change),
        before_step=clip if "clip_grad_norm" in options else lambda _: None,
    )


def loss_of(out: Any, y: Tensor) -> Tensor:
    """Return a loss that suits the target."""
    if isinstance(out, tuple):
        return functional.cross_entropy(out[0], y) + out[1]["first"].square().mean()
    if y.is_floating_point():
        return functional.mse_loss(out, y)
    return functional.cross_entropy(out.flatten(0, -2), y.flatten())
