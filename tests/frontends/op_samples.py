"""The samples of torch's own operator tests (``op_db``), run eagerly, by capture and by a schedule.

Knows no operator but those of ``UNDEFINED`` and ``LAYOUTS``.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import autosched as asc
from autosched._lib.tree import flatten, transform
from autosched.testing.checking import scattered
from autosched.testing.comparing import difference

FORMS = ("function", "in place", "backward")

# Operators of which two eager calls need not return the same, and why.
UNDEFINED = {
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "empty_permuted": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
}

# Gradients that torch computes by other operators where it is traced: the same numbers, in memory
# of another order.
LAYOUTS = {"ormqr": "its gradient is concatenated where it is traced, and copied into place else"}

MACHINE = asc.Machine.emulated(gpus=2)


@dataclass(frozen=True)
class Sample:
    """A call of a function of torch, by name."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, each once."""
        found = (leaf for leaf in flatten((self.args, self.kwargs)) if isinstance(leaf, Tensor))
        return list({id(tensor): tensor for tensor in found}.values())

    def on(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Call the function on other tensors; return its results as one list."""
        twins = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}

        def twin(leaf: Any) -> Any:
            return twins[id(leaf)] if isinstance(leaf, Tensor) else leaf

        args, kwargs = transform(twin, (self.args, self.kwargs))
        return [leaf for leaf in flatten(self.fn(*args, **kwargs)) if leaf is not None]

    def copies(self) -> list[Tensor]:
        """Return copies of the tensors, with their strides."""
        return list(map(_copy, self.tensors))


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    made.copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def operators() -> list[Any]:
    """Return torch's table of operators, without those of ``UNDEFINED`` and those that no CPU has."""
    if (
        "expecttest" not in sys.modules
    ):  # of which torch's module needs a class to inherit from, for tests of its own
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    flag = "__allow_nonbracketed_mutation_flag"  # which the import takes away, and other tests set such flags
    before = getattr(torch.backends, flag)
    from torch.testing._internal.common_methods_invocations import op_db

    setattr(torch.backends, flag, before)
    # The samples' own form switches the dispatcher off, so that no tracer would see it.
    torch.testing._utils.freeze_rng_state = torch.random.fork_rng
    return [op for op in op_db if op.supported_dtypes("cpu") and op.name not in UNDEFINED]


def samples(op: Any, dtype: torch.dtype, form: str) -> Iterator[Sample]:
    """Yield the samples of an operator in a form; none if it has no such form for this dtype.

    Forms are ``function``, ``in place``, and ``backward``, which differentiates the results, too.
    """
    fn = op.inplace_variant if form == "in place" else op.op
    is_backward = form == "backward"
    if fn is None or dtype not in op.supported_dtypes("cpu"):
        return
    if is_backward and not (op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")):
        return
    torch.manual_seed(0)
    for given in op.sample_inputs("cpu", dtype, requires_grad=is_backward):
        if form != "in place" or not given.broadcasts_input:
            yield Sample(
                f"{op.formatted_name} {form}",
                _differentiated(fn) if is_backward else fn,
                (given.input, *given.args),
                given.kwargs,
            )


def _differentiated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that also returns the gradients of its results."""

    def both(*args: Any, **kwargs: Any) -> Any:
        made = fn(*args, **kwargs)
        leaves = (leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Tensor))
        wanted = list({id(leaf): leaf for leaf in leaves if leaf.requires_grad}.values())
        found = [leaf for leaf in flatten(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not found or not wanted:
            return made
        weights = [leaf.detach() * 0 + _ramp(leaf) for leaf in found]
        grads = torch.autograd.grad(found, wanted, weights, allow_unused=True)
        return [leaf.detach() for leaf in flatten(made) if isinstance(leaf, Tensor)], grads

    return both


def _ramp(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, like.numel()).to(like.dtype).reshape(like.shape)


def dtype_of(op: Any) -> torch.dtype:
    """Return the dtype of an operator's samples: float32, if it knows that."""
    known = op.supported_dtypes("cpu")
    wanted = (torch.float32, torch.int64, torch.bool)
    return next((dtype for dtype in wanted if dtype in known), sorted(known, key=str)[0])


def outcome(sample: Sample, run: Callable[..., list[Any]] | None = None) -> list[Any]:
    """Return the results of a sample, or of what runs it, and its arguments afterwards."""
    given = sample.copies()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [*(sample.on(given) if run is None else run(*given)), *given]


def examine(sample: Sample) -> str | None:
    """Return how capture or a schedule differs from eager; None where all are equal.

    What begins with ``eager:`` is what torch raises, and with ``refused:`` what we say.
    """
    try:
        expected = outcome(sample)
    except Exception as error:  # on this machine, or with gradients of this form
        return f"eager: {error}"
    try:
        graph = asc.capture(lambda *tensors: sample.on(tensors), *sample.copies())
    except asc.AutoschedError as error:
        return f"refused: {error}"

    def serially(*given: Tensor) -> Any:
        return graph.finish(graph.run_serial(**graph.feed(*given)))

    def scheduled(*given: Tensor) -> Any:
        how = {"policy": scattered(0), "outputs": "cpu", "backend": "virtual", "check": True}
        with asc.schedule(graph, MACHINE, **how) as schedule:
            return graph.finish(schedule(**graph.feed(*given)))

    for way in (serially, scheduled):
        try:
            found = outcome(sample, way)
        except Exception as error:
            return f"{way.__name__} raises {type(error).__name__}: {error}"
        wrong = difference(expected, found)
        if wrong is None and sample.name.partition(" ")[0] not in LAYOUTS:
            wrong = _layout(expected, found)
        if wrong is not None:
            return f"{way.__name__} {wrong}"
    return None


def _layout(expected: Any, found: Any) -> str | None:
    """Return where tensors lie in memory in another way."""
    for a, b in zip(flatten(expected), flatten(found), strict=True):
        if isinstance(a, torch.Tensor) and a.layout == torch.strided and a.numel():
            strides = [
                [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (a, b)
            ]
            if strides[0] != strides[1]:
                return (
                    f"has strides {b.stride()} instead of {a.stride()}, of shape {tuple(a.shape)}"
                )
            if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
                return "is conjugated or negated when it is read, on one side only"
    return None
