"""Decide whether the results of compiled kernels are those of the operators.

They round differently, and how much that matters depends on the operators: a gradient that should
be zero is noise, and Adam makes steps of full size of it. So the judgement has two stages.

1. Results agree if they are close. What is written into an argument is judged by how it changes:
   a step of a wrong size or sign is small beside the weights.
2. Others are compared with what rounding does to the operators themselves: they are computed in
   double precision (as ``torch._dynamo.utils.same`` does), and from arguments changed by one unit in
   the last place, or by 1e-11 where that is more. Kernels may deviate from the operators a few times
   as far as these do.

Integers, bools, and whether a number is finite, must be equal. Where they depend on rounding, as a
comparison near a tie does, a few times as many may differ as in the two computations above, and one
in 16 of the dtype's precision. Results of type float64 agree if they differ by 1e-10.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.tree import transform

__all__ = ["Mismatch", "Results", "find_mismatch", "references"]

# By dtype, the difference from the operators' results that is small, relative to these.
_CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_ULPS = 4  # of the written value, by which any rounding may change it
# Times the deviation of the references. Kernels of half precision round less often than operators;
# those of single precision sum in other orders, and compute variances in one pass.
_NOISE, _NOISE_OF_HALVES = 10.0, 4.0
_PEAK = 10.0  # times the root mean square, for the largest difference of an element
_TIES = 16  # units in the last place, within which the result of a comparison is open

_LEAST_UNIT = 1e-11  # by which arguments are changed: nothing is wider than double precision

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class Mismatch(NamedTuple):
    """A result that differs: its position, the largest difference, and how large it should be."""

    position: int
    difference: float
    size: float


class Results(NamedTuple):
    """Results, tensors or numbers, and what was there before: None for those that are new."""

    made: Sequence[Any]
    before: Sequence[Any]


class _Errors(NamedTuple):
    """How tensors differ: root mean square, largest, and the number of exact differences."""

    mean: float
    largest: float
    exact: int


def find_mismatch(
    found: Sequence[Any],
    expected: Results,
    references: Callable[[], Iterable[Results]],
    precision: float = torch.finfo(torch.float32).eps,
    undefined: Container[int] = (),
) -> Mismatch | None:
    """Return the first result that is not as expected, or None.

    ``references`` computes the same otherwise, and is called if results are not close.
    ``precision`` is the unit in the last place of what operators compute with. Results at the
    positions ``undefined`` may be anything.

    >>> one = Results([torch.ones(2)], [None])
    >>> find_mismatch([torch.ones(2) + 1e-6], one, list)
    >>> find_mismatch([torch.tensor([1.0, 3.0])], one, list)
    Mismatch(position=0, difference=2.0, size=1.0)
    """
    count = [i for i in range(len(expected.made)) if i not in undefined]
    doubtful = [i for i in count if not _agree(i, found[i], expected, [], precision)]
    known = list(references()) if doubtful else []
    for i in doubtful:
        if not _agree(i, found[i], expected, known, precision):
            return Mismatch(i, _distance(found[i], expected.made[i]), _size(expected.made[i]))
    return None


def _agree(
    i: int, found: Any, expected: Results, references: Sequence[Results], precision: float
) -> bool:
    """Whether a result is as expected, given other ways to compute it."""
    made, before = expected.made[i], expected.before[i]
    if _kind(found) != _kind(made):
        return False
    if isinstance(made, Tensor) and made.is_meta:
        return True
    errors = _errors(found, made)
    noise = [_errors(each.made[i], made, each.before[i], before) for each in references]
    times = _NOISE_OF_HALVES if precision > torch.finfo(torch.float32).eps else _NOISE
    count = made.numel() if isinstance(made, Tensor) else 1
    ties = int(_TIES * precision * count) + times * max((each.exact for each in noise), default=0)
    if errors.exact > ties:
        return False
    if not errors.largest:
        return True
    relative, unit = _close(made)
    value, change = _errors(made, 0.0), _errors(made, 0.0 if before is None else before)
    mean = relative * change.mean + _ULPS * unit * value.mean
    largest = relative * _PEAK * change.largest + _ULPS * unit * value.largest
    mean += times * max((each.mean for each in noise), default=0.0)
    largest += times * max((each.largest for each in noise), default=0.0)
    return errors.mean <= mean and errors.largest <= largest


def _distance(found: Any, made: Any) -> float:
    """Return the largest difference, or the number of elements that differ exactly."""
    if _kind(found) != _kind(made):
        return float("inf")
    errors = _errors(found, made)
    return errors.largest or float(errors.exact)


def _kind(item: Any) -> Any:
    return (item.dtype, item.shape) if isinstance(item, Tensor) else type(item)


def _size(item: Any) -> float:
    numbers = _numbers(item).double().abs()
    finite = numbers[numbers.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _close(expected: Any) -> tuple[float, float]:
    """Return which relative difference is small, and the unit in the last place."""
    dtype = expected.dtype if isinstance(expected, Tensor) else torch.float64
    if dtype.is_complex:
        dtype = dtype.to_real()
    return _CLOSE.get(dtype, 0.1), torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _errors(one: Any, other: Any, one_before: Any = None, other_before: Any = None) -> _Errors:
    """Return how two tensors or numbers differ, or how they have changed differently."""
    a, b = _numbers(one), _numbers(other)
    if not a.numel():
        return _Errors(0.0, 0.0, 0)
    if not a.is_floating_point() and not b.is_floating_point():
        return _Errors(0.0, 0.0, int((a != b).sum()))
    a, b = a.double(), b.to(a.device).double()
    finite = a.isfinite() & b.isfinite()
    alike = finite | (a == b) | (a.isnan() & b.isnan())
    difference = a - b
    if one_before is not None:
        difference = difference - (_numbers(one_before).double() - _numbers(other_before).double())
        finite = finite & difference.isfinite()
    difference = torch.where(finite, difference, 0.0)
    largest = float(difference.abs().max())
    mean = largest and float((difference / largest).square().mean().sqrt()) * largest
    return _Errors(mean, largest, int((~alike).sum()))


def _numbers(item: Any) -> Tensor:
    """Return the real numbers of a tensor, or of a number."""
    if not isinstance(item, Tensor):
        return torch.as_tensor(item, dtype=torch.float64 if isinstance(item, float) else None)
    item = item.detach()
    return torch.view_as_real(item.resolve_conj()) if item.is_complex() else item


def references(
    run: Callable[[Sequence[Any]], Results], args: Sequence[Any], precision: float
) -> list[Results]:
    """Return what rounding does to the results of ``run``, in two ways, as far as it can run.

    ``run`` may write to its arguments. ``args`` stay as they are; no random number is drawn.
    """
    made = []
    with contextlib.suppress(Exception):  # an operator has no kernel for double precision
        widened = list(map(_widened, args))
        with _Double():  # type: ignore[no-untyped-call]
            made.append(run(widened))
    unit = max(precision, _LEAST_UNIT)
    generator = torch.Generator().manual_seed(0)
    with contextlib.suppress(Exception):
        made.append(run([_disturbed(arg, unit, generator) for arg in args]))
    return made


def _widened(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.detach().to(_WIDER.get(arg.dtype, arg.dtype), copy=True)
    return arg


def _disturbed(arg: Any, unit: float, generator: torch.Generator) -> Any:
    """Return a copy changed by a unit in the last place, except for whole numbers.

    These are masks and counters.
    """
    if not isinstance(arg, Tensor):
        return arg
    if not (arg.is_floating_point() or arg.is_complex()):
        return arg.detach().clone()
    wide = _widened(arg)
    signs = torch.randint(0, 2, arg.shape, generator=generator) * 2 - 1
    signs = signs.to(arg.device, wide.dtype)
    changed = torch.where(wide == wide.real.round(), wide, wide * (1 + unit * signs))
    return torch.empty_like(arg).copy_(changed)


class _Double(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in double precision, also where operators are told another."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = transform(_wider_dtype, (tuple(args), dict(kwargs or {})))
        made = func(*args, **(kwargs or {}))
        if any(item.alias_info is not None for item in func._schema.returns):
            return made
        return transform(_wider_tensor, made)


def _wider_dtype(leaf: Any) -> Any:
    return _WIDER.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf


def _wider_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.dtype in _WIDER:
        return leaf.to(_WIDER[leaf.dtype])
    return leaf
