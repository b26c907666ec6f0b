"""Identify the devices of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autosched.machine.machine import Device


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for an operator on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_device(device: Device) -> torch.device:
    """Return the torch device of a device, with its index; the CPU for storage."""
    if device.is_storage:
        return torch.device("cpu")
    made = torch.device(device.physical or device.name)
    return torch.device("cpu") if made.type == "cpu" else torch.device(made.type, made.index or 0)


def model_name(device: torch.device) -> str:
    """Return the model name of an accelerator, if torch reports it, or else its type."""
    name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return device.type if name is None else str(name(device))
