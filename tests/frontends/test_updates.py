"""What the updates of captured steps are for, and that what belongs to one parameter is updated in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import optimizer as of_optimizers
from torch.utils._python_dispatch import TorchDispatchMode

import autosched as asc
from autosched.frontends.captured import Captured
from autosched.policies import POLICIES
from autosched.testing import scattered
from tests.frontends.steps import assert_trains_as_eager
from tests.frontends.test_capture import OPTIMIZERS, stepper
from tests.models import KINDS
from tests.serial import some

MACHINE = asc.Machine.emulated(gpus=3)
COSTS = asc.Costs(default_seconds=1e-4, default_nbytes=100)


def captured(kind: str, optimizer: str, warm: bool) -> Captured:
    """Capture a step; ``warm``, with the moments of one before."""
    torch.manual_seed(0)
    model = KINDS[kind].make()
    step = stepper(model, OPTIMIZERS[optimizer](model.parameters()))
    if warm:
        step(*KINDS[kind].batch())
    return asc.capture(step, *KINDS[kind].batch())


def state_of(graph: Captured, parameter: str) -> tuple[set[int], set[int]]:
    """Return a parameter and its moments, by index; and its count of steps."""
    names = {name: graph.value(name).index for name in graph.input_names}
    names |= {name: graph.outputs[name] for name in graph.made}
    own = {
        name: index for name, index in names.items() if name.startswith(f"optimizer.{parameter}.")
    }
    moments = {index for name, index in own.items() if not name.endswith(".step")}
    return moments | {names[parameter]}, set(own.values()) - moments


def writers(graph: Captured, values: set[int]) -> list[asc.Task]:
    return [
        task
        for task in graph.tasks
        if {use.value for use in (*task.changes, *task.outputs)} & values
    ]


@pytest.mark.parametrize(
    "kind",
    some(
        [kind for kind in KINDS if kind not in ("wired1", "wired2", "wired3", "wired4")],
        "mlp",
        "lenet",
    ),
)
@pytest.mark.parametrize(
    "optimizer",
    some(["momentum", "adam", "adamw, foreach", "adamw, fused"], "adam", "adamw, foreach"),
)
def test_a_parameter_and_its_moments_are_written_on_one_device_under_every_policy(
    kind: str, optimizer: str
) -> None:
    graph = captured(kind, optimizer, warm=kind in ("mlp", "resnet", "wired0"))
    pinned = graph.snapshot()
    for policy in [*POLICIES.values(), scattered(0), scattered(1)]:
        device = policy(asc.Problem(pinned, MACHINE, COSTS)).device
        for parameter in graph.state.parameters:
            values, counts = state_of(graph, parameter)
            where = {device[task.name] for task in writers(graph, values)}
            assert len(where) == (len(values) > 1), (
                parameter
            )  # one that gets no gradient has no moments
            if "fused" not in optimizer:
                assert {device[task.name] for task in writers(graph, counts)} <= {"cpu"}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "rmsprop", "adagrad"])
def test_a_gradient_is_made_where_its_parameter_is_updated(optimizer: str) -> None:
    graph = captured("mlp", optimizer, warm=False)
    device = scattered(3)(asc.Problem(graph, MACHINE, COSTS)).device
    makers = {"0.backward.mm", "0.backward.sum", "4.backward.mm_1", "4.backward.sum"}
    found = {task.name: task for task in graph.tasks if task.name in makers}
    assert found.keys() == makers
    for name, task in found.items():
        parameter = f"{task.origin.module}.{'bias' if 'sum' in name else 'weight'}"
        (where,) = {device[writer.name] for writer in writers(graph, state_of(graph, parameter)[0])}
        assert device[name] == where


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, "adam", "momentum"))
@pytest.mark.parametrize("warm", [False, True])
def test_patterns_for_modules_place_forward_backward_and_update(optimizer: str, warm: bool) -> None:
    graph = captured("lenet", optimizer, warm)
    place = {"[0-6].*": "cuda:0", "[0-6]": "cuda:0", "[789]": "cuda:1"}
    found = asc.schedule(
        graph, MACHINE, policy="round_robin", place=place, costs=COSTS
    ).placement.device
    own = {"cuda:0": "0123456", "cuda:1": "789"}
    seen = set()
    for task in graph.tasks:
        if task.origin.module and task.device is None and not task.view:
            seen.add((task.origin.module, task.origin.phase))
            assert task.origin.module in own[found[task.name]], task.name
    phases = ["forward", "backward"] + ["optimizer"] * (
        "fused" not in optimizer and "foreach" not in optimizer
    )
    assert {(module, phase) for module in "0379" for phase in phases} <= seen


# ---- kernels for many parameters


class Kernels(TorchDispatchMode):
    """Notes the kernels for many parameters that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::_foreach"):
            self.names.add(str(func))
        return func(*args, **kwargs or {})


