"""Fused graphs: the laws hold for them, and they do what the graph does if their kernels do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import autosched as asc
from autosched.fusion.region import Region
from tests.fusion.regions import call, compiled_by, drawn_groups, fused, needs_compiler, region
from tests.strategies import graphs, outcome


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, item in expected.items() if not torch.equal(found[name], item)] == []


@given(graph=graphs(most=20), drawn=drawn_groups)
def test_a_fused_graph_does_what_the_graph_does(graph: asc.Graph, drawn: Sequence[str]) -> None:
    with compiled_by():
        found = fused(graph, drawn)
        expected = outcome(graph.run_serial, graph)
        for _ in range(2):
            assert_equal(outcome(found.run_serial, graph), expected)
    regions = [task.fn for task in found.tasks if isinstance(task.fn, Region)]
    assert [region.failure for region in regions if region.failure] == []


# ---- kernels

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
COUNT = 4  # tensors that a program has; each has 2 x 2 elements

# What a step does to tensors a, b and c, with a constant k and a number n that is read from one.
STEPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, c, k, n: a.add_(b @ c, alpha=k),
    "sub": lambda a, b, c, k, n: a.sub_(b, alpha=k),
    "add number": lambda a, b, c, k, n: a.add_(b @ b, alpha=n),
    "mul number": lambda a, b, c, k, n: a.mul_(n),
    "addcmul": lambda a, b, c, k, n: a.addcmul_(b, c, value=k),
    "addcmul number": lambda a, b, c, k, n: a.addcmul_(b, c, value=n),
    "copy": lambda a, b, c, k, n: a.copy_(b),
    "swap": lambda a, b, c, k, n: _swap(a, b),
    "rotate": lambda a, b, c, k, n: _rotate(a, b, c),
    "write a part": lambda a, b, c, k, n: a[0].copy_(b[:, 1]),
    "scale a part": lambda a, b, c, k, n: a.t()[1].mul_(k).add_(c[0]),
    "list": lambda a, b, c, k, n: torch._foreach_add_([a, b], [c, c.clone()], alpha=k),
    "list number": lambda a, b, c, k, n: torch._foreach_mul_([a, b], n),
    "list numbers": lambda a, b, c, k, n: torch._foreach_addcmul_([a], [b], [c], [n * 0.5 + 1]),
    "cast": lambda a, b, c, k, n: a.copy_(b.to(torch.complex128) + c),
    "choose": lambda a, b, c, k, n: a.copy_(torch.where(b.real > c.real, b, a)),
    "relax": lambda a, b, c, k, n: a.copy_(a + (b - a) * 0.3),
}


def _swap(a: Tensor, b: Tensor) -> None:
    before = a.clone()
    a.copy_(b)
    b.copy_(before)


def _rotate(a: Tensor, b: Tensor, c: Tensor) -> None:
    before = a.t().clone()
    a.copy_(b.view(4).view(2, 2))
    b.copy_(c)
    c.copy_(before.t())


Program = list[tuple[str, int, int, int, int]]
programs = st.lists(
    st.tuples(
        st.sampled_from(sorted(STEPS)),
        *(st.integers(0, COUNT - 1) for _ in range(3)),
        st.sampled_from([-2, -1, 0, 1, 2, 3]),
    ),
    min_size=2,
    max_size=14,
)


def result_of(program: Program, *tensors: Tensor) -> list[Tensor]:
    """Run a program on tensors; it keeps old values, and returns them."""
    old = []
    for name, i, j, k, factor in program:
        apart = len({i, j, k}) == 3
        a = tensors[i]
        b = tensors[j if apart else (i + 1) % COUNT]
        c = tensors[k if apart else (i + 2) % COUNT]
        old.append(a.clone())
        STEPS[name](a, b, c, factor, tensors[-1].real.sum().item() * 0.25 + factor)
        old.append(b * 1)
    return old


def tensors_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(-2, 3, (COUNT, 2, 2), generator=generator)
    scalar = torch.tensor([1.0, 0.5], dtype=torch.float64)
    return [*drawn.to(dtype).clone().unbind(), scalar]


@needs_compiler
@settings(max_examples=max(2, settings().max_examples // 25), phases=[Phase.generate])
@given(drawn=st.lists(st.tuples(programs, st.sampled_from(DTYPES)), min_size=6, max_size=6))
def test_kernels_compute_what_operators_do(drawn: list[tuple[Program, torch.dtype]]) -> None:
    """Several programs are one region, since a compilation takes seconds."""

    def run(*tensors: Tensor) -> list[Tensor]:
        parts = [tensors[i : i + COUNT + 1] for i in range(0, len(tensors), COUNT + 1)]
        pairs = zip(drawn, parts, strict=True)
        return [item for (program, _), part in pairs for item in result_of(program, *part)]

    def given_again() -> list[Tensor]:
        return [
            each.clone()
            for program, dtype in drawn
            for each in tensors_of(dtype if fits(program, dtype) else torch.float64)
        ]

    twins = given_again()
    expected = run(*twins)
    made = region(run, inputs=len(twins), outputs=len(expected))
    for compares in (False, True):
        made.compares = compares
        found_in = given_again()
        found = call(made, *found_in)
        assert made.failure is None
        for one, other in zip((*found, *found_in), (*expected, *twins), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


def fits(program: Program, dtype: torch.dtype) -> bool:
    """Whether operators of a program take tensors of this dtype."""
    try:
        result_of(program, *tensors_of(dtype))
    except RuntimeError:
        return False
    return True
