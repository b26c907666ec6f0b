"""Find calls that do the same work.

Compares the functions and arguments of calls. Measures nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from autosched._lib.tree import flatten

Signature = tuple[Hashable, ...]


def signature_of(fn: Callable[..., Any], args: Any, kwargs: Any) -> Signature:
    """Return everything that a call's work depends on.

    These are the function, shapes, dtypes and strides of tensors, and the other arguments. For a
    region the function is its ``structure``, a text, if it has one.

    >>> signature_of(torch.add, (torch.ones(2, 3), 1), {"alpha": 2})[1:]
    (('alpha',), (torch.float32, (2, 3), (3, 1)), (<class 'int'>, 1), (<class 'int'>, 2))
    """
    return (
        getattr(fn, "structure", None) or _hashed(fn),
        tuple(kwargs),
        *map(_leaf, flatten((args, kwargs))),
    )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else (str(leaf.layout),)
        return leaf.dtype, tuple(leaf.shape), strides
    return type(leaf), _hashed(leaf)


def _hashed(item: Any) -> Hashable:
    try:
        hash(item)
    except TypeError:
        return id(item)
    return item  # type: ignore[no-any-return]


_BUILT_IN = types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType
_LITERALS = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def literal_text(item: Any) -> str | None:
    """Return a number, a string or a constant of torch as text, or None for other objects."""
    return repr(item) if type(item) in _LITERALS else None


def function_text(fn: Any) -> str | None:
    """Return the full name of a torch function or Python operator, or None."""
    if isinstance(fn, (OpOverload, OpOverloadPacket)):
        return str(fn)
    owner = getattr(fn, "__objclass__", None)
    module = getattr(fn, "__module__", None) or getattr(owner, "__module__", None) or ""
    name = getattr(fn, "__qualname__", "")
    if module.partition(".")[0] not in ("torch", "_operator"):
        return None
    # Functions of Python must be found by their name: closures of torch are not.
    is_found = getattr(sys.modules.get(module), name, None) is fn
    return f"{module}.{name}" if isinstance(fn, _BUILT_IN) or is_found else None
