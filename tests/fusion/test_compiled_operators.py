"""Torch's operator samples, with their gradients, compiled by Inductor: several in one region.

What is known of a sample is kept in pytest's cache, so that an interrupted run goes on where it was;
``pytest --cache-clear`` begins anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autosched as asc
from autosched.coarsening.merging import merged
from autosched.codegen.composite import Composite
from autosched.costs.estimate import estimate
from autosched.fusion.candidates import unfusable
from autosched.fusion.region import Region
from tests.frontends.op_samples import operators
from tests.fusion.operators import DTYPES, Sample, runs, sample_of, together
from tests.fusion.regions import needs_compiler

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


def differences(samples: Sequence[Sample]) -> dict[str, str]:
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
    return differences(samples[:middle]) | differences(samples[middle:])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_operators_are_as_they_are(
    piece: int, dtype: torch.dtype, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    key = f"autosched/operators/{torch.__version__}/{dtype}/{piece}"
    found = pytestconfig.cache.get(key, None)
    if found is None:
        found = differences(given(piece, PIECES, dtype))
        pytestconfig.cache.set(key, found)
    assert {k: v for k, v in found.items() if not any(text in v for text in OPEN)} == {}


def given(piece: int, pieces: int, dtype: torch.dtype) -> list[Sample]:
    """Return samples of every so many-th operator, with gradients where it has some."""
    found = [
        sample_of(op, dtype, "backward") or sample_of(op, dtype, "function")
        for op in operators()[piece::pieces]
    ]
    return [sample for sample in found if sample is not None and runs(sample)]


@needs_compiler
@pytest.mark.slow
def test_some_compiled_operators_are_as_they_are() -> None:
    assert differences(given(7, 230, torch.float32)) == {}
