"""Compute small depthwise convolutions as sums of products, which Inductor fuses.

On a CPU the library takes 30 microseconds for the smallest convolution: it checks its arguments,
and reorders the weights. A depthwise convolution has few operations, one product for each output
and weight of a channel. So a small one takes a fraction of that time as elementwise operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch.nn import functional

__all__ = ["DECOMPOSITIONS"]

# Products up to which elementwise kernels are faster, measured on one and two threads.
_MOST = 225_000
_MOST_TAPS = 49  # of a filter; each becomes several operators, which take time to compile


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Return the convolution as a sum of products, or NotImplemented."""
    dims = weight.dim() - 2
    padding, dilation = _each(padding, dims), _each(dilation, dims)
    if transposed or any(step != 1 for step in stride) or not _is_depthwise(x, weight, groups):
        return NotImplemented
    kernel = weight.shape[2:]
    sizes = [
        size + 2 * pad - step * (taps - 1)
        for size, pad, step, taps in zip(x.shape[2:], padding, dilation, kernel, strict=True)
    ]
    products = x.shape[0] * groups * math.prod([*sizes, *kernel])
    if min(sizes) < 1 or products > _MOST or math.prod(kernel) > _MOST_TAPS:
        return NotImplemented
    edges = [pad for pad in reversed(padding) for _ in range(2)]
    padded = functional.pad(x, edges) if any(edges) else x
    along_channels = [-1, *[1] * dims]
    filters = weight.select(1, 0)
    total = None
    for offsets in product(*map(range, kernel)):
        part, factor = padded, filters
        for i, (offset, step, size) in enumerate(zip(offsets, dilation, sizes, strict=True)):
            part = part.narrow(2 + i, offset * step, size)
            factor = factor.select(1, offset)
        term = part * factor.view(along_channels)
        total = term if total is None else total + term
    assert total is not None
    return (total if bias is None else total + bias.view(along_channels)).contiguous()


def _each(numbers: Sequence[int], dims: int) -> list[int]:
    """Return a number for each dimension; one number may stand for all."""
    return [*numbers] * dims if len(numbers) == 1 else [*numbers]


def _is_depthwise(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether each channel has one filter, and all is contiguous, as the result will be."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype in (torch.float32, torch.float64)
        and x.dim() == weight.dim() > 2
        and 1 < groups == x.shape[1]
        and weight.shape[:2] == (groups, 1)
        and x.numel() > 0 < weight.numel()
        and x.is_contiguous()
        and weight.is_contiguous()
        # Images of one pixel are also channels-last, and then so is their convolution.
        and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    )


DECOMPOSITIONS = {torch.ops.aten.convolution.default: _convolution}
