"""What Inductor makes of regions: results, writes in place, and what is not given to it.

A compilation takes seconds, so one region has many operators, and most compilations are slow tests.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

import autosched as asc
from autosched.fusion import inductor
from autosched.fusion.rewriting import READ_NUMBER, Rewriter
from tests.fusion.regions import call, needs_compiler, region, region_of
from tests.serial import some

aten = torch.ops.aten


def test_kinds_of_devices_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inductor.unavailable("meta") == "Inductor does not compile for 'meta' devices"
    for broken in ("/bin/false", "/nowhere/c++", __file__):  # the last one is no program
        with config.patch({"cpp.cxx": (None, broken)}):
            assert "needs a C++ compiler for the CPU: " in str(inductor.unavailable("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert inductor.unavailable("cuda") == "Inductor needs Triton for 'cuda' devices"


@needs_compiler
@pytest.mark.parametrize(("level", "shown"), [(logging.NOTSET, 0), (logging.INFO, 1)])
def test_what_inductor_logs_is_shown_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, level: int, shown: int
) -> None:
    def failing(*args: Any, **options: Any) -> Any:
        logging.getLogger("torch._inductor.scheduler").critical("Error in codegen")
        raise AssertionError

    monkeypatch.setattr("torch._inductor.standalone_compile", failing)
    log = logging.getLogger("torch._inductor")
    monkeypatch.setattr(log, "handlers", [handler := BufferingHandler(9)])
    before = log.level
    log.setLevel(level)
    try:
        made = region(lambda x: x + 1)
        assert torch.equal(call(made, torch.ones(2)), torch.full((2,), 2.0))
        assert log.level == level
    finally:
        log.setLevel(before)
    assert made.failure == "Inductor: AssertionError: "
    assert len(handler.buffer) == shown


# ---- what is compiled


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.rand(4, generator=generator))
    return {
        "x": torch.rand(5, 4, generator=generator, dtype=torch.float64).t()[1:],
        "written": torch.rand(3, 5, generator=generator),
        "parameter": parameter,
        "whole": torch.arange(-6, 6).reshape(3, 4),
        "empty": torch.rand(0, 3, generator=generator),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "extreme": torch.tensor([float("nan"), float("inf"), -0.0, 2.0]),
        "number": torch.rand(3, generator=generator).to(torch.complex64) * 1j,
    }


def many() -> tuple[asc.Graph, list[asc.Value]]:
    """Return a graph of operators for ``arguments``, and its results."""
    graph = asc.Graph()
    x, written, parameter, whole, empty, scalar, extreme, number = graph.inputs(*arguments())
    results = [x + 1, x + 1, x + torch.ops.aten.zeros_like(x), (x.sin() * scalar).t().exp()]
    results += [torch.ops.aten.clone(x), torch.ops.aten.mul(x, 1)]
    before = torch.ops.aten.clone(written)
    written.mul_(2).add_(before)
    parameter.sub_(0.5)
    results += [before, written + 0, parameter * 2]
    results += [whole // 5, whole % 5, whole.gt(0), whole / 2, whole.sum(1), torch.tril(whole)]
    results += [extreme * 0, extreme + torch.ops.aten.zeros_like(extreme), extreme.relu()]
    results += [empty * 2, empty.sum(), scalar * 2, number * number, torch.softmax(x, 0)]
    results.append(x * (1 - 0.9 ** graph.add(READ_NUMBER, scalar * 2)))
    return graph, results


@contextlib.contextmanager
def settings_of_other_threads() -> Iterator[set[tuple[Any, ...]]]:
    """Yield the settings of Inductor that another thread has meanwhile."""
    seen, ended = set[tuple[Any, ...]](), threading.Event()

    def watch() -> None:
        seen.add(settings())
        while not ended.wait(0.001):
            seen.add(settings())

    other = threading.Thread(target=watch)
    other.start()
    try:
        yield seen
    finally:
        ended.set()
        other.join()


def settings() -> tuple[Any, ...]:
    return config.cpp_wrapper, config.cpp.threads, config.joint_graph_constant_folding


@needs_compiler
def test_compiled_regions_do_what_eager_mode_does() -> None:
    """Before torch 2.12 all threads have the settings that a region is compiled with."""
    graph, results = many()
    made = region_of(graph, results)
    before = settings()
    given, twins = list(arguments().values()), list(arguments().values())
    for _ in range(2):
        versions = [(twin._version, arg._version) for twin, arg in zip(twins, given, strict=True)]
        with settings_of_other_threads() as seen:
            expected, found = call(made.composite, *twins), call(made, *given)
        assert seen == {before} or torch.__version__ < "2.12"
        assert made.failure is None
        for result, wanted in zip((*found, *given), (*expected, *twins), strict=True):
            assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
            assert result.stride() == wanted.stride()
            torch.testing.assert_close(result, wanted, equal_nan=True)
        for i, (twin, arg) in enumerate(zip(twins, given, strict=True)):
            assert (twin._version > versions[i][0]) == (arg._version > versions[i][1])
        assert not any(result.requires_grad for result in found)
        storages = {tensor.untyped_storage()._cdata for tensor in (*found, *given)}
        assert len(storages) == len(found) + len(given)


BATCH_NORMS = [aten.native_batch_norm, aten._native_batch_norm_legit]


def normalized(*args: Tensor) -> list[Tensor]:
    """Read statistics after a batch norm has written them."""
    made = []
    for i, normalize in enumerate(BATCH_NORMS * 2):
        x, mean, var, twin = args[4 * i : 4 * i + 4]
        y = normalize(x, None, None, mean, var, True, 0.1, 1e-5)[0]
        twin.copy_(mean)
        again = normalize(2 * y, None, None, mean, var, True, 0.1, 1e-5)[0]
        made += [again, mean + 1, var.clone()]
    return made


def scaled(w: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Add products with factors."""
    product = x @ y
    return [
        torch.add(w, product, alpha=-0.1),
        torch.sub(w, x @ w, alpha=0.25),
        torch.rsub(y @ w, w, alpha=3),
        torch.baddbmm(w[None], x[None], w[None], beta=0.5, alpha=2),
        torch.addmm(w, w, y, beta=0.5, alpha=2),
        w.mul_(0.9).add_(y @ x, alpha=-0.3),
    ]


