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
from torch.fx.experimental.proxy_tensor import make_fx

from autosched.graph.effects import effects_of

__all__ = ["NotTraceableError", "compile_graph", "guard", "trace", "unavailable"]

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


def trace(fn: Callable[..., Any], args: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a function of tensors as a graph of ATen operators, for arguments like these.

    Nothing is computed. Raises NotTraceableError.
    """
    if not all(isinstance(arg, torch.Tensor) for arg in args):
        raise NotTraceableError("an argument is no tensor")
    try:
        with _quiet():
            traced = make_fx(fn, tracing_mode="fake")(*args)
    except Exception as error:  # tracing raises many kinds of errors
        raise NotTraceableError(f"{type(error).__name__}: {_first_line(error)}") from error
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            raise NotTraceableError(f"it uses the tensor {node.target!r}, which is no argument")
        if effects_of(node.target, node.args, node.kwargs).random:
            raise NotTraceableError(f"{node.target} draws random numbers")
    return traced


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
