"""The samples of torch's own operator tests (``op_db``), run eagerly, by capture and by a schedule.

Knows no operator but those of ``UNDEFINED``.
"""

import copy
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

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
class Case:
    """A sample: a function of torch's, its arguments, and how it is called."""

    name: str
    form: str
    fn: Any
    given: tuple[Any, tuple[Any, ...], dict[str, Any]]

    def arguments(self) -> Any:
        """Return copies of the arguments: what shares memory shares memory in the copies."""
        twins: dict[int, Any] = {}
        memo: dict[int, Any] = {}

        def bare(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            twin = twins.setdefault(id(leaf), leaf.detach())
            if twin.layout != torch.strided:  # deepcopy asks for a storage
                memo[id(twin)] = twin.clone()
            return twin

        given = copy.deepcopy(transform(bare, self.given), memo)
        if self.form == "backward":
            for old, new in zip(flatten(self.given), flatten(given), strict=True):
                if isinstance(old, torch.Tensor) and old.requires_grad:
                    new.requires_grad_()
        return given

    def step(self, first: Any, args: Any, kwargs: Any) -> Any:
        """Call the function; also differentiate what it returns, where this is asked for."""
        if self.form == "in place":
            first = first.clone()
        result = self.fn(first, *args, **kwargs)
        if self.form != "backward":
            return result
        wanted = [leaf for leaf in flatten((first, args, kwargs)) if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in wanted if leaf.requires_grad]
        found = [
            leaf
            for leaf in flatten(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not found or not wanted:
            return result
        weights = [
            torch.linspace(0.5, 1.5, leaf.numel()).to(leaf.dtype).reshape(leaf.shape)
            for leaf in found
        ]
        grads = torch.autograd.grad(found, wanted, weights, allow_unused=True)
        return [leaf.detach() for leaf in found], grads


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


def cases(op: Any, form: str) -> Iterator[Case]:
    """Yield the samples of an operator in a form; none if it has no such form."""
    fn = op.inplace_variant if form == "in place" else op.op
    dtype = _dtype(op)
    if fn is None or (
        form == "backward" and not (op.supports_autograd and dtype.is_floating_point)
    ):
        return
    torch.manual_seed(0)
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=form == "backward")):
        if form != "in place" or not sample.broadcasts_input:
            yield Case(
                f"{op.formatted_name}[{i}] {form}",
                form,
                fn,
                (sample.input, sample.args, sample.kwargs),
            )


def _dtype(op: Any) -> torch.dtype:
    known = op.supported_dtypes("cpu")
    wanted = (torch.float32, torch.int64, torch.bool)
    return next((dtype for dtype in wanted if dtype in known), sorted(known, key=str)[0])


def examine(case: Case) -> str | None:
    """Return how capture or a schedule differs from eager; None where all are equal.

    What begins with ``eager:`` is what torch raises, and with ``refused:`` what we say.
    """
    given = case.arguments()
    try:
        expected = _run(lambda: case.step(*given), given)
    except Exception as error:  # on this machine, or with gradients of this form
        return f"eager: {error}"
    try:
        graph = asc.capture(case.step, *case.arguments())
    except asc.AutoschedError as error:
        return f"refused: {error}"
    for way in (_serially, _scheduled):
        given = case.arguments()
        try:
            found = _run(
                lambda way=way, given=given: graph.finish(way(graph, graph.feed(*given))), given
            )
        except Exception as error:
            return f"{way.__name__} raises {type(error).__name__}: {error}"
        wrong = difference(expected, found)
        if wrong is None and case.name.partition("[")[0] not in LAYOUTS:
            wrong = _layout(expected, found)
        if wrong is not None:
            return f"{way.__name__} {wrong}"
    return None


def _serially(graph: asc.Graph, inputs: Any) -> Any:
    return graph.run_serial(**inputs)


def _scheduled(graph: asc.Graph, inputs: Any) -> Any:
    policy = scattered(0)
    with asc.schedule(
        graph, MACHINE, policy=policy, outputs="cpu", backend="virtual", check=True
    ) as schedule:
        return schedule(**inputs)


def _run(call: Any, given: Any) -> tuple[Any, Any]:
    """Return what a call returns, and what its arguments are afterwards."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(), given


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
