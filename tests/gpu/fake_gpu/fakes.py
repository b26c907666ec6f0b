"""Fake tensors on played GPUs: autograd's engine takes them for meta tensors, as it does played ones.

Torch's fake tensors tell C++ their device, and for one of CUDA its engine needs CUDA's streams.
So here only Python is told; where C++ asks for a tensor like another, it is put on its device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.gpu.fake_gpu.hardware import device as device_named
from tests.gpu.fake_gpu.hardware import hardware
from tests.gpu.fake_gpu.tensors import from_cpp

__all__ = ["METHODS", "MODE"]

_make, _apply = torch.Tensor._make_subclass, FakeTensorMode.dispatch


def _make_subclass(cls: Any, data: Any, *args: Any, **facts: Any) -> Any:
    device = facts.get("device_for_backend_keys")
    facts = {} if device is not None and device.type == hardware().kind else facts
    return _make(cls, data, *args, **facts)


def _dispatch(
    self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    kwargs = dict(kwargs or {})
    given = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    on_gpus = [device for device in given if device.type == hardware().kind]
    if on_gpus:
        hardware().latest = on_gpus[0].index
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
        if on_gpus:
            kwargs["device"] = on_gpus[0]
        elif from_cpp(func):
            kwargs["device"] = device_named(hardware().latest)
    return _apply(self, func, types, args, kwargs)


METHODS: dict[str, Any] = {"_make_subclass": _make_subclass}
MODE: dict[str, Any] = {"dispatch": _dispatch}
