"""Torch's own operator samples through regions: results, writes, dtypes and strides are those of eager mode."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import autosched as asc
from autosched._lib.tree import transform
from autosched.coarsening import merged
from autosched.codegen.composite import Composite
from autosched.costs.estimate import estimate
from autosched.fusion.candidates import unfusable
from autosched.fusion.region import Region
from autosched.fusion.rewriting import takes_number
from tests.frontends.op_samples import Sample, operators
from tests.fusion.operators import (
    DTYPES,
    batches,
    runs,
    sample_of,
    together,
    traced_differences,
)
from tests.fusion.regions import compiled_by, needs_compiler

aten = torch.ops.aten

# Why samples are not traced.
REASONS = (
    "draws random numbers",
    "size depends on data",
    "DynamicOutputShapeException",
    "DataDependentOutputException",
    "data-dependent expression",
    "depends on the memory around its argument",
    "an argument gets another shape",
    "not dense",
    "takes a number that is read from a tensor",
    "its data is not allocated",
    "local_scalar_dense/item NYI for torch.complex64",
    "which is no argument",
    "output has alias annotations",
)


def samples(
    ops: list[Any], dtypes: Callable[[int, list[torch.dtype]], list[torch.dtype]]
) -> list[Sample]:
    """Return the samples of operators that torch runs; ``dtypes`` chooses among those of each."""
    found = [
        sample_of(op, dtype, form)
        for i, op in enumerate(ops)
        for dtype in dtypes(i, [d for d in DTYPES if d in op.supported_dtypes("cpu")])
        for form in ("function", "in place")
    ]
    return [sample for sample in found if sample is not None and runs(sample)]


def in_turn(i: int, known: list[torch.dtype]) -> list[torch.dtype]:
    """Return the first dtype, which is float32 but for whole numbers, or in turn another one."""
    return known[:1] if i % 2 else known[i // 2 % max(1, len(known)) :][:1]


def check(given: list[Sample]) -> None:
    """Trace samples, several in one region: most are as in eager mode, and others are refused."""
    found = differences(given)
    assert {k: v for k, v in found.items() if not any(reason in v for reason in REASONS)} == {}
    assert len(found) < len(given) / 8


def test_operators_are_traced_as_they_are() -> None:
    """Every 30th operator; all of them, in every dtype, take longer."""
    given = samples(operators()[::30], in_turn)
    check(given)
    assert len(given) > 20


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(4))
def test_operators_are_traced_or_refused_in_every_dtype(piece: int) -> None:
    check(samples(operators()[piece::4], lambda i, known: known))


# ---- operators on lists


def overloads(start: str) -> Iterator[Any]:
    """Yield the overloads of all operators whose names begin so, without those with ``out``."""
    for name in dir(aten):
        if name.startswith(start):
            packet = getattr(aten, name)
            yield from (getattr(packet, each) for each in packet.overloads() if "out" not in each)


# In each run every third operator, in the long ones all of them in every dtype.
THIRD = 3
EVERY = [
    pytest.param(DTYPES[0], THIRD, id=f"some of {DTYPES[0]}"),
    *(pytest.param(dtype, 1, marks=pytest.mark.slow, id=str(dtype)) for dtype in DTYPES),
]
LISTS = list(overloads("_foreach_"))
# Fake tensors refuse numbers that are one tensor, and a factor that is read from a tensor.
NOT_ON_FAKES = {
    False: {f"aten._foreach_{name}.Tensor" for name in ("addcdiv", "addcmul")}
    | {f"aten._foreach_{name}_.Tensor" for name in ("addcdiv", "addcmul")},
    True: {"aten._foreach_sub.List"},
}
if torch.__version__ < "2.12":  # which compares such an exponent with 1
    NOT_ON_FAKES[True] |= {str(op) for op in LISTS if "_foreach_pow" in str(op)}


def given_to(op: Any, dtype: torch.dtype, read: bool = False, shapes: int = 3) -> Sample:
    """Return a sample of an operator on lists; ``read``: its numbers are read from tensors.

    The last of the three tensors of a list is the first one again if there are only two ``shapes``.
    """
    torch.manual_seed(0)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    numbers = [2, 3, 1] if whole else [0.5, -1.5, 2.0]
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for item in op._schema.arguments:
        kind = str(item.type)
        value: Any = item.default_value
        if item.name == "ord":
            value = 1.0
        elif kind == "List[Tensor]":
            value = [tensor((n, n), dtype) for n in range(1, 1 + shapes)]
            value = [*value, value[0]][:3]
        elif kind == "Tensor":
            value = torch.tensor(numbers if item.name == "scalars" else numbers[0], dtype=dtype)
        elif kind in ("number", "List[number]"):
            value = numbers if kind == "List[number]" else numbers[0]
            value = transform(torch.tensor, value) if read else value
        if item.kwarg_only:
            named[item.name] = value
        else:
            positional.append(value)

    def fn(*args: Any, **kwargs: Any) -> Any:
        pairs = zip(op._schema.arguments, args, strict=False)
        own = [transform(number, arg) if is_number(item) else arg for item, arg in pairs]
        by_name = {item.name: item for item in op._schema.arguments}
        for key, arg in kwargs.items():
            kwargs[key] = transform(number, arg) if is_number(by_name[key]) else arg
        return op(*own, **kwargs)

    return Sample(f"{op} {dtype}", fn, tuple(positional), named)


def number(leaf: Any) -> Any:
    """Return the number that a tensor has."""
    return leaf.item() if isinstance(leaf, Tensor) else leaf


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of positive numbers."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape, dtype=dtype) * 0.8 + 0.1
    return torch.randint(1, 9, shape, dtype=dtype)


def wrong(given: list[Sample], at_least: int) -> dict[str, str]:
    """Return how samples differ that torch runs, of which there are so many."""
    able = [sample for sample in given if runs(sample)]
    assert len(able) >= at_least
    return differences(able)


def differences(given: list[Sample]) -> dict[str, str]:
    """Return how samples differ if they are traced."""
    found: dict[str, str] = {}
    with compiled_by():
        for batch in batches(given, 40):
            found |= traced_differences(batch)
    return found


def is_number(item: Any) -> bool:
    """Whether an argument of an operator is a number or a list of numbers."""
    return str(item.type) in ("number", "List[number]")


PLAIN = [op for op in LISTS if str(op) not in NOT_ON_FAKES[False]]
TAKERS = [
    op
    for op in LISTS
    if any(map(is_number, op._schema.arguments)) and str(op) not in NOT_ON_FAKES[True]
]


@pytest.mark.parametrize(("dtype", "step"), EVERY)
def test_operators_on_lists(dtype: torch.dtype, step: int) -> None:
    assert wrong([given_to(op, dtype) for op in PLAIN[::step]], 60 // step) == {}


@pytest.mark.parametrize(("dtype", "step"), EVERY[:-1])  # fake complex tensors look at such numbers
def test_operators_on_lists_with_numbers_that_are_read_from_tensors(
    dtype: torch.dtype, step: int
) -> None:
    assert wrong([given_to(op, dtype, read=True) for op in TAKERS[::step]], 20 // step) == {}


@pytest.mark.parametrize(("dtype", "step"), EVERY[:2])
def test_operators_on_lists_with_one_tensor_twice(dtype: torch.dtype, step: int) -> None:
    given = [given_to(op, dtype, shapes=2) for op in PLAIN[1::step]]
    assert wrong(given, 60 // step) == {}


# ---- factors

VECTOR, MATRIX, STACK = (3,), (3, 3), (2, 3, 3)
# By operator: the shapes of its arguments, and its factors.
FACTORS: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]] = {
    "add": ((MATRIX, VECTOR), ("alpha",)),
    "sub": ((MATRIX, VECTOR), ("alpha",)),
    "rsub": ((MATRIX, VECTOR), ("alpha",)),
    "addcmul": ((MATRIX, VECTOR, MATRIX), ("value",)),
    "addcdiv": ((MATRIX, VECTOR, MATRIX), ("value",)),
    "addmm": ((VECTOR, MATRIX, MATRIX), ("beta", "alpha")),
    "addmv": ((VECTOR, MATRIX, VECTOR), ("beta", "alpha")),
    "addr": ((MATRIX, VECTOR, VECTOR), ("beta", "alpha")),
    "addbmm": ((MATRIX, STACK, STACK), ("beta", "alpha")),
    "baddbmm": ((STACK, STACK, STACK), ("beta", "alpha")),
    "lerp": ((MATRIX, MATRIX), ("weight",)),
    "_add_relu": ((MATRIX, MATRIX), ("alpha",)),
    "_addmm_activation": ((VECTOR, MATRIX, MATRIX), ("beta", "alpha")),
    "celu": ((MATRIX,), ("alpha",)),
    "elu": ((MATRIX,), ("alpha", "scale", "input_scale")),
}
PAIRS = [(-2, 3), (0, 1), (1, 0), (3, -2)]
BROKEN = [(-0.7, 2.5), (0.5, 0.0), (2.5, -0.7), (0.0, 0.5)]


def scaled(name: str, dtype: torch.dtype, factors: Sequence[float], read: bool = False) -> Sample:
    """Return a call with factors; ``read``: they are read from tensors."""
    shapes, names = FACTORS[name.rstrip("_")]
    torch.manual_seed(0)
    args = [tensor(shape, dtype) for shape in shapes]
    given: list[Any] = [factors[i % 2] for i in range(len(names))]
    given = list(map(torch.tensor, given)) if read else given

    def fn(tensors: list[Tensor], numbers: list[Any]) -> Any:
        own = map(number, numbers)
        return getattr(aten, name)(*tensors, **dict(zip(names, own, strict=True)))

    return Sample(f"{name} {dtype} {factors}", fn, (args, given), {})


VARIANTS = [name + end for name in FACTORS for end in ("", "_") if hasattr(aten, name + end)]


@pytest.mark.parametrize(("dtype", "step"), EVERY)
def test_factors(dtype: torch.dtype, step: int) -> None:
    pairs = PAIRS if dtype is torch.int64 else PAIRS[:2] + BROKEN
    given = [scaled(name, dtype, pair) for pair in pairs for name in VARIANTS]
    assert wrong(given[::step], 60 // step) == {}


@pytest.mark.parametrize(("dtype", "step"), EVERY)
def test_factors_that_are_read_from_tensors(dtype: torch.dtype, step: int) -> None:
    takers = [name for name in VARIANTS if takes_number(name) and name not in ("sub", "rsub")]
    pairs = PAIRS if dtype is torch.int64 else BROKEN
    given = [scaled(name, dtype, pair, read=True) for pair in pairs for name in takers]
    assert wrong(given[::step], 20 // step) == {}


@pytest.mark.parametrize("name", ["sub", "rsub", *itertools.filterfalse(takes_number, FACTORS)])
def test_factors_that_are_read_where_that_is_refused(name: str) -> None:
    sample = scaled(name, torch.float32, (0.5, 2.5), read=True)
    with compiled_by():
        (said,) = traced_differences([sample]).values()
    assert "takes a number that is read from a tensor" in said or "data-dependent" in said


# ---- torch's operator samples, with their gradients, compiled by Inductor: several in one region

PIECES = 20
RUNS = 3  # all of them compared
OPEN = (
    "cannot be captured",
    "only dense ones can be captured",
    "is a conjugate or negative view",
    "depends on the memory",
    "takes a number that is read from a tensor",
)


def fused(samples: Sequence[Sample]) -> tuple[asc.Graph, list[Region]]:
    """Return a graph of all samples, and its regions: one, unless dependencies forbid it."""
    fn, given = together(samples)
    graph = asc.capture(lambda *args: fn(*args), *given)
    reasons = unfusable(graph, estimate(graph, graph.feed(*given)).unknown)
    able = (task for task in graph.tasks if not task.view and task.name not in reasons)
    regions: list[Region] = []

    def make(composite: Composite) -> tuple[Any, None]:
        if any(task.name in reasons for task in composite.tasks):
            return composite, None
        regions.append(Region(composite, 1))
        return regions[-1], None

    return merged(graph, {task.name: "all" for task in able}, make), regions


def compiled_differences(samples: Sequence[Sample]) -> dict[str, str]:
    """Return what is said of samples whose kernels differ, or cannot be compiled, by name."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            graph, regions = fused(samples)
            for _ in range(RUNS):
                given = [tensor for sample in samples for tensor in sample.copies()]
                torch.manual_seed(1)
                with torch.no_grad():
                    graph.finish(graph.run_serial(**graph.feed(*given)))
            said = [region.failure for region in regions if region.failure is not None]
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"]
    said += [str(each.message) for each in caught if "differ from" in str(each.message)]
    if not said or len(samples) == 1:
        return {sample.name: " ".join(said) for sample in samples if said}
    middle = len(samples) // 2
    return compiled_differences(samples[:middle]) | compiled_differences(samples[middle:])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_operators_are_as_they_are(piece: int, dtype: torch.dtype) -> None:
    found = compiled_differences(given(piece, PIECES, dtype))
    assert {k: v for k, v in found.items() if not any(text in v for text in OPEN)} == {}


def given(piece: int, pieces: int, dtype: torch.dtype) -> list[Sample]:
    """Return samples of every so many-th operator, with gradients where it has some."""
    found = [
        sample_of(op, dtype, "backward") or sample_of(op, dtype, "function")
        for op in operators()[piece::pieces]
    ]
    return [sample for sample in found if sample is not None and runs(sample)]
