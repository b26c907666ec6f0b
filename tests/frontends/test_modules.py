"""A compiled module is a module: it has the state of the module, and autograd follows it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosched as asc
from tests.frontends.steps import assert_same

pytestmark = pytest.mark.usefixtures("forgotten")

HERE = asc.Machine([asc.Device("cpu")])
TWO = asc.Machine.emulated(gpus=2)


class Net(nn.Module):
    """Has a buffer that it changes, dropout, a flag, and an overridden ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 2)
        self.factor = 1.0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(self.layers(x)) * self.factor
        return found if scale is None else found * scale

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.layers[2].eval()  # always
        return self

    def doubled(self) -> float:
        return self.factor * 2


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def compiled(model: nn.Module, **options: Any) -> Any:
    return asc.compile(model, **{"machine": HERE, "backend": "host", **options})


def by_torch(model: nn.Module) -> Any:
    backend = asc.TorchBackend(HERE, backend="host", fuse=False)
    return torch.compile(lambda x: model(x), backend=backend)


def gradients(
    model: nn.Module, *inputs: Tensor, seed: int = 0, run: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return the output of a call, and all gradients."""
    given = [item.clone().requires_grad_() for item in inputs]
    torch.manual_seed(seed)
    out = (run or model)(*given)
    out.square().sum().backward()
    found = {f"input {i}": item.grad for i, item in enumerate(given)}
    found |= {name: item.grad for name, item in model.named_parameters()}
    model.zero_grad()
    return {**found, "out": out.detach()}


@pytest.mark.parametrize(
    "options", [{}, {"machine": TWO, "policy": "round_robin", "backend": "virtual"}]
)
def test_gradients_are_those_of_the_eager_module(options: dict[str, Any]) -> None:
    eager, model = net(), net()
    with compiled(model, **options) as run:
        for mode in (True, False, True):
            assert run.train(mode) is run
            eager.train(mode)
            x, scale = torch.randn(5, 4), torch.randn(5, 1)
            assert_same(gradients(run, x, scale), gradients(eager, x, scale), mode)
            assert_same(run.state_dict(), eager.state_dict(), mode)
        assert {s.graph.name for s in run.schedules()} == {"forward", "backward"}
        assert run.cache_info().misses == 0


def test_without_gradients_it_is_a_captured_graph() -> None:
    model = net().eval()
    x = torch.randn(3, 4)
    with compiled(model) as run:
        expected = model(x).detach()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert torch.equal(run(x), expected)
                assert not run(x).requires_grad
        run.requires_grad_(False)
        assert torch.equal(run(x), expected)
        assert run.schedules() == ()
        assert run.cache_info()[:2] == (2, 3)
        assert run.schedule(x).graph.name == "Net"


def test_its_state_is_that_of_the_module() -> None:
    model, other = net(), Net()
    run = compiled(model)
    assert isinstance(run, nn.Module)
    assert list(run.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, run.parameters(), model.parameters()))
    assert [*map(id, run.parameters())] == [*map(id, model.parameters())]
    assert [*run.named_modules()] == [*model.named_modules()]
    assert run.load_state_dict(other.state_dict()).missing_keys == []
    assert_same(model.state_dict(), other.state_dict(), "loaded")
    assert run.to(torch.float64) is run
    assert model.head.weight.dtype == torch.float64
    assert run.eval() is run
    assert not model.training
    assert run.train() is run
    assert not model.layers[2].training  # its own ``train`` is called
    run.factor = 2.0
    assert (model.factor, run.factor, run.doubled()) == (2.0, 2.0, 4.0)
    run.head = nn.Linear(6, 3)
    assert model.head.out_features == 3
    del run.factor
    assert not hasattr(model, "factor")
    assert not hasattr(run, "factor")
    assert repr(model) in repr(run)
    assert "doubled" in dir(run)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        pytest.param(lambda run: pickle.loads(pickle.dumps(run)), marks=pytest.mark.slow),
    ],
)
def test_copies_are_compiled_modules_of_their_own(duplicate: Any) -> None:
    run = compiled(net().eval())
    x = torch.randn(3, 4)
    expected = gradients(run, x)
    other = duplicate(run)
    assert type(other) is type(run)
    assert other.cache_info().maxsize == run.cache_info().maxsize
    assert_same(other.state_dict(), run.state_dict(), "copy")
    assert_same(gradients(other, x), expected, "copy")
    with torch.no_grad():
        other.head.bias.zero_()
        assert torch.equal(run(x), expected["out"])
        assert not torch.equal(other(x), expected["out"])
        assert torch.equal(other(x), other.fn(x))
    run.close()
    other.close()


def doubled(grads: Any) -> Any:
    return tuple([None if grad is None else 2 * grad for grad in grads])


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


HOOKS: dict[str, Callable[..., Any]] = {
    "forward_pre_hook": lambda _, given: doubled(given),
    "forward_hook": lambda _, given, out: 2 * out,
    "full_backward_pre_hook": lambda _, outer: doubled(outer),
    "full_backward_hook": lambda _, inner, outer: doubled(inner),
    "hook": lambda grad: 2 * grad,
    "post_accumulate_grad_hook": double_gradient,
}


@pytest.mark.parametrize("of", ["module", "all modules", "parameter"])
@pytest.mark.parametrize("by", [compiled, by_torch])
def test_hooks_that_come_and_go_run(by: Callable[[nn.Module], Any], of: str) -> None:
    """Dynamo does not guard hooks of modules unless it is told to."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    run, x = by(model), torch.randn(3, 4)
    prefix, owner = {
        "module": ("register", model[2]),
        "all modules": ("register_module", nn.modules.module),
        "parameter": ("register", model[2].weight),
    }[of]
    registers = {name: getattr(owner, f"{prefix}_{name}", None) for name in HOOKS}

    def check(when: str) -> None:
        assert_same(gradients(model, x, run=run), gradients(model, x), when)

    check("before")
    for name in filter(registers.get, HOOKS):
        handles = [registers[name](HOOKS[name]) for _ in range(2)]
        check(f"two of {name}")
        for handle in handles:
            handle.remove()
            check(f"fewer of {name}")


def test_it_can_be_part_of_other_modules() -> None:
    model = net().eval()
    eager = nn.Sequential(nn.Linear(3, 4), copy.deepcopy(model), nn.Tanh())
    run = compiled(model)
    outer = nn.Sequential(copy.deepcopy(eager[0]), run, nn.Tanh())
    assert list(outer.state_dict()) == list(eager.state_dict())
    assert outer.eval()[1] is run
    x = torch.randn(3, 3)
    expected = gradients(eager, x)
    assert_same(gradients(outer, x), expected, "in an eager module")
    whole = compiled(outer)
    assert_same(gradients(whole, x), expected, "in a compiled module")
    with torch.no_grad():
        assert torch.equal(outer(x), expected["out"])
        assert torch.equal(whole(x), expected["out"])
        assert whole.schedule(x).graph.input_names[:3] == (
            "0.weight",
            "0.bias",
            "1.layers.0.weight",
        )
    whole.close()
    run.close()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x + self.last
        return x


def test_a_capture_leaves_tensors_in_it() -> None:
    inner = compiled(Remembering())
    with compiled(nn.Sequential(inner)) as run, torch.no_grad():
        for _ in range(3):
            run(torch.ones(2))
        assert inner.fn.last.tolist() == [3, 3]
    inner.close()


def test_torch_compile_may_call_it() -> None:
    run = compiled(net().eval())
    x = torch.randn(3, 4)
    outer = torch.compile(lambda x: run(x) + 1, backend="eager")
    assert torch.equal(outer(x), run.fn(x) + 1)
    run.close()


def test_with_other_options_no_gradient_is_lost_unnoticed() -> None:
    run = compiled(nn.Linear(3, 2), machine=TWO, place={"*": "cuda:1"})
    out = run(torch.ones(2, 3))
    assert torch.equal(out, run.fn(torch.ones(2, 3)))
    with pytest.raises(asc.GradientError):
        out.sum().backward()
    run.close()


class Heads(nn.Module):
    """Has results of many kinds, of which a loss may use some."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        torch._dynamo.graph_break()
        hidden = self.one(x).sin()
        first, _ = hidden.chunk(2, 1)
        return first.t(), self.two(x).view(-1), hidden, x.view(-1), x.detach(), x * 2


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (5,), (0, 1), (1, 2, 5)], ids=str)
def test_what_no_used_result_depends_on_has_no_gradient(used: tuple[int, ...]) -> None:
    model = Heads()
    found = []
    for run in (copy.deepcopy(model), compiled(model)):
        x = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
        loss = sum(run(x)[i].sum() for i in used)
        for _ in range(2):  # the second adds to the first
            loss.backward(retain_graph=True)
        found.append({**dict(run.named_parameters()), "x": x})
    grads = [{name: item.grad for name, item in each.items()} for each in found]
    for name, grad in grads[0].items():
        other = grads[1][name]
        assert grad is other is None or torch.equal(grad, other), name


def test_options_that_say_what_is_the_default_leave_gradients() -> None:
    """``place=None`` was an option that compiled modules do not have, so gradients were refused."""
    model = nn.Linear(3, 2)
    with asc.compile(model, HERE, place=None, inputs=None, check=False, fuse=False) as run:
        run(torch.ones(4, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0))
