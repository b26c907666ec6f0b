"""Steps in which sizes depend on data: they equal serial ones, and users are told that costs are guessed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import autosched as asc
from autosched.parallel.training import Training
from autosched.parallel.updates import Bucket
from tests.frontends.test_capture import OPTIMIZERS
from tests.serial import (
    among,
    assert_trains_as_serially,
    data_parallel,
    model_parallel,
    pipeline,
    small,
    some,
    vectors,
)


class Selecting(nn.Module):
    """Of a layer's results, those above 0 count more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = torch.tanh(self.b(y + y.masked_select(y > 0).mean()))
        return self.head(y + y.masked_select(y > 0).mean())


TWO_HOSTS = asc.Machine.emulated(gpus=0, hosts=2)
SYSTEMS: dict[str, Any] = {  # with replicas, and micro-batches
    "data parallel": (data_parallel(), 2, 1),
    "accumulated": (data_parallel(accumulate=2), 2, 2),
    "two hosts": (data_parallel(machine=TWO_HOSTS), 2, 1),
    "model parallel": (model_parallel(), 1, 1),
    "1f1b": (pipeline(chunks=3, schedule="1f1b"), 1, 3),
    "zb-h1": (pipeline(chunks=3, schedule="zb-h1"), 1, 3),
    "1f1b on two hosts": (pipeline(chunks=3, schedule="1f1b", machine=TWO_HOSTS), 1, 3),
}


@pytest.mark.filterwarnings("ignore:no estimate")
@pytest.mark.parametrize("name", some(SYSTEMS, "data parallel", "two hosts", "1f1b"))
def test_sizes_may_depend_on_data(name: str) -> None:
    make, replicas, chunks = SYSTEMS[name]
    assert_trains_as_serially(make, among(replicas, chunks), Selecting(), vectors(12, 9))


@pytest.mark.parametrize("make", [data_parallel(), pipeline(chunks="auto"), model_parallel()])
def test_what_is_guessed_is_told_once_at_the_users_line(make: Any) -> None:
    model = Selecting()
    step = make(model, functional.cross_entropy, optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in vectors(12, 12):
            step(*batch)
    (warning,) = (one for one in told if "no estimate" in str(one.message))
    assert "'masked_select'" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("name", some(OPTIMIZERS, "adam"))
def test_the_costs_of_all_updates_are_known(name: str) -> None:
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # whose numbers change from now on
    trained = model, functional.cross_entropy, optimizer
    training = Training.of("step", trained, asc.Machine.emulated(gpus=2), None, {})
    bucket = Bucket(0, dict(model.named_parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.updates([bucket], flat=True)
