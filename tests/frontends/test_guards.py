"""A compiled function is captured again when what it bakes in has changed, and not when anything else has."""

from __future__ import annotations

import copy
import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import autosched as asc
from tests import models
from tests.files import module_at

HERE = asc.Machine([asc.Device("cpu")])
SCALE = 2.0
TABLE = {"scale": 2.0, "other": 1.0}
X = torch.tensor([-1.0, 0.5, 2.0, 3.0])


class Settings:
    """A class used as a place for numbers."""

    scale = 2.0


SETTINGS = Settings()


def helper(x: Tensor) -> Tensor:
    return x * SCALE


def by_global(x: Tensor) -> Tensor:
    return x * SCALE


def by_global_of_a_helper(x: Tensor) -> Tensor:
    return helper(x) + 1


def by_dict(x: Tensor) -> Tensor:
    return x * TABLE["scale"]


def by_class(x: Tensor) -> Tensor:
    return x * Settings.scale


def by_object(x: Tensor) -> Tensor:
    return x * SETTINGS.scale


def by_default(x: Tensor, power: int = 2) -> Tensor:
    return x**power


@dataclass
class Trainer:
    """Has what its step reads, and what it does not."""

    model: nn.Module
    settings: Any
    seen: int = 0
    losses: list[float] = field(default_factory=list)

    def step(self, x: Tensor) -> Tensor:
        return self.model(x) * self.scaled()

    def scaled(self) -> float:
        return self.settings.inner.scale

    def count(self) -> None:
        self.seen += 1
        self.losses.append(0.0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.0)
        self.scales = [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scales[1] * SCALE


class Base:
    factor = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor

    @classmethod
    def scaled_by_class(cls, x: Tensor) -> Tensor:
        return x * cls.factor


class Derived(Base):
    """Its attributes are those of its base, reached through ``super()``."""

    def scaled(self, x: Tensor) -> Tensor:
        return super().scaled(x) + 1

    def __mul__(self, x: Tensor) -> Tensor:
        return x * self.factor * SCALE

    @property
    def width(self) -> float:
        return self.factor


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Options(dict[str, float]):
    """A dict with a method."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * self["scale"] * SCALE


def nested(scale: float) -> SimpleNamespace:
    return SimpleNamespace(inner=SimpleNamespace(scale=scale))


class Cases:
    """Functions, each with a change that a call must see: by names of methods and of ``SHORT``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.patch = monkeypatch
        self.module = Scaled()
        self.trainer = Trainer(nn.Identity(), nested(2.0))
        self.derived = Derived()

    def set(self, name: str, item: Any = 3.0) -> Callable[[], None]:
        """Return what sets a global of this module."""
        return lambda: self.patch.setitem(globals(), name, item)

    def base(self, name: str = "factor", item: Any = 3.0) -> Callable[[], None]:
        """Return what sets an attribute of the base of a class."""
        return lambda: self.patch.setattr(Base, name, item)

    def code(self) -> Any:
        def fn(x: Tensor) -> Tensor:
            return x + 1

        return fn, lambda: setattr(fn, "__code__", (lambda x: x + 2).__code__)

    def cell(self) -> Any:
        scale = 2.0

        def change() -> None:
            nonlocal scale
            scale = 3.0

        return lambda x: x * scale, change

    def list(self) -> Any:
        scales = [2.0]
        return lambda x: x * scales[0], lambda: scales.__setitem__(0, 3.0)

    def sign_of_zero(self) -> Any:
        zeros = [0.0]
        return (
            lambda x: 1 / (x * 0 + zeros[0]).abs().copysign(torch.full_like(x, zeros[0])),
            lambda: zeros.__setitem__(0, -0.0),
        )

    def partial(self) -> Any:
        table = {"scale": 2.0}
        return partial(lambda x, by: x * by["scale"], by=table), lambda: table.update(scale=3.0)

    def parameter(self) -> Any:
        scale = nn.PReLU(1, init=0.5)
        return scale, lambda: setattr(scale, "weight", nn.Parameter(torch.tensor([0.25])))

    def slot(self) -> Any:
        slotted = Slotted()
        return lambda x: x * slotted.scale, lambda: setattr(slotted, "scale", 3.0)

    def name_in_a_variable(self) -> Any:
        name = "factor"
        return lambda x: x * getattr(self.derived, name), self.base()

    def attribute_of_a_function(self) -> Any:
        def fn(x: Tensor) -> Tensor:
            return x * fn.scale  # type: ignore[attr-defined]

        fn.scale = 2.0  # type: ignore[attr-defined]
        return fn, lambda: setattr(fn, "scale", 3.0)

    def partial_method(self) -> Any:
        class Partly:
            def scaled(self, by: float, x: Tensor) -> Tensor:
                return x * by * SCALE

            doubled = partialmethod(scaled, 2.0)

        partly = Partly()
        return lambda x: partly.doubled(x), self.set("SCALE")

    def cached_function(self) -> Any:
        scale = cache(lambda: SCALE)
        change = self.set("SCALE")
        return lambda x: x * scale(), lambda: (scale.cache_clear(), change())

    def import_in_a_function(self) -> Any:
        def fn(x: Tensor) -> Tensor:
            from tests import models

            return x * getattr(models, "scale", 2.0)

        return fn, lambda: self.patch.setattr(models, "scale", 3.0, raising=False)

    def method_of_a_dict(self) -> Any:
        options = Options(scale=2.0)
        return lambda x: options.scaled(x), self.set("SCALE")

    def queue(self) -> Any:
        scales = deque([2.0])
        return lambda x: x * scales[0], lambda: scales.append(scales.pop() + 1)

    def hook_of_a_parameter(self) -> Any:
        model = nn.Linear(4, 4)
        return gradient_of(model), lambda: model.weight.register_hook(torch.neg)

    def what_a_hook_of_a_parameter_reads(self) -> Any:
        model, scales = nn.Linear(4, 4), [2.0]
        model.weight.register_hook(lambda gradient: gradient * scales[0])
        return gradient_of(model), lambda: scales.__setitem__(0, 3.0)

    def hook_of_all_modules(self) -> Any:
        hooks = nn.modules.module._global_forward_hooks
        return nn.ReLU(), lambda: self.patch.setitem(
            hooks, -1, lambda module, args, result: -result
        )

    def what_torch_is_told(self) -> Any:
        def fn(x: Tensor) -> Tensor:
            return -x if torch.are_deterministic_algorithms_enabled() else x

        return fn, lambda: self.patch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda: True
        )

    def shape_of_a_buffer(self) -> Any:
        self.module.register_buffer("seen", torch.zeros(2))
        seen = self.module.get_buffer("seen")
        return (
            lambda x: torch.full(self.module.get_buffer("seen").shape, 2.0) + x[0],
            lambda: setattr(seen, "data", torch.zeros(3)),
        )

    def precision(self) -> Any:
        table = {"on": False}

        def fn(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=table["on"]):
                return torch.outer(x, x) @ torch.outer(x, x) / 3

        return fn, lambda: table.update(on=True)

    def what_an_array_holds(self) -> Any:
        array = numpy.ones(3)
        return lambda x: x * float(array[1]), lambda: array.__setitem__(1, 3.0)

    def what_bytes_hold(self) -> Any:
        data = bytearray(b"123")
        return lambda x: x * data[1], lambda: data.__setitem__(1, 3)

    def context_variable(self) -> Any:
        scale = ContextVar("scale", default=2.0)
        return lambda x: x * scale.get(), lambda: scale.set(3.0)

    def environment(self) -> Any:
        self.patch.delenv("SCALE", raising=False)
        return lambda x: x * float(os.environ.get("SCALE", "2")), lambda: self.patch.setenv(
            "SCALE", "3"
        )


