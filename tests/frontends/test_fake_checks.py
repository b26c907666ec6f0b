"""Code that asks whether it is captured goes its eager way, if there is one without a look at data."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import autosched as asc

QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "is_compiling": lambda x: torch.compiler.is_compiling(),
    "is_dynamo_compiling": lambda x: torch.compiler.is_dynamo_compiling(),
    "is_exporting": lambda x: torch.compiler.is_exporting(),
    "torch._dynamo.is_compiling": lambda x: torch._dynamo.is_compiling(),
    "torch.jit.is_tracing": lambda x: torch.jit.is_tracing(),
    "torch.jit.is_scripting": lambda x: torch.jit.is_scripting(),
    "in_onnx_export": lambda x: torch.onnx.is_in_onnx_export(),
    "a proxy": lambda x: isinstance(x, torch.fx.Proxy),
    "a fake tensor": lambda x: isinstance(x, torch._subclasses.FakeTensor),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_whoever_asks_is_told_that_nothing_is_captured(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2 if QUESTIONS[name](x) else x + 1

    with (
        warnings.catch_warnings(),
        asc.compile(step, asc.Machine.emulated(gpus=1), backend="host") as run,
    ):
        warnings.simplefilter("error")
        assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0))


def test_what_would_look_at_data_otherwise_is_told_of() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        if not isinstance(mask, torch._subclasses.FakeTensor) and mask.all():
            return x
        return x * mask

    x, mask = torch.ones(3), torch.tensor([True, True, False])
    with (
        pytest.warns(
            RuntimeWarning,
            match=r"test_fake_checks.*checks whether a tensor .*\n    at .*: if not isinstance",
        ),
        asc.compile(step, asc.Machine.emulated(gpus=1), backend="host") as run,
    ):
        assert torch.equal(run(x, mask), step(x, mask))
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor
