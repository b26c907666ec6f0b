"""Clip gradients by their global norm.

Equal to ``torch.nn.utils.clip_grad_norm_`` on the gradients of serial training, bit for bit. Norms
of gradients are computed where the gradients are, the norm of these on one device, and each device
scales its own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from autosched import ScheduleError
from autosched.parallel.costs import laid_out

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides


def check_clip(limit: Any) -> float | None:
    """Return the limit of a norm; raise ScheduleError unless it is a number >= 0 or None."""
    if limit is None:
        return None
    is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
    if not is_number or math.isnan(limit) or limit < 0:
        raise ScheduleError(
            f"clip_grad_norm must be the largest norm, a number, 0 or more, or None, got {limit!r}"
        )
    return float(limit)


def order_of_norms(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters in the order in which torch combines their norms.

    That is their own order, except for parameters of several dtypes, which torch groups.
    """
    names = list(parameters)
    tensors = parameters.values()
    if len({tensor.dtype for tensor in tensors}) == 1:
        return names
    like = [torch.empty(0, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
    lists: Any = [like]
    groups = _group_tensors_by_device_and_dtype(lists, with_indices=True)
    return [names[i] for _, indices in groups.values() for i in indices]


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each gradient, in one tensor."""
    return torch.stack(list(torch._foreach_norm(list(gradients), 2.0)))


def norms_of_flat(flat: Tensor, layouts: Sequence[Layout]) -> Tensor:
    """Return the norms of concatenated gradients, each summed in the order of its strides."""
    parts = torch.split(flat, [math.prod(shape) for shape, _ in layouts])
    tensors = []
    for part, (shape, strides) in zip(parts, layouts, strict=True):
        tensor = part.view(shape)
        tensors.append(tensor if tensor.stride() == strides else laid_out(tensor, strides))
    return norms(tensors)


def coefficient(
    parts: Sequence[Tensor], positions: Sequence[tuple[int, int]], limit: float
) -> tuple[Tensor, Tensor]:
    """Return the factor for gradients, and their norm; norms are at ``positions`` (part, index)."""
    each = torch.stack([parts[part][index] for part, index in positions])
    total = torch.linalg.vector_norm(each, 2.0)
    return torch.clamp(limit / (total + 1e-6), max=1.0), total


def scaled(flat: Tensor, by: Tensor) -> Tensor:
    """Return a scaled tensor; by the operator that torch clips with."""
    return torch._foreach_mul([flat], by)[0]


def scale_(gradients: Sequence[Tensor], by: Tensor) -> None:
    """Scale gradients in place."""
    torch._foreach_mul_(list(gradients), by)
