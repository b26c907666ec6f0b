"""Training on several played GPUs is what the same micro-batches leave one after another, wherever the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autosched as asc
from autosched.frontends import capture
from autosched.simulated_gpus import playing
from tests.frontends.test_capture import OPTIMIZERS
from tests.parallel.test_law import NETWORKS, batches, between, loss_of
from tests.serial import Rows, among, assert_trains_as_serially, some

KINDS: dict[str, tuple[Callable[..., Any], int, int]] = {  # with replicas and micro-batches
    "data": (asc.parallel.data_parallel, 2, 1),
    "1f1b": (asc.parallel.pipeline, 1, 2),
    "model": (
        lambda model, loss_fn, optimizer, machine, **options: asc.parallel.model_parallel(
            model, machine, loss_fn=loss_fn, optimizer=optimizer, **options
        ),
        1,
        1,
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {"data": {}, "1f1b": {"schedule": "1f1b", "chunks": 2}}
# Devices draw other numbers than the CPU; ``Module.to`` leaves tensors that are attributes where they are.
UNLIKE = "deep", "mlp", "recurrent", "transformer", "centred", "means"
CASES = [
    (kind, network, home)
    for kind in KINDS
    for network in NETWORKS.keys() - {*UNLIKE}
    for home in ("cpu", "cuda:0", "xpu:0")
]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Play two GPUs, and let captures overlook the mode that plays them."""
    monkeypatch.setattr(capture, "check_modes", lambda: None)
    home = torch.device(request.node.callspec.params["home"])
    with playing(gpus=2, kind="cuda" if home.type == "cpu" else home.type):
        yield


def place(item: Any, device: str) -> Any:
    if isinstance(item, (tuple, list)):
        return type(item)(place(each, device) for each in item)
    return item.to(device) if isinstance(item, torch.Tensor) else item


@pytest.mark.parametrize(
    ("kind", "network", "home"),
    some(
        sorted(CASES),
        ("data", "in place", "xpu:0"),
        ("1f1b", "shared", "cuda:0"),
        ("model", "counts", "cpu"),
    ),
)
def test_training_equals_serial_training(kind: str, network: str, home: str) -> None:
    torch.manual_seed(0)
    make, replicas, chunks = KINDS[kind]
    model = NETWORKS[network][0]().to(home)

    def step_of(model: nn.Module, loss_fn: Any, optimizer: Any) -> Any:
        return make(model, loss_fn, optimizer, asc.Machine.local(), **OPTIONS.get(kind, {}))

    def rows(count: int) -> Rows:
        found = among(replicas, chunks)(count)
        return [*found, *[()] * (replicas - len(found))]

    assert_trains_as_serially(
        step_of,
        rows,
        model,
        [place(batch, home) for batch in batches(network, (24, 24, 24))],
        OPTIMIZERS["adam"],
        loss_of,
        between("weights"),
    )
