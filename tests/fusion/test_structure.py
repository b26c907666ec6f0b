"""The text of a region: the same for regions that do the same, in every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autosched as asc
from autosched.coarsening.merging import merged
from autosched.fusion.region import Region
from tests.fusion.regions import compiled_by, region_of

aten = torch.ops.aten


def built(scale: float = 2.0, name: str = "x", threads: int = 1, dim: int = 0) -> str | None:
    graph = asc.Graph()
    x = graph.input(name)
    rows = x[1:3]
    low, high = graph.add(aten.split.Tensor, rows * scale, 1, dim=dim, outputs=2)
    zeros = graph.add(torch.zeros, (1, 3), dtype=torch.float32, device=asc.Here("cpu"))
    graph.add(aten.add_.Tensor, high, low, outputs=())
    return region_of(graph, [high + zeros], threads).structure


TEXT = (
    "1 threads: %0 -> %1 = _operator.getitem(%0, 1:3:None); %2 = _operator.mul(%1, 2.0); "
    "%3, %4 = aten.split.Tensor(%2, 1, dim=0); "
    "%5 = torch._VariableFunctionsClass.zeros((1, 3), dtype=torch.float32, device=here); "
    "aten.add_.Tensor(%4, %3); %6 = _operator.add(%4, %5) -> %6"
)


def test_a_text_has_operators_and_constants_and_no_names() -> None:
    assert built() == built(name="other") == TEXT
    assert len({built(), built(scale=3.0), built(threads=2), built(dim=1)}) == 4


@pytest.mark.slow  # the test above compares with a text, in whatever process
def test_it_is_the_same_in_another_process() -> None:
    script = "from tests.fusion.test_structure import built; print(built())"
    root = Path(asc.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.stdout.strip() == TEXT, done.stderr


def own(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("fn", [own, lambda x: torch.add(x, 1)])
def test_functions_of_users_have_none(fn: Callable[[Tensor], Tensor]) -> None:
    graph = asc.Graph()
    made = region_of(graph, [graph.add(fn, graph.input("x"))])
    assert made.structure is None


def test_parts_of_parts_are_written_out() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=(x + 1) * 2)
    made = region_of(asc.merge(graph, {"add": "both", "mul": "both"}), [])
    assert made.structure == (
        "1 threads: %0 -> %1 = [%0 -> %1 = _operator.add(%0, 1); %2 = _operator.mul(%1, 2) -> %2]"
        "(%0) -> "
    )


def test_equal_regions_are_measured_once() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    for _ in range(2):
        x = graph.add(own, (x + 1) * 2)
    graph.output(y=x)
    with compiled_by() as compiled:
        groups = {"add": "a", "mul": "a", "add_1": "b", "mul_1": "b"}
        fused = merged(graph, groups, lambda composite: (Region(composite, 1), None))
        found = asc.measure_costs(fused, asc.Machine.local(gpus=0), {"x": torch.ones(1000)})
    assert found.seconds["a"] == found.seconds["b"]
    assert len(compiled) == 1
