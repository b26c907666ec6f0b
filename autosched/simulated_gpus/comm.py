"""Copies that ``torch.nn.parallel`` makes between GPUs: ``torch.nn.parallel.comm``.

As ``torch/csrc/cuda/comm.cpp`` makes them without NCCL, by copies that do not block the host. A
tensor that is on a device already is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosched.simulated_gpus import streams
from autosched.simulated_gpus.hardware import device as gpu

Tensor = torch.Tensor
Devices = Sequence[int]


def broadcast(tensor: Tensor, devices: Devices) -> list[Tensor]:
    return [tensor.to(gpu(device), non_blocking=True) for device in devices]


def broadcast_coalesced(tensors: Sequence[Tensor], devices: Devices, _: int) -> list[list[Tensor]]:
    return [[*made] for made in zip(*(broadcast(item, devices) for item in tensors), strict=True)]


def scatter(
    tensor: Tensor, devices: Devices, sizes: Sequence[int] | None, dim: int, on: Any = None
) -> list[Tensor]:
    """Copy parts to devices, on streams if there are any."""
    count = len(devices)
    parts = tensor.chunk(count, dim) if sizes is None else tensor.split_with_sizes([*sizes], dim)
    made = []
    for part, device, stream in zip(parts, devices, on or [None] * count, strict=False):
        with streams.stream(stream):
            made += broadcast(part, [device])
    return made


def gather(tensors: Sequence[Tensor], dim: int, device: int | None = None) -> Tensor:
    """Copy tensors into one, on a device; -1 is the host, and None the current device."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    target = torch.device("cpu") if device == -1 else gpu(streams.index(device))
    made = torch.empty(shape, dtype=tensors[0].dtype, device=target)
    parts = made.split_with_sizes([tensor.size(dim) for tensor in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=made.is_cuda)
    return made


class Torch:
    """Stands for torch where devices are numbers, which C++ takes for those of real accelerators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, device: Any) -> torch.device:
        return gpu(streams.index(device))


FUNCTIONS = {  # of torch._C
    "_broadcast": broadcast,
    "_broadcast_coalesced": broadcast_coalesced,
    "_scatter": scatter,
    "_gather": gather,
}
