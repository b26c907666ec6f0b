"""Changes to the kernels that Inductor generates: they are exact, and threads share sums."""

from __future__ import annotations

import ctypes
import math
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autosched.fusion import kernel_code
from autosched.fusion.kernel_code import sums_in_registers
from tests.fusion.regions import call, needs_compiler, region

CHUNK = 4
EPSILON = 2.0**-24  # the relative error of one addition of single precision
SUM = f"""
using namespace autosched;

extern "C" float total(const float* numbers, uint64_t count, uint64_t most) {{
  CascadeSumHelper<float, {CHUNK}> helper(most);
  for (uint64_t i = 0; i < count; ++i) cascade_sum_combine(numbers[i], &helper);
  return cascade_sum_final(&helper);
}}
"""


@pytest.fixture(scope="module")
def total(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[float]], float]:
    """Sum by the code of ``cascade_sum.h``, in chunks of four numbers."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    folder: Path = tmp_path_factory.mktemp("sum")
    header = files("autosched.fusion").joinpath("cascade_sum.h").read_text()
    folder.joinpath("sum.cpp").write_text(header + SUM)
    command = [get_cpp_compiler(), "-shared", "-fPIC", "-std=c++17", "sum.cpp", "-o", "sum.so"]
    subprocess.run(command, cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "sum.so")).total
    function.restype = ctypes.c_float

    def run(numbers: list[float]) -> float:
        array = (ctypes.c_float * len(numbers))(*numbers)
        count = ctypes.c_uint64(len(numbers))
        return float(function(array, count, count))

    return run


@needs_compiler
@given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=200))
def test_errors_of_sums_grow_with_the_size_of_chunks_and_the_count_of_blocks(
    total: Callable[[list[float]], float], numbers: list[float]
) -> None:
    # Each number takes part in so many additions: see Higham, SIAM J. Sci. Comput. 14 (1993).
    depth = 2 * CHUNK + len(numbers) / CHUNK**2 + 2
    bound = 1.1 * depth * EPSILON * math.fsum(map(abs, numbers))
    assert abs(total(numbers) - math.fsum(numbers)) <= bound


@needs_compiler
@given(st.integers(0, 3000))
def test_sums_of_small_whole_numbers_are_exact(
    total: Callable[[list[float]], float], count: int
) -> None:
    assert total([float(i % 7) for i in range(count)]) == sum(i % 7 for i in range(count))


def test_kernels_without_such_sums_stay_as_they_are() -> None:
    include = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    kernel = "CascadeSumHelper<float, 4096> helper(8192L);\n"
    for text in ("", include + "void f();\n", kernel):
        assert sums_in_registers(text) == text
    changed = sums_in_registers(include + kernel + include)
    assert changed.count("autosched::" + kernel) == 1
    assert changed.index("namespace autosched {") < changed.index("autosched::CascadeSum")


@needs_compiler
@pytest.mark.parametrize(
    "columns",
    [16, pytest.param(13, marks=pytest.mark.slow), pytest.param(37, marks=pytest.mark.slow)],
)
def test_threads_share_sums_over_rows_and_add_precisely(columns: int) -> None:
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    def gradients(x: Tensor, y: Tensor, row: Tensor) -> list[Tensor]:
        masked = torch.where(x <= 0, torch.zeros(()), y)
        return [(masked * (x - row)).sum(0), masked.sum(0)]

    sources = []

    def noted(kernels: str) -> str:
        sources.append(sums_in_registers(kernels))
        return sources[-1]

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(20_001, columns, generator=generator) - 0.25 for _ in range(2))
    row = torch.rand(columns, generator=generator)
    made = region(gradients, inputs=3, outputs=2, threads=2)
    metrics.reset()
    with fresh_cache(), mock.patch.object(kernel_code, "sums_in_registers", noted):
        found = call(made, x, y, row)
    assert made.failure is None
    (kernels,) = sources
    assert "autosched::CascadeSumHelper<" in kernels
    if columns == 16:  # a whole number of vectors
        assert metrics.parallel_reduction_count == 1
    for result, exact in zip(found, gradients(x.double(), y.double(), row.double()), strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-3)
