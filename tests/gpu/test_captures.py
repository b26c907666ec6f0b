"""Captured steps on played GPUs: all that they leave is what eager steps leave, and where they leave it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc
from autosched.frontends import capture
from tests.frontends.test_capture import OPTIMIZERS, assert_same, held
from tests.gpu.fake_gpu import playing
from tests.serial import some

X, Y = torch.randn(3, 4), torch.randn(3, 2)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Play a GPU, and let captures overlook the mode that plays it."""
    monkeypatch.setattr(capture, "check_modes", lambda: None)
    with playing(kind=request.node.callspec.params.get("kind", "cuda")):
        yield


class Net(nn.Module):
    """Has buffers that change in place, and an attribute that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.last = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        self.last = found.detach().mean(0)
        return found


def trained(
    make: Callable[..., Any],
    keeps: bool,
    device: str = "cpu",
    of_model: Callable[[Any], Any] = lambda model: model,
) -> tuple[Any, Any, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Net().to(device)
    run = of_model(model)
    optimizer = make(model.parameters())

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        if keeps:
            optimizer.zero_grad()
        out = run(x)
        loss = functional.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        if not keeps:
            optimizer.zero_grad()
        return {"loss": loss.detach(), "out": [out.detach()]}

    return model, optimizer, step


PLAYABLE = [name for name in OPTIMIZERS if "fused" not in name]  # a GPU is played by CPU kernels


@pytest.mark.parametrize(("keeps", "outputs"), [(False, None), (True, "cuda:0")])
@pytest.mark.parametrize("name", some(PLAYABLE, "adam"))
def test_all_is_where_eager_steps_leave_it(name: str, keeps: bool, outputs: str | None) -> None:
    *eager, plain = trained(OPTIMIZERS[name], keeps)
    *twin, step = trained(OPTIMIZERS[name], keeps)
    options: dict[str, Any] = {"place": {"*": "cuda:0"}, "outputs": outputs}
    with asc.compile(step, asc.Machine.local(), **options) as run:
        for number in range(3):
            wanted, found = plain(X, Y), run(X, Y)
            assert found["loss"].device == found["out"][0].device == torch.device(outputs or "cpu")
            assert torch.equal(found["loss"].cpu(), wanted["loss"])
            state = held(*twin)
            assert all(
                item.device.type == "cpu" for item in state.values() if torch.is_tensor(item)
            )
            assert_same(state, held(*eager), number)
            assert torch.equal(twin[0].last, eager[0].last)


def captured(step: Callable[..., Any]) -> Callable[..., Any]:
    """Capture each call anew, and schedule its graph."""

    def run(*batch: Tensor) -> Any:
        graph = asc.capture(step, *batch)
        with asc.schedule(graph, asc.Machine.local()) as schedule:
            return graph.finish(schedule(**graph.feed(*batch)))

    return run


# What is done to a model, and to a step of it
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "compiled step": (lambda model: model, lambda step: asc.compile(step, asc.Machine.local())),
    "captured step": (lambda model: model, captured),
    "compiled model": (lambda model: asc.compile(model, asc.Machine.local()), lambda step: step),
    "torch.compile": (lambda model: torch.compile(model, backend="autosched"), lambda step: step),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    some(itertools.product(("cuda", "xpu"), PLAYABLE), ("cuda", "momentum"), ("xpu", "adam")),
)
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_a_model_on_a_gpu_are_eager_ones(kind: str, name: str, way: str) -> None:
    of_model, of_step = WAYS[way]
    device = f"{kind}:0"
    eager, other, plain = trained(OPTIMIZERS[name], True, device)
    model, optimizer, step = trained(OPTIMIZERS[name], True, device, of_model)
    run = of_step(step)
    x, y = X.to(device), Y.to(device)
    for number in range(3):
        wanted, found = plain(x, y), run(x, y)
        assert torch.equal(found["loss"], wanted["loss"])
        assert_same(held(model, optimizer), held(eager, other), number)
        assert torch.equal(model.last, eager.last)
        for one, two in zip(model.parameters(), eager.parameters(), strict=True):
            assert one.device == torch.device(device)
            assert one.grad is not None
            assert torch.equal(one.grad, two.grad)
    getattr(run, "close", bool)()
