"""Make functions choose the same operators while traced as eagerly.

Some torch functions check whether a mode observes their operators, and then choose others, whose
results differ in the last bits. The known ones are handled here: they are called so that they
choose as they do eagerly, or, where they read elements to choose, an error is raised.
``tests/frontends/test_op_db.py`` finds such functions. Knows no graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.graph.effects import function_name

__all__ = ["as_eagerly"]

# These return singular values or eigenvalues only. Vectors, which backward needs, are also computed
# where autograd records, and whenever a mode is active.
_VALUES_ALONE = frozenset("cond eigvalsh matrix_norm matrix_rank norm nuclear_norm svdvals".split())
_WITH_VECTORS = (torch.ops.aten._linalg_svd.default, torch.ops.aten._linalg_eigh.default)
_COMPUTE_VECTORS = 2  # where both operators have that argument

_MATMUL = frozenset("matmul __matmul__".split())
_REFLECTED = frozenset(("__rmatmul__",))
_BATCHED = 3  # dimensions

# Their backward reads elements: which are zero, or which a mask selects. By name, the index of the
# argument whose gradient does so.
_LOOKING_BACKWARD = {"prod": 0, "cumprod": 0, "masked_fill": 2, "masked_fill_": 2}


@contextlib.contextmanager
def as_eagerly() -> Iterator[None]:
    """Let functions choose as they do eagerly.

    Raises CaptureError in the backward of those that cannot.
    """
    with _Functions():
        yield


class _Functions(TorchFunctionMode):
    """Intercepts calls of torch functions."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(fn, "__name__", "")).removeprefix("linalg_")
        if name in _VALUES_ALONE:
            with _Values():
                return fn(*args, **kwargs)
        if name in _MATMUL | _REFLECTED and len(args) == 2 and not kwargs:
            pair = args[::-1] if name in _REFLECTED else args
            if _is_folded_if_watched(*pair):
                return torch.bmm(pair[0], pair[1].expand(len(pair[0]), -1, -1))
        result = fn(*args, **kwargs)
        if name in _LOOKING_BACKWARD:
            _refuse_backward(function_name(fn), _looked_at(name, args, kwargs), result)
        return result


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Requests no vectors where autograd does not record."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITH_VECTORS and not (torch.is_grad_enabled() and args[0].requires_grad):
            named = dict(
                zip((argument.name for argument in func._schema.arguments), args, strict=False)
            )
            named |= kwargs or {}
            named[func._schema.arguments[_COMPUTE_VECTORS].name] = False
            return func(**named)
        return func(*args, **(kwargs or {}))


def _is_folded_if_watched(one: Any, other: Any) -> bool:
    """Whether tracing would use a single matrix product, where an eager call uses one for each batch item."""
    if (
        not isinstance(one, torch.Tensor)
        or not isinstance(other, torch.Tensor)
        or other.requires_grad
    ):
        return False
    return (
        one.dim() == other.dim() == _BATCHED
        and len(other) == 1
        and len(one) > 1
        and one.is_contiguous()
    )


def _looked_at(name: str, args: Any, kwargs: Any) -> Any:
    place = _LOOKING_BACKWARD[name]
    return args[place] if len(args) > place else kwargs.get("value" if place else "input")


def _refuse_backward(name: str, argument: Any, result: Any) -> None:
    """Make the backward of a call raise, if it computes the gradient of this argument."""
    if not isinstance(argument, torch.Tensor) or not argument.requires_grad:
        return
    for leaf in flatten(result):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(_refusing(name))


def _refusing(name: str) -> Callable[[Any], None]:
    def refuse(gradients: Any) -> None:
        raise CaptureError(
            f"the backward of {name} looks at data to choose how it computes, and a graph has none; write it as a "
            f"torch.autograd.Function, or compute this gradient outside of the step"
        )

    return refuse
