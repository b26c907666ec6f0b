"""Create fake tensors with the strides of real kernels.

Torch predicts the result of an operator without running it. For arguments that are not contiguous,
some predictions of strides are wrong (batch norms and ``adaptive_avg_pool1d`` over a transposed
tensor, ``div`` with a rounding mode). Code that asks for strides (``view``, ``reshape``,
``as_strided``, ``contiguous``) would then take another path than in eager mode. So such operators
run once on uninitialised tensors, and their strides are cached. A fixed list of operators with
wrong predictions would differ between versions of torch, and between devices.

This module knows no graph.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._mode_utils import no_dispatch

from autosched._lib.copying import span
from autosched._lib.recent import Recent
from autosched._lib.tree import flatten, transform

Strides = tuple[tuple[int, ...] | None, ...]  # by tensor that an operator returns

_known = Recent[Hashable, Strides | None](most=10_000)  # None: the kernel failed

# Costly operators whose results are contiguous whatever their arguments are.
_CONTIGUOUS = frozenset("addbmm addmm addmv addr baddbmm bmm dot embedding mm mv vdot".split())

# Queries that torch would answer for zeros, though the answer depends on a tensor's elements.
_READ_ELEMENTS = frozenset((torch.ops.aten._nested_tensor_from_mask_left_aligned.default,))


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode in which tensors are fake, with the strides of real kernels.

    With ``learn=False`` no kernel runs, and only cached strides are used.

    >>> fakes = Fakes()
    >>> x, y = [fakes.from_tensor(torch.ones(n, 5).t()) for n in (5, 1)]
    >>> torch.div(x, y, rounding_mode="floor").stride()
    (1, 5)
    """

    def __init__(self, learn: bool = True) -> None:
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            # without an environment, reading a number from a tensor is an error
            env = ShapeEnv() if learn else None
            super().__init__(allow_fallback_kernels=True, shape_env=env, static_shapes=True)
        self.learn = learn
        self._inside = False  # inside a composite operator: only the outermost counts

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply an operator to fake tensors."""
        kwargs = kwargs or {}
        self._forget_constants((args, kwargs))
        if self._inside or not _may_differ(func, args, kwargs):
            if func in _READ_ELEMENTS:
                raise DataDependentOutputException(func)
            return super().dispatch(func, types, args, kwargs)
        self._inside = True
        try:
            result = super().dispatch(func, types, args, kwargs)
        finally:
            self._inside = False
        strides = self._strides(func, args, kwargs)
        return result if strides is None else _restrided(result, strides, self)

    def _forget_constants(self, arguments: Any) -> None:
        """Treat tensors whose elements torch knows like others, if a number is a symbol.

        torch would compute the elements of the result with NaN for the number.
        """
        leaves = list(flatten(arguments))
        if any(isinstance(leaf, (torch.SymFloat, torch.SymInt, torch.SymBool)) for leaf in leaves):
            for leaf in leaves:
                if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                    self.fake_tensor_converter.invalidate_constant_aliases(leaf.constant)

    def _strides(
        self, func: OpOverload[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Strides | None:
        key = _key(func, args, kwargs)
        if key not in _known:
            if not self.learn:
                return None
            _known.use(key, _real_strides(func, args, kwargs))
        return _known[key]


def _may_differ(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the real kernel chooses the strides: it allocates, and an argument has gaps."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False  # a user's operator, whose kernel may have side effects
    schema = func._schema
    name = schema.name.partition("::")[2]
    returns_alias = any(item.alias_info is not None for item in schema.returns)
    if name in _CONTIGUOUS or schema.is_mutable or returns_alias:
        return False
    given = [leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(isinstance(leaf, FakeTensor) and _has_known_strides(leaf) for leaf in given):
        return False
    return not all(leaf.is_contiguous() for leaf in given)


def _has_known_strides(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not strided or not all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return False  # sizes that depend on data are symbols
    return tensor.numel() > 0 and tensor.device.type != "meta"


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    settings = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    return func, settings, repr(transform(_properties, (list(args), dict(kwargs))))


def _properties(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymFloat):
        return torch.SymFloat  # its value is unknown, and no layout depends on it
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flags = leaf.is_conj(), leaf.is_neg()
    return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, *flags


def _real_strides(
    func: OpOverload[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Strides | None:
    """Return the strides of the real kernel's results for such tensors; None if it fails."""
    device = next(leaf.device for leaf in flatten((args, kwargs)) if isinstance(leaf, torch.Tensor))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if any(isinstance(leaf, torch.Generator) for leaf in flatten((args, kwargs))):
        return None  # the kernel would advance the generator
    if draws and device.type != "cpu":
        return None  # some of these abort the process on an accelerator if given zeros
    number = 1 if torch.Tag.pointwise in func.tags else 0  # indices must be 0; divisors must not
    with no_dispatch():
        before = torch.default_generator.get_state() if draws else None
        try:
            given, named = transform(lambda leaf: _real(leaf, number), (tuple(args), dict(kwargs)))
            result = func(*given, **named)
        except Exception:  # kernels raise many kinds of errors
            return None
        finally:
            if before is not None:
                torch.default_generator.set_state(before)
    made = [leaf for leaf in flatten(result) if isinstance(leaf, torch.Tensor)]
    return tuple([leaf.stride() if leaf.layout is torch.strided else None for leaf in made])


def _real(leaf: Any, number: int) -> Any:
    """Return a tensor with the memory layout of a fake one, and a number for one that is unknown."""
    if isinstance(leaf, torch.SymFloat):
        return 1.0
    if not isinstance(leaf, torch.Tensor):
        return leaf
    memory = torch.full((span(leaf),), number, dtype=leaf.dtype, device=leaf.device)
    made = memory.as_strided(leaf.shape, leaf.stride())
    made = made.conj() if leaf.is_conj() else made
    return made._neg_view() if leaf.is_neg() else made


def _restrided(result: Any, strides: Strides, mode: FakeTensorMode) -> Any:
    """Return fake results with these strides."""
    wanted = iter(strides)
    if len(strides) != sum(isinstance(leaf, torch.Tensor) for leaf in flatten(result)):
        return result

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        right = next(wanted)
        if right is None or len(right) != leaf.dim() or right == leaf.stride():
            return leaf
        with mode:
            return torch.empty_strided(leaf.shape, right, dtype=leaf.dtype, device=leaf.device)

    return transform(change, result)


# ---- logs


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the traceback that torch logs if an operator cannot run on fake tensors.

    The error that follows contains the same information in one line.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_other(record: logging.LogRecord) -> bool:  # one per use, so that uses may overlap
        return not str(record.msg).startswith("failed while attempting to run meta")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
