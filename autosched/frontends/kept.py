"""Check properties of tensors that a step must not change.

No operator changes them: the identity of the tensor, its memory, ``requires_grad`` and, except for
parameters, its gradient. Also tells which objects are constants. Knows no graph.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from autosched.errors import CaptureError
from autosched.frontends.reach import is_plain

__all__ = ["check_kept", "is_constant", "looks_of"]

_CONSTANTS = (enum.Enum, type, torch.nn.Module, torch.optim.Optimizer, torch.Generator)


class _Looks(NamedTuple):
    tensor: int
    memory: int
    requires_grad: bool
    grad: tuple[int, int] | None


def looks_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Looks]:
    """Return, by name, the properties of tensors that no operator changes."""
    return {name: _looks(tensor) for name, tensor in tensors.items()}


def _looks(tensor: torch.Tensor) -> _Looks:
    grad = tensor.grad if tensor.is_leaf else None
    seen = None if grad is None else (id(grad), grad._version)
    return _Looks(id(tensor), tensor.untyped_storage()._cdata, tensor.requires_grad, seen)


def check_kept(
    before: Mapping[str, _Looks], after: Mapping[str, _Looks], own: Iterable[torch.Tensor]
) -> None:
    """Raise CaptureError if these properties have changed.

    Gradients of parameters, which are ``own``, may change.
    """
    parameters = set(map(id, own))
    for name, then in before.items():
        now = after[name]
        is_own = then.tensor in parameters
        if now.memory != then.memory:
            raise CaptureError(
                f"{name!r} has other memory after the step; write in place, with copy_"
            )
        if is_own and now.requires_grad != then.requires_grad:
            raise CaptureError(
                f"{name!r} is told to require a gradient or not; do that between calls"
            )
        if not is_own and now.grad != then.grad:
            raise CaptureError(
                f"a gradient is left at {name!r}, which is no parameter of a module or optimizer; "
                "torch.autograd.grad returns it instead"
            )


def is_constant(item: Any) -> bool:
    """Whether an object never changes."""
    return (
        is_plain(item)
        or isinstance(item, _CONSTANTS)
        or (isinstance(item, tuple) and all(map(is_constant, item)))
    )
