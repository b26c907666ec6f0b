"""Find the public torch function that calls an ATen operator.

``torch.ops.aten.mm.default(x, w)`` is ``torch.mm(x, w)``, which is easier to read and a microsecond
faster. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten

__all__ = ["public_function"]


def public_function(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that calls an operator for such (fake) arguments.

    1. Candidates are the public functions with the operator's name.
    2. Call each on the fake arguments, under a mode that allows one call of this operator, with
       the same arguments, and raises for everything else.
    3. Return the first candidate that makes this call and returns its result; if there is none,
       the operator.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x = torch.ones(2, 2)
    >>> public_function(torch.ops.aten.mm.default, (x, x), {}).__name__
    'mm'
    """
    own: Callable[..., Any] = target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    if not known or not any(isinstance(leaf, FakeTensor) for leaf in flatten((args, kwargs))):
        return own  # without fake tensors it would make, or draw, real ones
    for candidate in _candidates(target, args):
        once = _Once(target, _bound(target, args, kwargs))
        try:
            with torch.no_grad(), once:
                result = candidate(*args, **kwargs)
        except Exception:  # torch has many errors for invalid arguments
            continue
        if once.done and _same(result, once.result):
            return candidate
    return own


def _candidates(
    target: torch._ops.OpOverload[Any, Any], args: Sequence[Any]
) -> Iterator[Callable[..., Any]]:
    """Yield public functions with an operator's name."""
    name = target._schema.name.partition("::")[2]
    if name.startswith("_"):
        return
    methods = [torch.Tensor] if args and isinstance(args[0], torch.Tensor) else []
    for home in (*methods, torch, torch.nn.functional):
        if callable(found := getattr(home, name, None)):
            yield found


class _Once(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allows one call of one operator, with these arguments.

    An operator that writes is not executed.
    """

    def __init__(self, target: Any, wanted: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        self.wanted = wanted
        self.done = False
        self.result = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # which queries the device of a fake tensor
            return func(*args, **kwargs)
        expected = func is self.target and _same(_bound(func, args, kwargs), self.wanted)
        if self.done or not expected:
            raise RuntimeError("another call")
        self.done = True
        self.result = args[0] if func._schema.is_mutable else func(*args, **kwargs)
        return self.result


def _bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    known = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _same(one: Any, other: Any) -> bool:
    """Whether two trees have identical tensors and equal other leaves."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)):
        known = isinstance(other, (tuple, list)) and len(one) == len(other)
        return known and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)