@needs_compiler
def test_statistics_are_read_after_they_are_written_and_products_added_with_their_factors() -> None:
    """In one region, since a compilation takes seconds."""

    def both(*args: Tensor) -> list[Tensor]:
        return [*normalized(*args[3:]), *scaled(*args[:3])]

    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(8, 3, generator=generator) for _ in range(4)]
    images[2:] = [each.bfloat16() for each in images[2:]]
    given = [torch.rand(5, 5, generator=generator) for _ in range(3)]
    given += [each for x in images for each in (x, torch.zeros(3), torch.ones(3), torch.zeros(3))]
    twins = [each.clone() for each in given]
    made = region(both, inputs=19, outputs=18)
    made.compares = False
    found, expected = call(made, *given), both(*twins)
    assert made.failure is None
    for one, other in zip((*found[:12], *given[3:]), (*expected[:12], *twins[3:]), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)
    for one, other in zip((*found[12:], *given[:3]), (*expected[12:], *twins[:3]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("operator", ["cudnn_batch_norm", "miopen_batch_norm"])
def test_batch_norms_of_gpu_libraries_are_rewritten_as_the_common_one(operator: str) -> None:
    graph = torch.fx.Graph()
    args = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    made = graph.call_function(getattr(aten, operator).default, (*args, True, 0.1, 1e-5))
    graph.output(made)
    given = [torch.rand(8, 3), torch.rand(3), torch.rand(3), torch.zeros(3), torch.ones(3)]
    twins = [each.clone() for each in given]
    found = Rewriter(torch.fx.GraphModule({}, graph)).run(*given)
    expected = aten.native_batch_norm(*twins, True, 0.1, 1e-5)
    assert len(found) == len(getattr(aten, operator).default._schema.returns)
    for one, other in zip((*found[:3], *given), (*expected, *twins), strict=True):
        torch.testing.assert_close(one, other)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", ["shared", "apart"])
def test_written_arguments_may_share_a_storage_in_one_call_and_not_in_another(first: str) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(2).sum() + y.add_(1).sum()

    made = region(write, inputs=2)
    for kind in (first, "shared", "apart"):
        buffer = torch.arange(8.0)
        args = (buffer[:4], buffer[4:]) if kind == "shared" else (buffer[:4], buffer[4:].clone())
        assert call(made, *args).item() == 12 + 26
        assert [args[0].tolist(), args[1].tolist()] == [[0.0, 2, 4, 6], [5.0, 6, 7, 8]]
    assert made.failure is None


@needs_compiler
@pytest.mark.slow
def test_an_index_out_of_range_is_an_error() -> None:
    made = region(lambda x, i: torch.ops.aten.index(x, [i]) * 2, inputs=2)
    x, inside = torch.rand(5), torch.tensor([1, 2])
    for error, message in ((IndexError, "out of bounds"), (RuntimeError, "index out of bounds")):
        assert torch.equal(call(made, x, inside), x[inside] * 2)
        with pytest.raises(error, match=message):  # the first one is that of eager mode
            call(made, x, torch.tensor([1, 77]))
        assert torch.equal(call(made, x, inside), x[inside] * 2)
    assert made.failure is None


@needs_compiler
@pytest.mark.slow
def test_other_threads_run_python_during_a_region() -> None:
    x = torch.rand(500_000)
    made = region(lambda x: x.sin().exp().tanh().sin() * 2)
    torch.testing.assert_close(call(made, x), call(made.composite, x))
    begin = threading.Semaphore(0)
    done: list[bool] = []

    def other() -> None:
        with begin:
            done.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread has the GIL until it releases it
    try:
        begin.release()
        calls = (call(made, x) for _ in range(200))
        assert any(done for _ in calls)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@needs_compiler
@pytest.mark.parametrize("value", some([0.1, 1 / 3], 1 / 3))
def test_numbers_that_are_read_from_tensors_have_double_precision(value: float) -> None:
    # Inductor computes with ``value=`` outside of tensors, and passes it to a kernel.
    def read(x: Tensor, y: Tensor, double: Tensor, single: Tensor, number: Any) -> list[Tensor]:
        first, second = double.item(), single.item()
        values = [first, second * second, number, 1 - 0.9**first]
        return [torch.addcdiv(x, x, x + 1, value=each) for each in values] + [y * first]

    made = region(read, inputs=5, outputs=5)
    x, y = torch.rand(17, dtype=torch.float64), torch.rand(17)
    args = x, y, torch.tensor(value, dtype=torch.float64), torch.tensor(value), value
    *exact, single = call(made, *args)
    *expected, wanted = read(*args)
    torch.testing.assert_close(exact, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(single, wanted, rtol=1e-7, atol=0)
    assert made.failure is None
