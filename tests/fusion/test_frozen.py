"""Weights as constants of compiled regions: until they change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from autosched.fusion import inductor
from tests.fusion.regions import needs_compiler


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()]
    return nn.Sequential(*layers).eval()


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Play Inductor by the operators, with copies of constants; note how many there are."""
    made: list[list[int]] = []

    def compiled(graph: Any, args: Any, threads: int, constants: Any = ()) -> Any:
        made.append(list(constants))
        held = {i: args[i].clone() for i in constants}

        def run(*given: Tensor) -> Any:
            others = iter(given)
            return graph(*(held[i] if i in held else next(others) for i in range(len(args))))

        return run

    monkeypatch.setattr(inductor, "compile_graph", compiled)
    return made


@torch.no_grad()
def test_weights_are_constants_and_the_batch_is_not(played: list[list[int]]) -> None:
    model = network()
    with asc.compile(model, asc.Machine.emulated(gpus=0), fuse=asc.Frozen(model)) as run:
        for factor in 1, 2:
            torch.testing.assert_close(run(X * factor), model(X * factor))
    assert [len(constants) for constants in played] == [8]  # two convolutions, and a batch norm


@pytest.mark.parametrize("change", ["in place", "loaded", "by an optimizer", "moved"])
def test_a_change_is_noticed(played: list[list[int]], change: str) -> None:
    model = network()
    with asc.compile(model, asc.Machine.emulated(gpus=0), fuse=asc.Frozen(model)) as run:
        for _ in range(20):  # the later ones are not compared
            with torch.no_grad():
                torch.testing.assert_close(run(X), model(X))
        assert len(played[0]) == 8
        if change == "in place":
            with torch.no_grad():
                model[3].bias += 1
        elif change == "loaded":
            model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        elif change == "by an optimizer":
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(X).sum().backward()
            optimizer.step()
        else:
            for weight in model.parameters():
                weight.data = weight.data * 2
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(3):
                torch.testing.assert_close(run(X), model(X))
        texts = [
            str(each.message) for each in caught if "weights have changed" in str(each.message)
        ]
        assert len(texts) == (change != "moved")  # at other addresses, they are constants again


@torch.no_grad()
def test_layers_that_share_one_compiled_function_have_constants_of_their_own(
    played: list[list[int]],
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).eval() for _ in range(2)]
    graph = asc.Graph()
    value = graph.input("x")
    for i, layer in enumerate(layers):
        with graph.on(f"cuda:{i}"):
            weight, bias = graph.constant(layer.weight), graph.constant(layer.bias)
            value = torch.relu(torch.nn.functional.linear(value, weight, bias))
    graph.output(y=value)
    machine = asc.Machine.emulated(gpus=2)
    fused = asc.fuse(graph, machine, compiler=asc.Frozen(*layers))
    x = torch.randn(2, 4)
    for _ in range(3):
        expected = graph.run_serial(x=x)["y"]
        torch.testing.assert_close(fused.run_serial(x=x)["y"], expected)


def test_modules_in_training_mode_are_refused() -> None:
    with pytest.raises(
        asc.ScheduleError, match=r"modules in evaluation mode, as of model.eval\(\)"
    ):
        asc.Frozen(nn.Linear(2, 2))
    with pytest.raises(asc.ScheduleError, match="got 'all'"):
        asc.Frozen("all")


@torch.no_grad()
def test_a_step_that_writes_buffers_does_not_make_constants_of_them(
    played: list[list[int]],
) -> None:
    model = network()
    norm = model[1]

    def step(x: Tensor) -> Tensor:
        norm.running_mean.mul_(0.5)
        return model(x) + norm.running_mean.sum()

    with asc.compile(step, asc.Machine.emulated(gpus=0), fuse=asc.Frozen(model)) as run:
        for _ in range(4):
            before = norm.running_mean.clone()
            expected = step(X)
            norm.running_mean.copy_(before)
            torch.testing.assert_close(run(X), expected)


@needs_compiler
@pytest.mark.slow
@torch.no_grad()
def test_inductor_compiles_with_constants() -> None:
    model = network()[:3].eval()
    machine = asc.Machine.emulated(gpus=0)  # regions are taken whatever they are measured to take
    with asc.compile(model, machine, fuse=asc.Frozen(model)) as run:
        for _ in range(4):
            torch.testing.assert_close(run(X), model(X), atol=1e-4, rtol=1e-4)
        model[0].weight.mul_(3)
        with pytest.warns(RuntimeWarning, match="weights have changed"):
            torch.testing.assert_close(run(X), model(X), atol=1e-4, rtol=1e-4)
