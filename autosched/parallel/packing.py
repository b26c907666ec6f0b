"""Pack tensors into few messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flat", "pack", "unpack_"]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements of tensors in one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all elements of tensors, in one tensor for each dtype."""
    return [flat(group) for group in _by_dtype(tensors)]


def unpack_(tensors: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]) -> None:
    """Copy what was packed into tensors like those."""
    for group, whole in zip(_by_dtype(tensors), packed, strict=True):
        parts = torch.split(whole, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
