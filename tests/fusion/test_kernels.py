"""The C++ kernels of a region are compiled in few calls of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from autosched.fusion import kernels
from tests.fusion.regions import call, needs_compiler, region


@needs_compiler
@pytest.mark.parametrize(("threads", "sizes"), [(2, [1, 2]), (1, [1, 1, 1])])
def test_kernels_of_a_region_are_as_many_sources_as_compilers_run_at_once(
    monkeypatch: pytest.MonkeyPatch, threads: int, sizes: list[int]
) -> None:
    def several(x: Tensor, y: Tensor) -> Tensor:
        return (((x + 1).sin() @ y).exp() @ y).tanh() + 1

    found: list[int] = []
    compiled = kernels._compiled

    def noted(parts: Sequence[Any]) -> Callable[[], list[Callable[..., Any]]]:
        found.append(len(parts))
        return compiled(parts)

    monkeypatch.setattr(kernels, "_compiled", noted)
    made = region(several, inputs=2)
    args = torch.rand(4, 4), torch.rand(4, 4) / 4
    with config.patch(compile_threads=threads):
        torch.testing.assert_close(call(made, *args), several(*args))
    assert made.failure is None
    assert sorted(found) == sizes


@needs_compiler
@pytest.mark.parametrize("value", [0.1, 1 / 3])
def test_numbers_that_are_read_from_tensors_have_double_precision(value: float) -> None:
    # Inductor computes with ``value=`` outside of tensors, and passes it to a kernel.
    def read(x: Tensor, y: Tensor, double: Tensor, single: Tensor, number: Any) -> list[Tensor]:
        first, second = double.item(), single.item()
        values = [first, second, number, 1 - 0.9**first]
        return [torch.addcdiv(x, x, x + 1, value=each) for each in values] + [y * first]

    made = region(read, inputs=5, outputs=5)
    x, y = torch.rand(17, dtype=torch.float64), torch.rand(17)
    args = x, y, torch.tensor(value, dtype=torch.float64), torch.tensor(value), value
    *exact, single = call(made, *args)
    *expected, wanted = read(*args)
    torch.testing.assert_close(exact, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(single, wanted, rtol=1e-7, atol=0)
    assert made.failure is None
