"""Change the C++ kernels that Inductor generates, where they are inexact or slower than need be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any
from unittest import mock

__all__ = ["changes", "sums_in_registers"]

_HELPER = "CascadeSumHelper<"
_INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


@contextlib.contextmanager
def changes() -> Iterator[None]:
    """Have Inductor generate kernels with the changes below."""
    with _double_numbers(), _no_empty_tails():
        yield


@contextlib.contextmanager
def _double_numbers() -> Iterator[None]:
    """Let C++ kernels take numbers that are read from tensors in double precision, as Python does.

    Inductor would round them to single precision, the step size of AdamW for one.
    """
    from torch._inductor.codegen.common import KernelArgs

    argdefs = KernelArgs.cpp_argdefs

    def exact(self: KernelArgs, *args: Any) -> tuple[list[str], list[str], list[str]]:
        parameters, passed, types = argdefs(self, *args)
        for i, each in enumerate(types):
            if each == "const float":  # others are pointers or integers
                types[i] = "const double"
                parameters[i] = parameters[i].replace(each, types[i])
        return parameters, passed, types

    with mock.patch.object(KernelArgs, "cpp_argdefs", exact):
        yield


@contextlib.contextmanager
def _no_empty_tails() -> Iterator[None]:
    """Let threads share sums over rows where vectors divide the columns.

    In loops with many masks Inductor does not vectorize the tail, the columns that remain. Such
    loops are not divided among threads by rows, even if the tail is empty: one thread summed the
    gradients of a batch norm with 16 channels and a ReLU. Inductor reads these statistics only to
    decide about the tail (``_tail_vec_worthwhile``).
    """
    from torch._inductor.codegen.cpp import TilingSelect

    select_tiling = TilingSelect.select_tiling

    def select(self: Any, fn_list: Any, var_sizes_list: Any) -> Any:
        factors, indices, *stats = select_tiling(self, fn_list, var_sizes_list)
        group, reduction_group = max(var_sizes_list, key=lambda sizes: len(sizes[1]))
        sizes = [*group, *reduction_group]
        pairs = zip(factors, indices, strict=True)
        if stats and all(sizes[index] % factor == 0 for factor, index in pairs):
            stats[0].mask_op_count = 0
            stats[0].non_contig_indexing_op_counter.clear()
        return factors, indices, *stats

    with mock.patch.object(TilingSelect, "select_tiling", select):
        yield


def sums_in_registers(kernels: str) -> str:
    """Return the source text of kernels with sums that the compiler can keep in registers.

    Inductor's are in allocated memory, so each addition waits until the one before is stored.
    Rounding errors are as small: numbers are added in chunks of 4,096, and chunks in blocks of as
    many.
    """
    if _HELPER not in kernels or _INCLUDE not in kernels:
        return kernels
    definitions = files("autosched.fusion").joinpath("cascade_sum.h").read_text()
    before, include, after = kernels.partition(_INCLUDE)
    return before + include + definitions + after.replace(_HELPER, f"autosched::{_HELPER}")