SHORT: dict[str, Callable[[Any], Any]] = {
    "global": lambda c: (by_global, c.set("SCALE")),
    "type of a global": lambda c: (lambda x: x.long() * SCALE, c.set("SCALE", 2)),
    "global of a helper": lambda c: (by_global_of_a_helper, c.set("SCALE")),
    "helper": lambda c: (by_global_of_a_helper, c.set("helper", torch.neg)),
    "dict": lambda c: (by_dict, lambda: c.patch.setitem(TABLE, "scale", 3.0)),
    "class": lambda c: (by_class, lambda: c.patch.setattr(Settings, "scale", 3.0)),
    "object over its class": lambda c: (
        by_object,
        lambda: c.patch.setitem(vars(SETTINGS), "scale", 3.0),
    ),
    "object in an object": lambda c: (
        c.trainer.step,
        lambda: setattr(c.trainer.settings.inner, "scale", 3.0),
    ),
    "object": lambda c: (c.trainer.step, lambda: setattr(c.trainer, "settings", nested(3.0))),
    "default": lambda c: (by_default, lambda: c.patch.setattr(by_default, "__defaults__", (3,))),
    "number of a module": lambda c: (c.module, lambda: setattr(c.module.inner, "p", 1.0)),
    "list of a module": lambda c: (c.module, lambda: c.module.scales.__setitem__(1, 3.0)),
    "attribute of a class": lambda c: (c.derived.scaled, c.base()),
    "attribute over that of a base": lambda c: (
        c.derived.scaled,
        lambda: c.patch.setattr(Derived, "factor", 3.0, raising=False),
    ),
    "attribute of a class in a class method": lambda c: (c.derived.scaled_by_class, c.base()),
    "attribute of a class in a property": lambda c: (lambda x: x * c.derived.width, c.base()),
    "global of an operator": lambda c: (lambda x: c.derived * x, c.set("SCALE")),
    "method of a class": lambda c: (c.derived.scaled, c.base("scaled", lambda self, x: -x)),
    "class of an object": lambda c: (
        lambda x: c.derived.scaled(x),
        lambda: setattr(c.derived, "__class__", Base),
    ),
    "global that was not there": lambda c: (lambda x: abs(x), c.set("abs", torch.neg)),
    "what backward of an operator reads": lambda c: (_differentiated(doubled), c.set("SLOPE")),
    "what backward of an operator of torch's reads": lambda c: (
        _differentiated(lambda x: torch.ops.tests_of_guards.doubled(x)),
        c.set("SLOPE"),
    ),
    "what backward of a function reads": lambda c: (
        _differentiated(lambda x: Sloped.apply(x)),
        c.set("SLOPE"),
    ),
}
LONG = [name for name in vars(Cases) if not name.startswith("__") and name not in ("set", "base")]


