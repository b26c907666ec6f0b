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


def broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> list[Tensor]:
    return [target.copy_(tensor, non_blocking=True) for target in out]


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


def scatter_out(tensor: Tensor, out: Sequence[Tensor], dim: int, on: Any = None) -> list[Tensor]:
    parts = tensor.split_with_sizes([target.size(dim) for target in out], dim)
    for part, target, stream in zip(parts, out, on or [None] * len(out), strict=True):
        with streams.stream(stream):
            target.copy_(part, non_blocking=True)
    return [*out]


def gather(tensors: Sequence[Tensor], dim: int, device: int | None = None) -> Tensor:
    """Copy tensors into one, on a device; -1 is the host, and None the current device."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.size(dim) for tensor in tensors)
    target = torch.device("cpu") if device == -1 else gpu(streams.index(device))
    return gather_out(tensors, torch.empty(shape, dtype=tensors[0].dtype, device=target), dim)


def gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    parts = out.split_with_sizes([tensor.size(dim) for tensor in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor, non_blocking=out.is_cuda)
    return out


class Torch:
    """Stands for torch where devices are numbers, which C++ takes for those of real accelerators."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, device: Any) -> torch.device:
        return gpu(streams.index(device))


_ALL = (broadcast, broadcast_out, broadcast_coalesced, scatter, scatter_out, gather, gather_out)
FUNCTIONS = {f"_{function.__name__}": function for function in _ALL}  # of torch._C
