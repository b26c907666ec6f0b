"""Make functions choose the same operators while traced as eagerly.

Some torch functions check whether a mode observes their operators, and then choose others, whose
results differ in the last bits. The known ones are handled here: they are called so that they
choose as they do eagerly, or, where they read elements to choose, an error is raised.
``tests/frontends/test_op_db.py`` finds such functions. Knows no graph.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.settings import Number, call_with_floats
from autosched.graph.effects import function_name

__all__ = ["EagerOperators"]

# These return singular values or eigenvalues only. Vectors, which backward needs, are also computed
# where autograd records, in transforms of torch.func, and whenever a mode is active.
_VALUES_ONLY = frozenset("cond eigvalsh matrix_norm matrix_rank norm nuclear_norm svdvals".split())
# Of both operators, the third argument says whether to compute vectors.
_WITH_VECTORS = (torch.ops.aten._linalg_svd.default, torch.ops.aten._linalg_eigh.default)

# Their backward reads elements: which are zero, or which a mask selects. By name, the position and
# name of the argument whose gradient does so.
_DATA_DEPENDENT = {
    **dict.fromkeys(("prod", "cumprod"), (0, "input")),
    **dict.fromkeys(("masked_fill", "masked_fill_"), (2, "value")),
}


class EagerOperators(TorchFunctionMode):
    """Makes torch functions choose as they do eagerly.

    Raises CaptureError in the backward of those that cannot.
    """

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(fn, "__name__", "")).removeprefix("linalg_")
        if name in _VALUES_ONLY and not any(map(_is_transformed, (*args, *kwargs.values()))):
            with _ValuesOnly():  # type: ignore[no-untyped-call]
                return fn(*args, **kwargs)
        if name in ("matmul", "__matmul__", "__rmatmul__") and len(args) == 2 and not kwargs:
            one, other = args if name != "__rmatmul__" else args[::-1]
            if _is_folded_if_traced(one, other):
                return torch.bmm(one, other.expand(len(one), -1, -1))
        if name.startswith("_fused_") and any(isinstance(i, Number) for i in kwargs.values()):
            return call_with_floats(fn, args, kwargs)
        result = fn(*args, **kwargs)
        if name in _DATA_DEPENDENT:
            position, word = _DATA_DEPENDENT[name]
            argument = args[position] if len(args) > position else kwargs.get(word)
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                _refuse_backward(function_name(fn), result)
        return result


class _ValuesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Requests no vectors where autograd does not record."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_VECTORS and not (torch.is_grad_enabled() and args[0].requires_grad):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False))
            return func(**{**given, **kwargs, names[2]: False})
        return func(*args, **kwargs)


def _is_transformed(item: Any) -> bool:
    """Whether a tensor belongs to a transform of torch.func, or may have a tangent."""
    is_wrapped = isinstance(item, torch.Tensor) and is_functorch_wrapped_tensor(item)
    return is_wrapped or forward_ad._current_level >= 0


def _is_folded_if_traced(one: Any, other: Any) -> bool:
    """Whether only tracing would use one matrix product for the batch."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    batched = one.dim() == other.dim() == 3 and len(other) == 1 and len(one) > 1
    return batched and one.is_contiguous() and not other.requires_grad


def _refuse_backward(name: str, result: Any) -> None:
    """Make the backward of a call raise CaptureError."""

    def refuse(gradients: Any) -> NoReturn:
        raise CaptureError(
            f"the backward of {name} reads elements to choose how it computes, and a graph has no "
            "data; write it as a torch.autograd.Function, or compute this gradient outside of the "
            "step"
        )

    for leaf in flatten(result):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(refuse)
