"""A compiled function is captured again when what it bakes in has changed, and not when anything else has."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import autosched as asc
from tests.files import module_at

HERE = asc.Machine([asc.Device("cpu")])
X = torch.tensor([-1.0, 0.5, 2.0, 3.0])
PRELUDE = """
import os
from collections import deque
from contextvars import ContextVar
from functools import cache, partial, partialmethod
from types import SimpleNamespace
import numpy
import torch
from torch import nn

SCALE = 2.0

class Base:
    factor = 2.0
    def scaled(self, x):
        return x * self.factor
    @classmethod
    def scaled_by_class(cls, x):
        return x * cls.factor

class Derived(Base):
    def scaled(self, x):
        return super().scaled(x) + 1
    def __mul__(self, x):
        return x * self.factor * SCALE
    @property
    def width(self):
        return self.factor

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.0)
        self.scales = [1.0, 2.0]
        self.register_buffer("seen", torch.zeros(2))
    def forward(self, x):
        return self.inner(x) * self.scales[1] * SCALE

class Slotted:
    __slots__ = ("scale",)

class Options(dict):
    def scaled(self, x):
        return x * self["scale"] * SCALE

class Partly:
    def scaled(self, by, x):
        return x * by * SCALE
    doubled = partialmethod(scaled, 2.0)

class Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE

def helper(x):
    return x * SCALE

def slope(fn, x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x).sum(), x)[0]

def gradient_of(model, x):
    with torch.enable_grad():
        return torch.autograd.grad(model(x).square().sum(), model.weight)[0]

def rounded(x, on):
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        return torch.outer(x, x) @ torch.outer(x, x) / 3

