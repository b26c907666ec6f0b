"""Other compilers than Inductor: what they are given, and that their faults are found."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autosched as asc

MACHINE = asc.Machine.emulated(gpus=1)


def itself(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
    """Compile nothing."""
    return graph


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


X = torch.linspace(-1, 1, 24).view(3, 8)


class Noting:
    """A compiler that notes what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.fx.GraphModule, list[Tensor]]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        self.given.append((graph, examples))
        return graph.forward


def test_it_is_given_each_region_with_examples() -> None:
    compiler, net = Noting(), model()
    run = asc.compile(lambda x: net(x), MACHINE, backend="host", fuse=compiler)
    with torch.no_grad():
        assert torch.equal(run(X), net(X))
    ((graph, examples),) = compiler.given
    assert {type(item) for item in examples} == {Tensor}
    assert any(node.target is torch.ops.aten.addmm.default for node in graph.graph.nodes)
    run(X + 1)
    assert len(compiler.given) == 1


def test_it_needs_no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosched.fusion.fusing.unavailable", lambda kind: "there is none")
    monkeypatch.setattr("autosched.fusion.region.unavailable", lambda kind: "there is none")
    fused = asc.fuse(asc.capture(model(), X), MACHINE, compiler=itself)
    assert len(fused.tasks) == 1
    schedule = asc.schedule(fused, MACHINE, backend="host")
    with torch.no_grad():
        assert torch.equal(schedule(**fused.feed(X))["result"], model()(X))
    assert fused.tasks[0].fn.failure is None
    assert "# compiled by itself" in schedule.code
    assert pickle.loads(pickle.dumps(fused.tasks[0].fn)).compiler is itself


def doubling(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
    return lambda *args: [2 * made for made in graph(*args)]


def forgetting(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
    """Write nothing into arguments."""
    return lambda *args: graph(*copy.deepcopy(args))


def raising(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
    raise NotImplementedError("no such operator")


def failing(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
    def run(*args: Tensor) -> Any:
        raise NotImplementedError("no such kernel")

    return run


FAULTS: dict[Any, str | None] = {
    itself: None,
    doubling: "compiled kernels differ from the operators",
    forgetting: "compiled kernels differ from the operators",
    raising: "raising: NotImplementedError: no such operator",
    failing: "its kernels fail: NotImplementedError: no such kernel",
    lambda graph, examples: 3: "it must return a function, and returned 3",
    lambda graph, examples: lambda *args: [*graph(*args), 1]: "results in place of",
    lambda graph, examples: lambda *args: [m.double() for m in graph(*args)]: "kernels differ",
    lambda graph, examples: lambda *args: [m[None] for m in graph(*args)]: "kernels fail",
    lambda graph, examples: lambda *args: [None for _ in graph(*args)]: "its kernels fail",
}


@pytest.mark.filterwarnings("ignore:compiled kernels differ")
@pytest.mark.parametrize("compiler", FAULTS)
def test_results_and_what_is_written_are_those_of_the_operators_and_faults_are_found(
    compiler: Any,
) -> None:
    graph = asc.Graph()
    x, w = graph.inputs("x", "w")
    w.mul_(0.5).add_(x)
    graph.output(y=(w + 1).relu() * 2)
    fused = asc.fuse(graph, MACHINE, compiler=compiler)
    given, twins = ({"x": torch.ones(3), "w": torch.arange(3.0)} for _ in range(2))
    for _ in range(4):
        assert torch.equal(fused.run_serial(**given)["y"], graph.run_serial(**twins)["y"])
        assert torch.equal(given["w"], twins["w"])
    (region,) = (task.fn for task in fused.tasks)
    said = FAULTS[compiler]
    assert region.failure is None if said is None else said in region.failure


def test_parallel_steps_and_torch_compile_take_it() -> None:
    net, compiler = model(), Noting()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trained = net, functional.mse_loss, optimizer, asc.Machine.emulated(gpus=2)
    with asc.parallel.data_parallel(*trained, backend="host", fuse=compiler) as step:
        step(X, torch.ones(3, 4))
    assert compiler.given
    compiler = Noting()
    options = {"machine": MACHINE, "backend": "host", "fuse": compiler}
    run = torch.compile(net, backend="autosched", options=options)
    with torch.no_grad():
        assert torch.equal(run(X), net(X))
    assert compiler.given
