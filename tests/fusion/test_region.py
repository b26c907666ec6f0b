"""Regions: what they are compiled for, what they share, and what they do where they cannot be compiled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autosched as asc
from tests.fusion.regions import call, compiled_by, region, region_of

Graphs = list[torch.fx.GraphModule]


@pytest.fixture
def compiled() -> Iterator[Graphs]:
    with compiled_by() as graphs:
        yield graphs


def twice(x: Tensor) -> Tensor:
    return x * 2 + 1


def thrice(x: Tensor) -> Tensor:
    return x * 3 + 1


# ---- what a region is compiled for


def test_regions_with_the_same_operators_are_compiled_once(compiled: Graphs) -> None:
    first, second, other = region(twice), region(twice), region(thrice)
    x = torch.rand(3)
    assert torch.equal(call(first, x), twice(x))
    assert torch.equal(call(second, x), twice(x))
    assert len(compiled) == 1
    assert torch.equal(call(other, x), thrice(x))
    assert len(compiled) == 2
    call(region(twice, threads=2), x)  # kernels for another number of threads
    assert len(compiled) == 3


def test_what_nobody_uses_any_more_is_not_kept(compiled: Graphs) -> None:
    first = region(twice)
    call(first, torch.ones(3))
    del first
    gc.collect()
    call(region(twice), torch.ones(3))
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(4),
        torch.rand(1, 3),
        torch.rand(6)[::2],
        torch.rand(3, dtype=torch.float64),
        torch.arange(3),
        torch.rand(3, dtype=torch.complex64),
        torch.tensor(2.0),
        torch.rand(0, 3),
    ],
    ids=lambda x: f"{x.dtype}{tuple(x.shape)}{x.stride()}",
)
def test_other_arguments_are_compiled_for_anew(compiled: Graphs, other: Tensor) -> None:
    made = region(twice)
    x = torch.rand(3)
    for arg in (x, other, x, other):
        found = call(made, arg)
        assert torch.equal(found, twice(arg))
        assert found.stride() == twice(arg).stride()
    assert len(compiled) == 2


def test_a_region_that_is_called_with_ever_new_sizes_gives_up(compiled: Graphs) -> None:
    made = region(twice)
    for size in range(1, 12):
        assert torch.equal(call(made, torch.ones(size)), torch.full((size,), 3.0))
    assert len(compiled) == 8
    assert made.failure == "it is called with more than 8 kinds of arguments"


def test_the_default_dtype_counts(compiled: Graphs) -> None:
    made, x = region(lambda x: x / 3), torch.arange(3)
    assert call(made, x).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert call(made, x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert call(made, x).dtype == torch.float32
    assert len(compiled) == 2


def test_autocast_casts_where_eager_mode_does_and_not_again_in_kernels() -> None:
    def product(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            exact = x @ x
        return x @ x + exact

    enabled: list[bool] = []

    def noting(graph: torch.fx.GraphModule, args: Any, threads: int) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            enabled.append(torch.is_autocast_enabled("cpu"))
            return graph(*args)

        return run

    x = torch.rand(4, 4)
    made = region(product)
    with compiled_by(noting) as graphs, torch.no_grad():
        assert torch.equal(made(x), product(x))
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                assert torch.equal(made(x), product(x))
                assert made(x).dtype == product(x).dtype
        assert torch.equal(made(x), product(x))
    assert len(graphs) == 3
    assert not any(enabled)


def test_one_tensor_for_two_arguments_says_nothing_of_the_next_call(compiled: Graphs) -> None:
    one, other = torch.rand(3), torch.rand(3)
    made = region(lambda x, y, z: x * 2 + y - z, inputs=3)
    for x, y, z in 3 * ((one, one, one), (one, other, one), (other, one, one)):
        assert torch.equal(call(made, x, y, z), x * 2 + y - z)
    assert len(compiled) == 1
    assert made.failure is None  # that calls are of more than eight kinds


def test_written_arguments_that_overlap_are_not_compiled_for(compiled: Graphs) -> None:
    graph = asc.Graph()
    x, y = graph.inputs("x", "y")
    x.mul_(2)
    y.add_(1)
    made = region_of(graph, [x + y])
    data = torch.ones(4)
    assert call(made, data, data).tolist() == [6.0] * 4
    assert call(made, data[:3], data[1:]).tolist() == [13.0, 14.0, 11.0]
    assert not compiled
    halves = torch.ones(4)
    for args in ((torch.ones(2), torch.ones(2)), (halves[:2], halves[2:])):
        assert call(made, *args).tolist() == [4.0] * 2
    assert len(compiled) == 1
    assert made.failure is None


# ---- results


def test_results_are_tensors_of_their_own_with_the_strides_of_eager_mode() -> None:
    def sharing(graph: Any, args: Any, threads: int) -> Callable[..., Any]:
        def run(x: Tensor) -> list[Tensor]:
            once = x.t() + 1
            long = torch.cat([x, x])
            return [x, once, once, once.contiguous(), long[:2], long[2:]]

        return run

    def six(x: Tensor) -> tuple[Tensor, ...]:
        again = x.t() + 1
        return x + 0, x.t() + 1, again, x.t() + 1, x.clone(), x.clone()

    x = torch.rand(2, 3)
    with compiled_by(sharing):
        made = region(six, outputs=6)
        for _ in range(2):
            found = call(made, x)
            for result, expected in zip(found, six(x), strict=True):
                assert torch.equal(result, expected)
                assert result.stride() == expected.stride()
                assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            before = [result.clone() for result in found]
            for i, result in enumerate(found):
                result.add_(1)
                before[i] += 1
                assert all(map(torch.equal, found, before))
    assert torch.equal(x + 1, found[0])


def test_strides_are_those_of_eager_mode_where_torch_predicts_others(compiled: Graphs) -> None:
    def floored(x: Tensor, y: Tensor) -> Tensor:
        return torch.div(x, y, rounding_mode="floor")

    x, y = torch.rand(5, 5).t(), torch.rand(1, 5).t() + 1
    made = region(floored, inputs=2)
    assert call(made, x, y).stride() == floored(x, y).stride()
    assert made.failure is None


def test_a_region_may_have_no_results(compiled: Graphs) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    x.mul_(2).add_(1)
    made, data = region_of(graph, []), torch.ones(2)
    assert call(made, data) == ()
    assert data.tolist() == [3.0, 3.0]


def test_arguments_are_not_kept_alive(compiled: Graphs) -> None:
    made, x = region(twice), torch.ones(3)
    storage = x.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    call(made, x)
    gc.collect()
    assert torch._C._storage_Use_Count(storage._cdata) == before  # type: ignore[attr-defined]


# ---- numbers


def test_floats_are_inputs_and_results(compiled: Graphs) -> None:
    graph = asc.Graph()
    x, rate = graph.inputs("x", "rate")
    step = graph.add(torch.ops.aten._local_scalar_dense.default, x[0], name="step")
    scale = rate / (1 - 0.9**step)
    made = region_of(graph, [x * scale, scale])
    for first, given in ((1.0, 0.1), (2.0, 0.3), (3.0, 0.2)):
        tensor = torch.tensor([first, 5.0])
        expected = given / (1 - 0.9**first)
        product, number = call(made, tensor, given)
        assert type(number) is float
        assert number == expected
        assert torch.equal(product, tensor * expected)
    assert made.failure is None
    assert len(compiled) == 1
    other = call(made, tensor, torch.tensor(0.5))  # a tensor where a float was
    assert torch.equal(other[0], tensor * (torch.tensor(0.5) / (1 - 0.9**3.0)))


# ---- what is not compiled


class Own(Tensor):
    """A tensor whose functions may do anything."""


@pytest.mark.parametrize(
    ("arg", "reason"),
    [
        (torch.rand(3, dtype=torch.complex64).conj(), "is a conjugate or negative view"),
        (torch.rand(3, dtype=torch.complex64).conj().imag, "is a conjugate or negative view"),
        (torch.ones(3).to_sparse(), "is not dense"),
        (torch.ones(3).as_subclass(Own), "is a Own"),
        (3, "is neither a tensor nor a float"),
    ],
    ids=["conj", "neg", "sparse", "subclass", "number"],
)
def test_unusual_arguments_run_unfused(compiled: Graphs, arg: Any, reason: str) -> None:
    made = region(lambda x: x * 2)
    for _ in range(2):
        x = torch.rand(3)
        assert torch.equal(call(made, x), x * 2)
        found = call(made, arg)
        assert type(found) is type(arg * 2)
        assert str(found) == str(arg * 2)
    assert made.failure == f"an argument {reason}"
    assert len(compiled) == 1


def test_tasks_without_tensors_run_on_the_device_of_their_region(compiled: Graphs) -> None:
    graph = asc.Graph()
    made = region_of(graph, [graph.add(torch.zeros, 2, device=asc.Here("cpu")) + 1])
    for device in ("cpu", "meta"):
        assert call(made, torch.device(device)).device.type == device
    assert made.failure == "it takes no tensor"


def test_a_device_counts_even_if_it_is_not_that_of_the_tensors(compiled: Graphs) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    made = region_of(graph, [x + 1, graph.add(torch.zeros, 2, device=asc.Here("cpu"))])
    for device in ("cpu", "meta", "cpu"):
        _, zeros = call(made, torch.ones(2), torch.device(device))
        assert zeros.device.type == device


def test_errors_of_tasks_are_those_of_eager_mode(compiled: Graphs) -> None:
    made = region(lambda x, y: x @ y, inputs=2)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        call(made, torch.ones(2, 3), torch.ones(2, 3))


# ---- threads, copies


def test_threads_that_call_a_region_at_once_compile_it_once() -> None:
    started = threading.Barrier(3)

    def slow(graph: torch.fx.GraphModule, args: Any, threads: int) -> Any:
        release.wait(10)
        return graph

    def run(i: int) -> None:
        started.wait(10)
        found[i] = call(made, torch.full((2,), float(i)))

    made, release, found = region(twice), threading.Event(), dict[int, Tensor]()
    with compiled_by(slow) as graphs:
        team = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in team:
            thread.start()
        started.wait(10)
        release.set()
        for thread in team:
            thread.join()
    assert {i: result.tolist() for i, result in found.items()} == {0: [1.0, 1.0], 1: [3.0, 3.0]}
    assert len(graphs) == 1


def test_equal_regions_are_measured_once(compiled: Graphs) -> None:
    graph = asc.Graph()
    x = graph.input("x")
    graph.output(*[graph.add(region(twice), x, name=name) for name in "ab"])
    inputs = {"x": torch.ones(1000)}
    graph.run_serial(**inputs)
    found = asc.measure_costs(graph, asc.Machine.local(gpus=0), inputs)
    assert found.seconds["a"] == found.seconds["b"]
    assert len(compiled) == 1