def gradient_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(model(x).square().sum(), model.weight)[0]

    return fn


SLOPE = 2.0


@torch.library.custom_op("tests_of_guards::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * SLOPE)


class Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * SLOPE


def _differentiated(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(fn(x).sum(), x)[0]

    return gradient


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_what_is_baked_in_is_guarded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = Cases(monkeypatch)
    fn, change = SHORT[name](cases) if name in SHORT else getattr(cases, name)()
    with asc.compile(fn, HERE) as run, torch.no_grad():
        before = fn(X)
        for _ in range(3):
            assert torch.equal(run(X), before)
        assert run.cache_info()[:2] == (2, 1)
        change()
        expected = fn(X)
        assert not torch.equal(expected, before) or expected.dtype != before.dtype, (
            "the change must show"
        )
        for _ in range(2):
            found = run(X)
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype
        assert run.cache_info()[:2] == (3, 2)


@pytest.mark.parametrize(
    ("folder", "name"), [("site-packages of mine", "rates"), ("here", "sched")]
)
def test_modules_of_the_users_are_told_from_libraries_by_where_they_are(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the user's may be called like a module of Python's."""
    users = module_at(
        tmp_path / folder / f"{name}.py", "rate = 2.0\ndef step(x):\n    return x * rate\n"
    )
    monkeypatch.setitem(sys.modules, name, users)
    with asc.compile(users.step, HERE) as run:
        assert torch.equal(run(X), X * 2)
        users.rate = 3.0
        assert torch.equal(run(X), X * 3)


def test_what_code_does_not_mention_is_free_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(nn.Identity(), nested(2.0))
    monkeypatch.setitem(TABLE, "other", 2.0)
    with asc.compile(trainer.step, HERE) as run:
        for number in range(4):
            run(X)
            trainer.count()
            trainer.settings.inner.other = number
            trainer.settings.unused = number
        assert run.cache_info()[:2] == (3, 1)


def test_equal_things_made_anew_are_of_one_kind() -> None:
    trainer = Trainer(nn.Identity(), nested(2.0))
    with asc.compile(trainer.step, HERE) as run:
        for _ in range(3):
            run(X)
            trainer.settings = nested(2.0)
        assert run.cache_info()[:2] == (2, 1)
    with asc.compile(lambda fn, x: fn(x), HERE) as run:
        for scale in (2.0, 2.0, 3.0, 2.0):
            assert torch.equal(run(lambda x, scale=scale: x * scale, X), X * scale)
        assert run.cache_info()[:2] == (2, 2)


def test_loaded_state_is_used_and_left() -> None:
    model = nn.Linear(4, 2)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    other = optim.Adam(twin.parameters(), lr=0.1)

    def step(x: Tensor, model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    with asc.compile(step, HERE) as run:
        for number in range(6):
            if number % 3 == 2:
                for net, opt in ((model, optimizer), (twin, other)):
                    net.load_state_dict(copy.deepcopy(net.state_dict()))
                    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            assert torch.equal(run(X), step(X, twin, other))
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine, theirs)
                assert torch.equal(mine.grad, theirs.grad)
        assert run.cache_info().misses == 2  # without moments, and with them


def test_no_batch_is_kept_alive() -> None:
    batches = [torch.ones(4) for _ in range(2)]
    seen = [weakref.ref(batch) for batch in batches]
    with asc.compile(lambda pair: pair[0] + pair[1]["x"], HERE) as run:
        for _ in range(2):
            run([batches[0], {"x": batches[1]}])
        del batches
        gc.collect()
        assert [ref() for ref in seen] == [None, None]


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "vectors": lambda: (torch.arange(4.0), torch.ones(4)),
    "the same twice": lambda: (x := torch.arange(4.0), x),
    "integers": lambda: (torch.arange(4), torch.ones(4)),
    "another shape": lambda: (torch.arange(8.0).view(2, 4), torch.ones(4)),
    "another layout": lambda: (torch.arange(8.0).view(4, 2).t(), torch.ones(4)),
    "a number": lambda: (torch.arange(4.0), 1.0),
    "a whole number": lambda: (torch.arange(4.0), 1),
    "truth": lambda: (torch.arange(4.0), True),
}


class Net(nn.Module):
    """Shows in its result all that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=0.5)
        self.shift: Any = 1
        self.scales = {"a": 1.0}

    def forward(self, x: Tensor, y: Any) -> tuple[Tensor, Any]:
        out = self.norm(self.fc(x.reshape(-1, 4).float()) * self.scales["a"]) + self.shift
        return out, torch.stack((x * y, x * 2 * y))


@settings(max_examples=settings().max_examples // 2)  # each captures several times
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(sorted(ARGUMENTS))), min_size=1, max_size=8
    )
)
def test_whatever_changes_between_calls_results_are_as_without(
    changes: list[tuple[int, str]],
) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    twin = copy.deepcopy(net)
    with asc.compile(net, HERE, maxsize=3) as run, torch.no_grad():
        for change, arguments in changes:
            for model in (net, twin):
                match change:
                    case 0:
                        model.train(not model.training)
                    case 1:
                        model.shift = 1.0 if type(model.shift) is int else 1
                    case 2:
                        model.scales["a"] = -model.scales["a"]
                    case 3:
                        model.fc.weight.data = model.fc.weight.data.t().clone().t()
                    case 4:
                        model.fc = nn.Linear(4, 4).requires_grad_(False)
                        nn.init.ones_(model.fc.weight)
                        nn.init.ones_(model.fc.bias)
                    case 5:
                        model.norm.running_mean = model.norm.running_mean + 1
                    case 6:
                        model.norm.register_forward_hook(
                            lambda _, args, result: functional.relu(result)
                        )
                    case 7:
                        model.norm.momentum = 0.75 - model.norm.momentum
            args = ARGUMENTS[arguments]()
            if net.training and args[0].dim() == 1:
                continue  # too few for statistics
            for _ in range(2):
                for found, expected in zip(run(*args), twin(*args), strict=True):
                    assert found.dtype == expected.dtype
                    assert torch.equal(found, expected.detach())
                assert all(map(torch.equal, net.buffers(), twin.buffers()))
        assert run.cache_info().currsize <= 3


