"""Find the Python function that calls an ATen operator.

``torch.ops.aten.mm.default(x, w)`` is ``torch.mm(x, w)``, which is easier to read and a microsecond
faster. A candidate is not trusted but tested: it is called on fake tensors, and must dispatch this
operator alone, with the same arguments. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import flatten

__all__ = ["spelled"]


def spelled(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that does the same as an operator for such (fake) arguments, or the operator if there is none.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     x = torch.ones(2, 2)
    >>> spelled(torch.ops.aten.mm.default, (x, x), {}).__name__, spelled(torch.ops.aten.t.default, (x,), {}).__name__
    ('mm', 't')
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
        except Exception:  # torch says in many ways that it takes no such arguments
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
    homes = [torch.Tensor] if args and isinstance(args[0], torch.Tensor) else []
    for home in (*homes, torch, torch.nn.functional):
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
        if func.namespace == "prim":  # which asks fake tensors for their device
            return func(*args, **kwargs)
        if (
            self.done
            or func is not self.target
            or not _same(_bound(func, args, kwargs), self.wanted)
        ):
            raise RuntimeError("another call")
        self.done, self.result = True, args[0] if func._schema.is_mutable else func(*args, **kwargs)
        return self.result


def _bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    known = target._schema.arguments
    given = dict(zip((argument.name for argument in known), args, strict=False))
    return {argument.name: argument.default_value for argument in known} | given | dict(kwargs)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, (tuple, list)):
        return (
            isinstance(other, (tuple, list))
            and len(one) == len(other)
            and all(map(_same, one, other))
        )
    if isinstance(one, torch.Tensor):
        return one is other
    return type(one) is type(other) and bool(one == other)
