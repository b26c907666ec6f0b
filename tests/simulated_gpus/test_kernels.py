"""Custom operators by their schemas, kernels of Triton and functions of extensions by declarations."""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import autosched as asc
from autosched.errors import UsageError
from autosched.sanitizer import Report, sanitize
from autosched.simulated_gpus import kernels
from autosched.testing import declare


@pytest.fixture(autouse=True)
def declarations_end() -> Iterator[None]:
    before = dict(kernels._declared)
    yield
    kernels._declared.clear()
    kernels._declared.update(before)


class Kernel:
    """A stand-in for Triton's: launched as ``kernel[grid](...)``, it finds no GPU."""

    def __init__(self, fn: Any):
        self.fn = fn

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> None:
        raise RuntimeError("0 active drivers")


def scaled(x_ptr: Any, out_ptr: Any, factor: float, BLOCK: int) -> None:  # noqa: N803
    """Stands for the source of a kernel."""


def run(
    launch: Callable[[torch.Tensor, torch.Tensor], Any],
    waits: tuple[bool, bool] = (True, True),
    numbers: bool = False,
) -> Report:
    """Call a kernel on a side stream, that waits before and is waited for afterwards."""

    def program() -> Any:
        x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        if waits[0]:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            made = launch(x, out)
        if waits[1]:
            main.wait_stream(side)
        x.record_stream(side)
        out.record_stream(side)
        if isinstance(made, torch.Tensor):
            made.record_stream(main)
            out = made
        return (out + 1).tolist()

    return sanitize(program, numbers=numbers)


def races(report: Report) -> set[tuple[str, str]]:
    return {(finding.kind, finding.tensor) for finding in report.findings}


def check(launch: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """Check that accesses are known: x is read, out is written."""
    assert not run(launch).findings
    assert races(run(launch, (False, True))) >= {("race", "x"), ("race", "out")}
    assert races(run(launch, (True, False))) == {("race", "out")}


def test_kernels_of_triton_by_parameters() -> None:
    kernel = Kernel(scaled)
    declare(kernel, writes="out_ptr")
    check(lambda x, out: kernel[(1,)](x, out, 2.0, BLOCK=4))
    check(lambda x, out: kernel[(1,)](x, out_ptr=out, factor=2.0, BLOCK=4))


def test_kernels_of_triton_that_are_tuned() -> None:
    kernel = Kernel(Kernel(scaled))  # an autotuner and what it wraps
    declare(kernel.fn, writes=1)
    check(lambda x, out: kernel[lambda meta: (1,)](x, out, 2.0, 4))


def test_a_kernel_without_a_declaration_is_named() -> None:
    kernel = Kernel(scaled)
    declare(Kernel(scaled))  # another one
    with pytest.raises(NotImplementedError, match=r"kernel scaled .*declare\(scaled, writes=...\)"):
        run(lambda x, out: kernel[(1,)](x, out, 2.0, 4))
    with pytest.raises(RuntimeError, match="0 active drivers"):  # it is itself outside
        kernel[(1,)](torch.ones(1), torch.ones(1), 2.0, 4)


@pytest.fixture
def extension() -> Iterator[ModuleType]:
    """A module with a compiled function that finds no GPU."""
    module: Any = ModuleType("compiled_extension")
    module.scaled = functools.partial(chr)  # fails for tensors, in no line of Python
    module.scaled.__module__ = "compiled_extension"
    sys.modules["compiled_extension"] = module
    yield module
    del sys.modules["compiled_extension"]


def test_functions_of_extensions_by_positions(extension: Any) -> None:
    own = extension.scaled
    declare(own, writes=1)
    check(lambda x, out: extension.scaled(x, out))
    assert extension.scaled is own
    assert extension.scaled(65) == "A"


def test_a_compiled_function_without_a_declaration_is_named(extension: Any) -> None:
    with pytest.raises(TypeError) as raised:
        run(lambda x, out: extension.scaled(x))
    assert "asc.testing.declare(extension.scaled, writes=...)" in raised.value.__notes__[0]
    for own in (lambda x, out: int("x"), lambda x, out: torch.mm(x, x), lambda x, out: out.nope):
        with pytest.raises(Exception, match=r".") as raised:
            run(own)
        assert not hasattr(raised.value, "__notes__")


def test_what_is_called_instead_has_results_and_numbers(extension: Any) -> None:
    declare(extension.scaled, instead=lambda x: x * 3)
    report = run(lambda x, out: extension.scaled(x), numbers=True)
    assert report.result == [4.0] * 4
    assert not report.findings
    assert races(run(lambda x, out: extension.scaled(x), (False, True))) == {("race", "x")}
    kernel = Kernel(scaled)
    declare(kernel, writes="out_ptr")
    report = run(lambda x, out: kernel[(1,)](x, out, 2.0, 4), numbers=True)
    assert "scaled computed no numbers" in report.notes[0]


def test_wrong_declarations_and_arguments() -> None:
    with pytest.raises(UsageError, match="has no parameter 'out'; it has 'x_ptr', 'out_ptr'"):
        declare(Kernel(scaled), writes="out")
    with pytest.raises(UsageError, match="tells none: give positions"):
        declare(iter, writes="out")
    with pytest.raises(UsageError, match="what it writes, or what is called instead"):
        declare(scaled, writes=1, instead=print)
    kernel = Kernel(scaled)
    declare(kernel, writes=1)
    with pytest.raises(RuntimeError, match="scaled cannot access a tensor of cpu"):
        run(lambda x, out: kernel[(1,)](x, torch.ones(1), 2.0, 4))
    assert asc.testing.declare is declare


def custom(fake: bool = True, **options: Any) -> Any:
    @torch.library.custom_op(f"autosched_tests::scaled_{uuid.uuid4().hex}", **options)
    def scaled_into(x: torch.Tensor, out: torch.Tensor, factor: float) -> torch.Tensor:
        out.copy_(x * factor)
        return out * 2

    if fake:
        scaled_into.register_fake(lambda x, out, factor: torch.empty_like(x))
    return scaled_into


def test_custom_operators_by_their_schema() -> None:
    operator = custom(mutates_args=["out"])
    check(lambda x, out: [operator(x, out, 2.0)])
    assert run(lambda x, out: [operator(x, out, 2.0)], numbers=True).result == [3.0] * 4
    reads = custom(mutates_args=())
    found = races(run(lambda x, out: [reads(x, out, 2.0)], (True, False)))
    assert ("race", "out") not in found


def test_custom_operators_that_lack_something_are_named() -> None:
    lacks_shapes = custom(fake=False, mutates_args=["out"])
    with pytest.raises(RuntimeError, match=r"fake impl registered for <.*autosched_tests::scaled_"):
        run(lambda x, out: [lacks_shapes(x, out, 2.0)])
    library = torch.library.Library("autosched_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("defined(Tensor x) -> Tensor")
    library.impl("defined", lambda x: x * 2, "CUDA")
    with pytest.raises(NotImplementedError, match=r"register_fake\('autosched_tests::defined'\)"):
        run(lambda x, out: torch.ops.autosched_tests.defined(x))
    of_cuda = custom(mutates_args=["out"], device_types="cuda")
    check(lambda x, out: [of_cuda(x, out, 2.0)])
    with pytest.raises(NotImplementedError, match=r"no kernel for the CPU.*register_kernel"):
        run(lambda x, out: [of_cuda(x, out, 2.0)], numbers=True)
    of_cuda.register_kernel("cpu", lambda x, out, factor: out.copy_(x * factor) * 2)
    assert run(lambda x, out: [of_cuda(x, out, 2.0)], numbers=True).result == [3.0] * 4
