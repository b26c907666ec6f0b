"""Compile a graph of operators by Inductor, through its public options alone.

Only this module knows Inductor. What compiles is ``torch._inductor.standalone_compile``, which
keeps writes to arguments, caches kernels on disk, and runs them on the current stream. On a CPU a
region becomes one C++ function, which runs without the GIL: other streams can run Python meanwhile.

``Frozen`` is a compiler for ``fuse=`` for inference. Inductor's public option ``freezing`` folds
operators on constants, such as batch norms into convolutions, and stores weights as the libraries of
kernels like them. Knows graphs of operators and tensors, and neither tasks nor regions.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosched._lib.forks import rlock
from autosched.errors import ScheduleError, shown
from autosched.fusion.tracing import as_tensor, described, silenced

LOCK = rlock()  # Inductor compiles one graph at a time


def unavailable(kind: str) -> str | None:
    """Return why Inductor cannot compile for this kind of device, or None.

    >>> unavailable("meta")
    "Inductor does not compile for 'meta' devices"
    """
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


# ---- weights as constants
#
# A call compares the addresses and version counters of weights with those that were compiled. After a
# change, the weights are arguments again.

_MOST_SETS = 64  # sets of weights, such as those of the layers that share one compiled function


class Frozen:
    """A compiler for ``fuse=``: Inductor, with the weights of these modules as constants.

    For inference on modules in evaluation mode. Constants take memory once more. When a weight
    changes, as by an optimizer, ``load_state_dict`` or ``to``, a RuntimeWarning says so, and the
    regions that read it are compiled again without constants. As elsewhere, writes through
    ``tensor.data``, NumPy and DLPack have no version counter: they are only noticed by comparisons
    in some runs, so do not use them. Raises ScheduleError for what is no module in evaluation mode.

    >>> import autosched as asc
    >>> model = torch.nn.Linear(3, 2).eval()
    >>> run = asc.compile(model, asc.Machine.emulated(gpus=0), fuse=asc.Frozen(model))
    """

    def __init__(self, *modules: torch.nn.Module):
        for module in modules:
            if not isinstance(module, torch.nn.Module) or module.training:
                what = "Frozen() takes modules in evaluation mode, as of model.eval()"
                raise ScheduleError(f"{what}, got {shown(module)}")
        self.modules = modules

    def __call__(
        self, graph: torch.fx.GraphModule, examples: list[Tensor]
    ) -> Callable[..., Sequence[Tensor]]:
        """Return a function of such tensors; weights among them are constants."""
        return _Call(self, graph)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of a weight whose changes are counted."""
        if tensor.is_inference() or tensor.layout is not torch.strided:
            return False
        memory = tensor.untyped_storage()._cdata
        return any(
            memory == weight.untyped_storage()._cdata
            for module in self.modules
            for weight in (*module.parameters(), *module.buffers())
            if weight.layout is torch.strided
        )


class _Compiled(NamedTuple):
    """A function for weights of these versions."""

    versions: tuple[int, ...]
    run: Callable[..., Sequence[Tensor]]


class _Call:
    """A compiled graph; its functions are made when they are needed."""

    def __init__(self, frozen: Frozen, graph: torch.fx.GraphModule):
        self.frozen = frozen
        self.graph = graph
        self.compiled: dict[tuple[int, ...], _Compiled] = {}  # by the addresses of weights
        self.plain: Callable[..., Sequence[Tensor]] | None = None  # takes weights as arguments
        copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {node.args[0] for node in copies}
        inputs = graph.graph.find_nodes(op="placeholder")
        self.readable = [i for i, node in enumerate(inputs) if node not in written]
        self.places: list[int] = []  # of weights; none until the first call with some

    def __call__(self, *args: Tensor) -> Sequence[Tensor]:
        """Run with weights as constants, if they are as they were compiled."""
        self.places = self.places or [i for i in self.readable if self.frozen.owns(args[i])]
        weights = [args[i] for i in self.places]
        key = tuple(weight.data_ptr() for weight in weights)
        known = self.compiled.get(key) or self._compile(key, args)
        if any(w._version != v for w, v in zip(weights, known.versions, strict=False)):
            what = "weights have changed since they were compiled as constants"
            what = f"{what}; regions that read them take them as arguments from now on"
            warnings.warn(what, RuntimeWarning, stacklevel=1)
            known = self.compiled[key] = self._without_constants(args)
        if known.run is self.plain:
            return known.run(*args)
        places = {*self.places}
        return known.run(*(arg for i, arg in enumerate(args) if i not in places))

    def _compile(self, key: tuple[int, ...], args: Sequence[Tensor]) -> _Compiled:
        weights = [args[i] for i in self.places]
        with LOCK:
            if key not in self.compiled:
                if (
                    not key
                    or len(self.compiled) >= _MOST_SETS
                    or not all(map(self.frozen.owns, weights))
                ):
                    return self._without_constants(args)
                run = compile_graph(self.graph, args, torch.get_num_threads(), self.places)
                self.compiled[key] = _Compiled(tuple(w._version for w in weights), run)
        return self.compiled[key]

    def _without_constants(self, args: Sequence[Tensor]) -> _Compiled:
        with LOCK:
            if self.plain is None:
                self.plain = compile_graph(self.graph, args, torch.get_num_threads())
        return _Compiled((), self.plain)