# Of torch's optimizers, those that read elements of tensors, need closures or sparse gradients.
REFUSED = ("ASGD", "Adafactor", "LBFGS", "Optimizer", "RAdam", "SparseAdam")
CAPTURED = sorted(
    name for name in optim.__all__ if isinstance(getattr(optim, name), type) and name not in REFUSED
)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "tensor": {"lr": torch.tensor(0.01)},
    "not": {"foreach": False},
    "maximize": {"maximize": True},
}


@pytest.mark.parametrize("options", some(OPTIONS, "default", "tensor"))
@pytest.mark.parametrize("name", some(CAPTURED, "SGD", "AdamW", "Muon"))
def test_kernels_are_those_of_eager_optimizers(
    name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators torch has kernels for many parameters, which it uses for its own classes of tensors."""
    monkeypatch.setattr(of_optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    given = {"lr": 0.01} | OPTIONS[options]
    if name == "Muon":
        given = {"lr": 0.01}
    x, y = torch.randn(2, 3, 4)

    def trained() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        derived = type("Derived", (getattr(optim, name),), {})
        return model, stepper(model, derived(model.parameters(), **given))

    model, step = trained()
    with Kernels() as kernels:
        for _ in range(2):
            step(x, y)
    assert bool(kernels.names) == (name != "Muon" and options != "not") - (
        options == "tensor" and name in ("Adam", "AdamW")
    )
    twin, step = trained()
    found = set()
    with asc.compile(step, MACHINE, backend="host") as run:
        for _ in range(2):
            found |= {str(task.fn) for task in run.schedule(x, y).graph.tasks}
            run(x, y)
    assert {fn for fn in found if fn.startswith("aten._foreach")} == kernels.names
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, "adam", "adamw, foreach"))
def test_updates_may_be_on_the_host_while_backward_is_on_a_gpu(optimizer: str, tmp_path) -> None:
    """A gradient is with its parameter, except where place= puts the update elsewhere."""
    torch.manual_seed(0)
    model = KINDS["mlp"].make().eval()
    twin = copy.deepcopy(model)
    eager, step = (stepper(m, OPTIMIZERS[optimizer](m.parameters())) for m in (model, twin))
    place = {"*optimizer*": "cpu", "*": "cuda:0"}
    batch = KINDS["mlp"].batch()
    with asc.compile(step, MACHINE, place=place, backend="virtual") as run:
        for _ in range(3):
            assert torch.equal(eager(*batch), run(*batch))
        schedule = run.schedule(*batch)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    devices = {task.origin.phase: set[str]() for task in schedule.graph.tasks}
    for task in schedule.graph.tasks:
        if not task.view:
            devices[task.origin.phase].add(schedule.placement.device[task.name])
    assert devices["optimizer"] == {"cpu"}
    assert devices["backward"] == {"cuda:0"}
    schedule.save(tmp_path / "schedule.json")
    loaded = asc.load(tmp_path / "schedule.json", asc.capture(step, *batch))
    assert loaded.program == schedule.program


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.Adafactor])
def test_optimizers_that_read_elements_step_after_the_compiled_function(kind: Any) -> None:
    """That is the advice of the error with which they are refused within."""

    def make() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        return model, kind(model.parameters())

    def backward(model: nn.Module, optimizer: Any) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    def then(optimizer: Any, _: Tensor) -> None:
        optimizer.step()

    assert_trains_as_eager(make, [torch.ones(2, 4)] * 4, backward, then, machine=MACHINE)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="fake tensors compare an exponent with 1")
def test_betas_that_are_tensors_change_without_a_recapture() -> None:
    """Tensors in tuples were constants of the trace, which it refused with a message of torch's."""

    def make() -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 4)
        rate, *betas = map(torch.tensor, (0.01, 0.9, 0.99))
        return model, optim.AdamW(model.parameters(), lr=rate, betas=tuple(betas), foreach=False)

    def then(optimizer: Any, _: Tensor) -> None:
        optimizer.param_groups[0]["betas"][0].mul_(0.9)

    assert_trains_as_eager(make, [torch.ones(2, 4)] * 6, then=then, machine=MACHINE)
