"""Fake tensors on simulated GPUs: autograd's engine takes them for meta tensors, as it does those of simulated GPUs.

Torch's fake tensors tell C++ their device, and for one of CUDA its engine needs CUDA's streams.
So here only Python is told; where C++ asks for a meta tensor, it is put on the device of the last
operator. A function that is captured on GPUs has no meta tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autosched.simulated_gpus.hardware import hardware

_make = torch.Tensor._make_subclass


def make_subclass(cls: Any, data: Any, *args: Any, **facts: Any) -> Any:
    device = facts.get("device_for_backend_keys")
    facts = {} if device is not None and device.type == hardware().kind else facts
    return _make(cls, data, *args, **facts)


def on_gpus(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return how a mode applies operators: on a GPU what C++ takes to be on meta tensors."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, leaves = dict(kwargs or {}), tree_leaves((args, kwargs))
        given = [leaf.device for leaf in leaves if isinstance(leaf, FakeTensor)]
        on_gpus = [device for device in given if device.type == hardware().kind]
        self.latest_gpu = on_gpus[0] if on_gpus else getattr(self, "latest_gpu", None)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "meta" and self.latest_gpu is not None:
            kwargs["device"] = self.latest_gpu
        return apply(self, func, types, args, kwargs)

    return dispatch