def test_autocast_of_any_accelerator_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    with asc.compile(layer, asc.Machine.emulated(gpus=0)) as run, torch.no_grad():
        run(x)
        torch.set_autocast_enabled("xpu", True)
        try:
            run(x)
        finally:
            torch.set_autocast_enabled("xpu", False)
        run(x)
        assert run.cache_info().misses == 2


def test_hooks_for_saved_tensors_around_the_call_make_calls_of_another_kind() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(5, 4)

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(model(x).square().mean(), model[0].weight)[0]

    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.to(torch.bfloat16), lambda t: t.float()
    )
    with asc.compile(step, asc.Machine.emulated(gpus=1), policy="single", backend="host") as run:
        for _ in range(2):
            with hooks:
                assert torch.equal(run(x), step(x))
            assert torch.equal(run(x), step(x))
        assert run.cache_info().misses == 2


class Doubling(TorchFunctionMode):
    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = fn(*args, **(kwargs or {}))
        return found * 2 if fn is torch.relu else found


def test_a_mode_around_the_call_is_refused_and_one_within_the_function_is_captured() -> None:
    def within(x: Tensor) -> Tensor:
        with Doubling():
            return torch.relu(x) + 1

    x = torch.ones(3)
    with asc.compile(
        torch.relu, asc.Machine.emulated(gpus=1), policy="single", backend="host"
    ) as run:
        assert torch.equal(run(x), x)
        with (
            Doubling(),
            pytest.raises(asc.CaptureError, match="a Doubling is active around the call"),
        ):
            run(x)
    with asc.compile(within, asc.Machine.emulated(gpus=1), policy="single", backend="host") as run:
        assert torch.equal(run(x), within(x))
