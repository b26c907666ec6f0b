"""What a recorded torch function does to its arguments: which it writes, which its result shares memory with.

Knows names only, never torch itself. A function that is in no table here reads its arguments and returns
fresh memory. ``MAY_ALIAS`` lists those whose result can be their argument: treating a copy as a view is safe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Effects", "effects_of", "function_name"]

VIEWS = frozenset(
    "__getitem__ getitem T mT H mH real imag alias as_strided chunk detach diagonal expand expand_as hsplit vsplit "
    "dsplit movedim moveaxis narrow permute select slice split split_with_sizes tensor_split squeeze swapaxes swapdims "
    "t transpose adjoint unbind unflatten unfold unsqueeze view view_as view_as_real view_as_complex".split()
)
MAY_ALIAS = frozenset(
    "reshape reshape_as flatten contiguous ravel to type type_as float double half bfloat16 int long bool cpu cuda "
    "atleast_1d atleast_2d atleast_3d broadcast_to positive resolve_conj resolve_neg conj".split()
)

# Functions that write arguments no name gives away: name -> positions (and keywords) written when training.
BATCH_NORMS: Mapping[str, tuple[tuple[int, str], ...]] = {
    "batch_norm": ((1, "running_mean"), (2, "running_var")),
    "instance_norm": ((1, "running_mean"), (2, "running_var")),
}
IN_PLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
) | {"__setitem__", "setitem"}
RANDOM = frozenset(
    "AlphaDropout Dropout "
    "alpha_dropout bernoulli bernoulli_ cauchy_ dropout dropout1d dropout2d dropout3d exponential_ "
    "feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ "
    "gumbel_softmax log_normal_ multinomial normal normal_ poisson rand rand_like randint randint_like randn "
    "randn_like random_ randperm rrelu rrelu_ scaled_dot_product_attention uniform_".split()
)
_TRAINING_ARGUMENT = 5  # of F.batch_norm(x, mean, var, weight, bias, training, ...) and torch.batch_norm alike


class Effects(NamedTuple):
    """What a call does: the arguments it writes, the one whose memory its result may share, and more."""

    writes: Sequence[Any] = ()
    base: Any = None
    view: bool = False  # only another look at the base's memory, at no cost
    random: bool = False
    in_place: bool = False  # returns what it wrote


def effects_of(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Effects:
    """Return what ``fn`` does by torch's own conventions; of a function that is not torch's, nothing is known.

    >>> import operator
    >>> effects_of(operator.setitem, ["x", 0, 1.0], {}).writes
    ['x']
    """
    home = getattr(fn, "__module__", None) or getattr(getattr(fn, "__objclass__", None), "__module__", None) or ""
    if home.partition(".")[0] not in ("torch", "_operator") and home != "autosched.value":
        return Effects()
    name = _raw_name(fn)
    writes = _written(name, args, kwargs)
    shares = name in VIEWS or (name in MAY_ALIAS and not kwargs.get("copy", False))
    base = args[0] if shares and args else None
    view = name in VIEWS and all(_is_basic(key) for key in args[1:] if name in ("__getitem__", "getitem"))
    return Effects(writes, base, view, name in RANDOM, bool(writes) and name not in BATCH_NORMS)


def _is_basic(key: Any) -> bool:
    """Whether an index makes a view; masks and tensors of numbers make a copy."""
    if isinstance(key, tuple):
        return all(map(_is_basic, key))
    return key is None or key is ... or isinstance(key, (int, slice))


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that the torch function ``name`` writes in place, by torch's own conventions.

    A name that ends in one underscore, ``inplace=True``, ``out=``, ``__setitem__`` and the batch norms.
    """
    written: list[Any] = []
    in_place = (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS
    if (in_place or kwargs.get("inplace") is True) and args:
        written.append(args[0])
    out = kwargs.get("out")
    if out is not None:
        written.extend(out if isinstance(out, (tuple, list)) else [out])
    for position, keyword in BATCH_NORMS.get(name, ()):
        training = kwargs.get("training", kwargs.get("use_input_stats", True))
        if len(args) > _TRAINING_ARGUMENT:
            training = args[_TRAINING_ARGUMENT]
        value = args[position] if len(args) > position else kwargs.get(keyword)
        if training and value is not None:
            written.append(value)
    return written


def _raw_name(fn: Callable[..., Any]) -> str:
    """Return the name under which the tables know ``fn``; Python's ``operator.and_`` is not torch's in-place form."""
    if getattr(fn, "__module__", None) == "_operator":
        return f"__{fn.__name__.strip('_')}__"
    name = getattr(fn, "__name__", None) or type(fn).__name__
    if name == "__get__":  # a property of Tensor, such as T: the descriptor behind it has the name
        name = getattr(getattr(fn, "__self__", None), "__name__", name)
    return str(name).partition(".")[0]  # an ATen overload is called mm.default


def function_name(fn: Callable[..., Any] | None) -> str:
    """Return the name that tasks made from ``fn`` get.

    >>> import operator
    >>> function_name(operator.matmul), function_name(lambda x: x)
    ('matmul', 'lambda')
    """
    return (re.sub(r"\W", "", _raw_name(fn)).strip("_") if fn is not None else "") or "task"