derived, module, box = Derived(), Scaled(), SimpleNamespace(inner=SimpleNamespace(scale=2.0))
"""
# What a module has beside the prelude, the function or its result, and the change that a call must see.
CASES: dict[str, tuple[str, str, str]] = {
    "global": ("", "x * SCALE", "SCALE = 3.0"),
    "type of a global": ("", "x.long() * SCALE", "SCALE = 2"),
    "global of a helper": ("", "helper(x) + 1", "SCALE = 3.0"),
    "helper": ("", "helper(x) + 1", "helper = torch.neg"),
    "global that was not there": ("", "abs(x)", "abs = torch.neg"),
    "dict": ("table = {'scale': 2.0}", "x * table['scale']", "table['scale'] = 3.0"),
    "list": ("scales = [2.0]", "x * scales[0]", "scales[0] = 3.0"),
    "queue": ("scales = deque([2.0])", "x * scales[0]", "scales[0] = 3.0"),
    "bytes": ("data = bytearray(b'123')", "x * data[1]", "data[1] = 3"),
    "array": ("array = numpy.ones(3)", "x * float(array[1])", "array[1] = 3.0"),
    "sign of zero": ("zeros = [0.0]", "x.abs().copysign(x * 0 + zeros[0])", "zeros[0] = -0.0"),
    "class": ("", "x * Base.factor", "Base.factor = 3.0"),
    "object over its class": ("", "x * derived.factor", "derived.factor = 3.0"),
    "object": ("", "x * box.inner.scale", "box.inner = SimpleNamespace(scale=3.0)"),
    "object in an object": ("", "x * box.inner.scale", "box.inner.scale = 3.0"),
    "slot": (
        "slotted = Slotted(); slotted.scale = 2.0",
        "x * slotted.scale",
        "slotted.scale = 3.0",
    ),
    "default": ("def fn(x, power=2): return x**power", "", "fn.__defaults__ = (3,)"),
    "code": ("def fn(x): return x + 1", "", "fn.__code__ = (lambda x: x + 2).__code__"),
    "attribute of a function": (
        "def fn(x): return x * fn.scale\nfn.scale = 2.0",
        "",
        "fn.scale = 3.0",
    ),
    "cell": (
        "def pair():\n    scale = 2.0\n    def set():\n        nonlocal scale\n        scale = 3.0\n"
        "    return lambda x: x * scale, set\nfn, set = pair()",
        "",
        "set()",
    ),
    "partial": (
        "table = {'scale': 2.0}\nfn = partial(lambda x, by: x * by['scale'], by=table)",
        "",
        "table['scale'] = 3.0",
    ),
    "partial method": ("partly = Partly()", "partly.doubled(x)", "SCALE = 3.0"),
    "cached function": (
        "own = cache(lambda: SCALE)",
        "x * own()",
        "own.cache_clear(); SCALE = 3.0",
    ),
    "import in a function": (
        "def fn(x):\n    import tests.files\n    return x * getattr(tests.files, 'scale', 2.0)",
        "",
        "import tests.files as f; f.scale = 3.0; undo = partial(delattr, f, 'scale')",
    ),
    "number of a module": ("fn = module", "", "module.inner.p = 1.0"),
    "list of a module": ("fn = module", "", "module.scales[1] = 3.0"),
    "parameter": (
        "fn = nn.PReLU(1, init=0.5)",
        "",
        "fn.weight = nn.Parameter(torch.tensor([0.25]))",
    ),
    "shape of a buffer": (
        "",
        "torch.full(module.seen.shape, 2.0) + x[0]",
        "module.seen.data = torch.zeros(3)",
    ),
    "attribute of a class": ("fn = derived.scaled", "", "Base.factor = 3.0"),
    "attribute over that of a base": ("fn = derived.scaled", "", "Derived.factor = 3.0"),
    "class method": ("fn = derived.scaled_by_class", "", "Base.factor = 3.0"),
    "property": ("", "x * derived.width", "Base.factor = 3.0"),
    "operator": ("", "derived * x", "SCALE = 3.0"),
    "method of a class": ("fn = derived.scaled", "", "Base.scaled = lambda self, x: -x"),
    "class of an object": ("", "derived.scaled(x)", "derived.__class__ = Base"),
    "method of a dict": ("options = Options(scale=2.0)", "options.scaled(x)", "SCALE = 3.0"),
    "name in a variable": ("name = 'factor'", "x * getattr(derived, name)", "Base.factor = 3.0"),
    "hook of a parameter": (
        "model = nn.Linear(4, 4)",
        "gradient_of(model, x)",
        "model.weight.register_hook(torch.neg)",
    ),
    "what a hook of a parameter reads": (
        "model = nn.Linear(4, 4); model.weight.register_hook(lambda gradient: gradient * SCALE)",
        "gradient_of(model, x)",
        "SCALE = 3.0",
    ),
    "hook of all modules": (
        "fn = nn.ReLU()",
        "",
        "undo = nn.modules.module.register_module_forward_hook(lambda m, args, out: -out).remove",
    ),
    "what torch is told": (
        "undo = partial(torch.use_deterministic_algorithms, False)",
        "-x if torch.are_deterministic_algorithms_enabled() else x",
        "torch.use_deterministic_algorithms(True)",
    ),
    "precision": ("table = {'on': False}", "rounded(x, table['on'])", "table['on'] = True"),
    "context variable": (
        "scale = ContextVar('s', default=2.0)",
        "x * scale.get()",
        "scale.set(3.0)",
    ),
    "environment": (
        "undo = partial(os.environ.pop, 'OF_A_TEST', None)",
        "x * float(os.environ.get('OF_A_TEST', '2'))",
        "os.environ['OF_A_TEST'] = '3'",
    ),
    "what backward of a function reads": ("", "slope(lambda x: Sloped.apply(x), x)", "SCALE = 3.0"),
    "what backward of an operator reads": (
        "import tests.frontends.test_guards as own",
        "slope(own.doubled, x)",
        "own.SLOPE = 3.0; undo = lambda: setattr(own, 'SLOPE', 2.0)",
    ),
    "what backward of an operator of torch's reads": (
        "import tests.frontends.test_guards as own",
        "slope(lambda x: torch.ops.tests_of_guards.doubled(x), x)",
        "own.SLOPE = 3.0; undo = lambda: setattr(own, 'SLOPE', 2.0)",
    ),
}
SLOPE = 2.0


@torch.library.custom_op("tests_of_guards::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * SLOPE)


@pytest.mark.parametrize("name", CASES)
def test_what_is_baked_in_is_guarded(name: str, tmp_path: Path) -> None:
    more, result, change = CASES[name]
    more += f"\nfn = lambda x: {result}" if result else ""
    users = module_at(tmp_path / "users.py", PRELUDE + more)
    fn = users.fn
    with contextlib.ExitStack() as stack, asc.compile(fn, HERE) as run, torch.no_grad():
        stack.callback(lambda: getattr(users, "undo", bool)())
        before = fn(X)
        for _ in range(3):
            assert torch.equal(run(X), before)
        assert run.cache_info()[:2] == (2, 1)
        exec(change, vars(users))
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


def test_equal_things_made_anew_are_of_one_kind() -> None:
    box = SimpleNamespace(inner=SimpleNamespace(scale=2.0))
    with asc.compile(lambda x: x * box.inner.scale, HERE) as run:
        for _ in range(3):
            run(X)
            box.inner = SimpleNamespace(scale=2.0)
        assert run.cache_info()[:2] == (2, 1)
    with asc.compile(lambda fn, x: fn(x), HERE) as run:
        for scale in (2.0, 2.0, 3.0, 2.0):
            assert torch.equal(run(lambda x, scale=scale: x * scale, X), X * scale)
        assert run.cache_info()[:2] == (2, 2)


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
