"""The estimated seconds of regions: what fusion saves, and what it cannot save."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import autosched as asc
from autosched.codegen.composite import Composite
from autosched.costs.estimate import estimate
from autosched.fusion.fusing import region_seconds
from autosched.measurement.tasks import least_work, work_of
from tests.fusion.regions import compiled_by

GPU = asc.Device("cuda:0", launch_seconds=1e-5)
SIZE = 1024
Build = Callable[[asc.Value], asc.Value]


def seconds(build: Build) -> tuple[float, float]:
    """Return the seconds of a region of these tasks, and their sum."""
    graph = asc.Graph()
    x = graph.input("x")
    y = build(x)
    graph.output(y=y)
    costs = estimate(graph, {"x": torch.empty(SIZE, SIZE, device="meta")}).costs
    composite = Composite(graph.tasks, [x.index], [y.index])
    tasks = sum(costs.task_seconds(task, GPU) for task in graph.tasks)
    return region_seconds(composite, graph.values, costs, GPU), tasks


def test_elementwise_operators_move_what_goes_in_and_out() -> None:
    one, _ = seconds(lambda x: x + 1)
    three, alone = seconds(lambda x: ((x + 1) * 2).sin())
    assert three == pytest.approx(one)
    assert alone == pytest.approx(3 * one)


def test_matrix_products_take_what_they_take() -> None:
    found, alone = seconds(lambda x: x @ x @ x)
    assert found == pytest.approx(alone)


def test_operators_around_a_product_are_launched_before_and_after_it() -> None:
    found, alone = seconds(lambda x: (((x + 1) * 2) @ x).sin().cos())
    product, _ = seconds(lambda x: x @ x)
    one, _ = seconds(lambda x: x + 1)
    assert product < found < alone
    assert found == pytest.approx(product + 2 * one, rel=0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.t() + 1,
        lambda x: x.sum(),
        lambda x: (x + 1).relu_().mul_(2),
        lambda x: torch.softmax(x @ x, 0) + x,
    ],
)
def test_a_region_never_takes_longer_than_its_tasks(build: Build) -> None:
    found, alone = seconds(build)
    assert 0 < found <= alone


def test_a_region_may_take_less_time_than_the_memory_traffic_of_its_tasks() -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(y=((x + 1) * 2).sin())
    merged = asc.merge(graph, {"add": "all", "mul": "all", "sin": "all"})
    with compiled_by():
        fused = asc.fuse(graph, asc.Machine.emulated(gpus=1))
    costs = estimate(graph, {"x": torch.empty(SIZE, SIZE, device="meta")}).costs
    ((task,), (region,)) = merged.tasks, fused.tasks
    assert least_work(task, costs) == work_of(task, costs) == work_of(region, costs)
    assert least_work(region, costs) == asc.Work(3 * SIZE**2, 0)
    assert least_work(region, asc.Costs()) is None


@pytest.mark.parametrize("size", [2, 3])
def test_merged_tasks_can_be_parts(size: int) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    y = x
    for _ in range(4):
        y = (y + 1).sin()
    graph.output(y=y @ x)
    examples = {"x": torch.empty(SIZE, SIZE, device="meta")}
    costs = estimate(graph, examples).costs
    groups = {task.name: f"part{i // size}" for i, task in enumerate(graph.tasks)}
    merged = asc.merge(graph, groups)
    found = region_seconds(
        Composite(merged.tasks, [0], [merged.outputs["y"]]), merged.values, costs, GPU
    )
    assert costs.task_seconds(graph.task("matmul"), GPU) < found
    assert found <= sum(costs.task_seconds(task, GPU) for task in graph.tasks)
