"""Compile a function of tensors to kernels by Inductor.

This is the only module that knows Inductor. It uses ``torch._inductor.standalone_compile``, which
keeps writes to arguments, caches kernels on disk, and runs them on the current stream.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autosched.graph.effects import effects_of

__all__ = ["NotTraceableError", "as_tensor", "compile_graph", "guard", "trace", "unavailable"]

Compiled = Callable[..., Sequence[torch.Tensor]]


class NotTraceableError(Exception):
    """The reason why a function cannot be traced."""


def unavailable(kind: str) -> str | None:
    """Return why Inductor cannot compile for this kind of device, or None.

    >>> unavailable("meta")
    "Inductor does not compile for 'meta' devices"
    """
    try:
        from torch._inductor import standalone_compile  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch._inductor.standalone_compile"
    if kind == "cpu":
        from torch._inductor import config

        names = [config.cpp.cxx] if isinstance(config.cpp.cxx, str) else list(config.cpp.cxx)
        known = [name for name in (*names, "g++", "clang++") if name]
        if not any(map(shutil.which, known)):
            return f"Inductor needs a C++ compiler for the CPU, such as {known[0]}"
        return None
    if kind in ("cuda", "xpu"):
        found = importlib.util.find_spec("triton") is not None
        return None if found else f"Inductor needs Triton for {kind!r} devices"
    return f"Inductor does not compile for {kind!r} devices"


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[bool]]:
    """Return a function of tensors and floats as a graph of ATen operators on tensors.

    Nothing is computed. A float becomes a tensor without dimensions, ``as_tensor(x)``, so that its
    value is no part of the graph; the result says which of the function's results are such tensors.
    Raises NotTraceableError.
    """
    is_float = [type(arg) is float for arg in args]
    if not all(isinstance(arg, (float, torch.Tensor)) for arg in args):
        raise NotTraceableError("an argument is neither a tensor nor a float")
    floats: list[bool] = []

    def on_tensors(*tensors: Any) -> list[Any]:
        pairs = zip(tensors, is_float, strict=True)
        made = fn(*(tensor.item() if number else tensor for tensor, number in pairs))
        floats[:] = [not isinstance(item, torch.Tensor) for item in made]
        return [
            torch.scalar_tensor(item, dtype=torch.float64) if number else item
            for item, number in zip(made, floats, strict=True)
        ]

    try:
        with _quiet(), torch.no_grad():
            # Numbers that operators read from tensors are symbols; sizes are not.
            fakes = FakeTensorMode(
                allow_fallback_kernels=True, shape_env=ShapeEnv(), static_shapes=True
            )
            given = [fakes.from_tensor(as_tensor(arg).detach()) for arg in args]
            traced = make_fx(on_tensors, tracing_mode="real")(*given)
    except Exception as error:  # tracing raises many kinds of errors
        raise NotTraceableError(f"{type(error).__name__}: {_first_line(error)}") from error
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            raise NotTraceableError(f"it uses the tensor {node.target!r}, which is no argument")
        if effects_of(node.target, node.args, node.kwargs).random:
            raise NotTraceableError(f"{node.target} draws random numbers")
    return traced, floats


def as_tensor(arg: Any) -> Any:
    """Return a float as a tensor without dimensions; other arguments pass.

    >>> as_tensor(0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    return torch.tensor(arg, dtype=torch.float64) if type(arg) is float else arg


def compile_graph(
    graph: torch.fx.GraphModule, args: Sequence[torch.Tensor], threads: int
) -> Compiled:
    """Compile a traced graph for arguments like these; its CPU kernels use so many threads.

    The generated code checks no sizes. Raises what Inductor raises.
    """
    from torch._inductor import standalone_compile

    # Inductor's CPU kernels contain the number of threads.
    patches = {"cpp.threads": threads, "size_asserts": False, "alignment_asserts": False}
    with torch.no_grad(), _quiet():
        artifact = standalone_compile(
            graph,
            [arg.detach() for arg in args],
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
    return artifact


def guard(examples: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a fast function that says whether tensors are like these.

    It compares types, dtypes, devices, sizes and strides, and whether they require grad.
    """
    from torch._C._dynamo.guards import TensorGuards

    # torch 2.13 crashes without these two arguments.
    static = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    check: Callable[..., bool] = TensorGuards(*examples, **static).check
    return check


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about torch's own code, and about artifacts that are not needed."""
    log = logging.getLogger("torch._inductor.standalone_compile")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
