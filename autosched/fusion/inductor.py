"""Compile a graph of operators by Inductor, through its public options alone.

Only this module knows Inductor. What compiles is ``torch._inductor.standalone_compile``, which
keeps writes to arguments, caches kernels on disk, and runs them on the current stream. On a CPU a
region becomes one C++ function, which runs without the GIL: other streams can run Python meanwhile.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autosched._lib.forks import rlock
from autosched.fusion.tracing import as_tensor, described, silenced

LOCK = rlock()  # Inductor compiles one graph at a time


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
        from torch._inductor.cpp_builder import get_cpp_compiler

        if " " in torch.__path__[0]:
            return f"Inductor cannot link with torch in {torch.__path__[0]!r}, for the space in it"
        try:
            get_cpp_compiler()
        except Exception as error:
            return f"Inductor needs a C++ compiler for the CPU: {described(error)}"
        return None
    if kind in ("cuda", "xpu"):
        found = importlib.util.find_spec("triton") is not None
        return None if found else f"Inductor needs Triton for {kind!r} devices"
    return f"Inductor does not compile for {kind!r} devices"


def unsuitable(args: Sequence[Any]) -> str | None:
    """Return why compiled code cannot take these arguments, or None.

    >>> unsuitable([torch.ones(2), 0.5, 3])
    'an argument is neither a tensor nor a float'
    """
    if not args:
        return "it takes no tensor"
    return next(filter(None, map(_unsuitable, args)), None)


def _unsuitable(arg: Any) -> str | None:
    if type(arg) is float:
        return None
    if not isinstance(arg, torch.Tensor):
        return "an argument is neither a tensor nor a float"
    if type(arg) not in (torch.Tensor, torch.nn.Parameter):
        return f"an argument is a {type(arg).__name__}"
    if arg.layout is not torch.strided or arg.is_quantized or arg.is_nested:
        return "an argument is not dense"
    if arg.is_conj() or arg.is_neg():
        return "an argument is a conjugate or negative view"
    return None


def compile_graph(
    graph: torch.fx.GraphModule, args: Sequence[Any], threads: int, constants: Sequence[int] = ()
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a traced graph for arguments like these; its CPU kernels use so many threads.

    Those at the positions ``constants`` are part of the code, and no arguments of it. The generated
    code checks no sizes. Raises what Inductor raises.
    """
    from torch._inductor import standalone_compile

    output: Any = graph.graph.output_node()
    if not output.args[0] and not graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    ):
        return lambda *args: []  # it only copies what arguments had before
    on_cpu = all(as_tensor(arg).device.type == "cpu" for arg in args)
    patches: dict[str, Any] = {
        "cpp_wrapper": on_cpu,
        "cpp_wrapper_build_separate": True,  # the wrapper with less optimization: half the time
        "conv_1x1_as_mm": on_cpu,  # libraries for CPUs are slower at such convolutions
        "cpp.threads": threads,  # CPU kernels contain the number of threads
        "size_asserts": False,
        "alignment_asserts": False,
        "joint_graph_constant_folding": False,  # it takes x * 0 for 0, and x + zeros for x
    }
    if constants:
        patches["freezing"] = True
        graph = _with_constants(graph, {i: args[i].detach() for i in constants})
        args = [arg for i, arg in enumerate(args) if i not in constants]
    with torch.no_grad(), torch._C._DisableAutocast(), silenced():
        return standalone_compile(
            graph,
            _apart([arg.detach() for arg in map(as_tensor, args)]),
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )


def _with_constants(
    graph: torch.fx.GraphModule, constants: Mapping[int, torch.Tensor]
) -> torch.fx.GraphModule:
    """Return a copy of a graph that holds these arguments, by position."""
    made = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    inputs = made.graph.find_nodes(op="placeholder")
    for i, tensor in constants.items():
        made.register_buffer(f"constant_{i}", tensor)
        with made.graph.inserting_before(inputs[i]):
            held = made.graph.get_attr(f"constant_{i}")
        held.meta = inputs[i].meta
        inputs[i].replace_all_uses_with(held)
        made.graph.erase_node(inputs[i])
    made.recompile()
    return made


def _apart(examples: Sequence[torch.Tensor]) -> list[Any]:
    """Return such tensors that share no storage: later arguments need not share one, either."""
    seen = set()
    apart: list[Any] = []
    for each in examples:
        storage = each.untyped_storage()._cdata
        if storage in seen:
            sizes = each.shape, each.stride()
            twin = torch.empty_strided(*sizes, dtype=each.dtype, device=each.device)
            apart.append(twin.zero_())
        else:
            seen.add(storage)
            apart.append(each)
    return apart


def guard(examples: Sequence[Any]) -> Callable[..., bool]:
    """Return a fast function that says whether tensors are like these, floats as tensors.

    It compares types, dtypes, devices, sizes and strides, whether they require grad, and torch's
    settings: default dtype, autocast, grad mode, deterministic algorithms.
    """
    from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

    # torch 2.13 crashes without these two arguments.
    static = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    tensors = TensorGuards(*map(as_tensor, examples), **static).check
    settings = GlobalStateGuard().check

    def matches(*args: Any) -> bool:
        return settings() and tensors(*args)

    return matches
