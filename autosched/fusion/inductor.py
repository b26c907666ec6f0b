"""Compile a function of tensors to kernels by Inductor.

Only this module, ``broadcasts``, ``direct_calls``, ``instructions`` and ``kernel_code`` know
Inductor. What compiles is ``torch._inductor.standalone_compile``, which keeps writes to arguments,
caches kernels on disk, and runs them on the current stream. On a CPU a region becomes one C++
function, which runs without the GIL: other streams can run Python meanwhile. Its C++ code can be
compiled in another thread, while this one generates that of the next region.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autosched._lib.fake_tensors import Fakes
from autosched.fusion import kernel_code
from autosched.fusion.depthwise import DECOMPOSITIONS
from autosched.fusion.direct_calls import DirectCalls, Entry, written_arguments
from autosched.fusion.layouts import Operators, in_channels_last, is_costly
from autosched.graph.effects import effects_of

__all__ = [
    "AS_STRIDED",
    "READ_NUMBER",
    "TAGS",
    "Compiled",
    "NotTraceableError",
    "Submit",
    "as_tensor",
    "compile_graph",
    "compilers",
    "described",
    "guard",
    "results_of",
    "trace",
    "unavailable",
    "unsuitable",
]

# Why operators with these tags cannot be part of a region.
TAGS = {
    torch.Tag.data_dependent_output: "returns what depends on data",
    torch.Tag.dynamic_output_shape: "returns a tensor whose size depends on data",
}
# The exception: a number may be read, as long as no size and no decision depends on it.
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
AS_STRIDED = (torch.ops.aten.as_strided, torch.ops.aten.as_strided_)
_MEANS = (torch.ops.aten.var_mean, torch.ops.aten.std_mean)

# Up to so many elements, two sums are a faster variance than one pass that corrects its mean.
_MOST_IN_CACHE = 1 << 16


class NotTraceableError(Exception):
    """The reason why a function cannot be traced."""


class Compiled(NamedTuple):
    """A compiled function of tensors, and one that waits until its C++ code is compiled, or raises.

    ``call`` waits, too.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    wait: Callable[[], object]


Submit = Callable[[Callable[[], object]], Future[None]]


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


def as_tensor(arg: Any) -> Any:
    """Return a float as a tensor without dimensions; other arguments pass.

    >>> as_tensor(0.5)
    tensor(0.5000, dtype=torch.float64)
    """
    return torch.tensor(arg, dtype=torch.float64) if type(arg) is float else arg


def trace(
    fn: Callable[..., list[Any]], args: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[int]]:
    """Return a function of tensors and floats as a graph of ATen operators on tensors.

    The function is called with fake tensors that have the strides of eager mode. The graph takes
    floats as tensors (``as_tensor``), so it does not contain their values, and returns floats as
    tensors; also return the positions of these results. Raises NotTraceableError.
    """
    are_floats = [type(arg) is float for arg in args]
    floats: list[int] = []

    def on_tensors(*tensors: Any) -> list[Any]:
        pairs = zip(tensors, are_floats, strict=True)
        made: list[Any] = fn(*(tensor.item() if is_float else tensor for tensor, is_float in pairs))
        floats[:] = [i for i, item in enumerate(made) if not isinstance(item, torch.Tensor)]
        for i in floats:
            made[i] = torch.scalar_tensor(made[i], dtype=torch.float64)
        return made

    # Outside of the fake mode, in which a new tensor would remember its number.
    tensors = list(map(as_tensor, args))
    operators = Operators()

    def noted(*given: Any) -> list[Any]:
        with operators:
            return on_tensors(*given)

    try:
        traced = _traced(noted, tensors)
    except Exception as error:  # tracing raises many kinds of errors
        raise NotTraceableError(described(error)) from error
    if is_costly(traced):
        with contextlib.suppress(Exception):  # an operator needs the layout of eager mode
            converted = in_channels_last(on_tensors, results_of(traced), operators.called)
            traced = _traced(converted, tensors)
    for node in traced.graph.nodes:
        if why := _objection(node):
            raise NotTraceableError(why)
        # Inductor traces again, where other numbers may have the names of those that are read here.
        node.meta.pop("unbacked_bindings", None)
    return traced, floats


def _traced(fn: Callable[..., list[Any]], tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    # A tensor that is given twice would be one argument of the graph, and need not be in each call.
    apart = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
    given = [each if apart[id(each)] == i else each.detach() for i, each in enumerate(tensors)]
    with _quiet(), Fakes() as fakes:
        return make_fx(fn, DECOMPOSITIONS)(*map(fakes.from_tensor, given))


def _objection(node: torch.fx.Node) -> str | None:
    """Return why a graph with this node is not compiled, or None."""
    if node.op == "get_attr":
        return f"it uses the tensor {node.target!r}, which is no argument"
    if isinstance(node.target, torch._ops.OpOverload) and node.target is not READ_NUMBER:
        if effects_of(node.target, node.args, node.kwargs).random:
            return f"{node.target} draws random numbers"
        tags = set(node.target.tags)
        if _has_static_sizes(node.meta.get("val")):
            tags.discard(torch.Tag.dynamic_output_shape)
        if reason := next((why for tag, why in TAGS.items() if tag in tags), None):
            return f"{node.target} {reason}"
        if node.target.overloadpacket in AS_STRIDED:
            # For Inductor, memory begins at the first element of an argument.
            return f"{node.target} depends on the memory around its argument"
        if node.target.overloadpacket in _MEANS and not node.all_input_nodes[0].meta["val"].numel():
            return f"{node.target} has the mean 0 of an empty tensor if compiled"
    return None


def _has_static_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def results_of(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Return fake tensors like the results of a traced graph."""
    output: Any = graph.graph.output_node()
    return [node.meta["val"] for node in output.args[0]]


@contextlib.contextmanager
def compilers() -> Iterator[Submit]:
    """Yield a function by which threads run C++ compilers, as many as Inductor's processes."""
    from torch._inductor import config

    stopped = threading.Event()

    def submit(compiler: Callable[[], object]) -> Future[None]:
        return executor.submit(run, compiler)

    def run(compiler: Callable[[], object]) -> None:
        # Inductor keeps the future, and calls the compiler again if the result is missing. So an
        # error is raised there, and one that occurs once, such as an interrupt, has no consequence.
        with contextlib.suppress(Exception):
            if not stopped.is_set():
                compiler()

    with ThreadPoolExecutor(config.compile_threads or 1, "autosched-compile") as executor:
        try:
            yield submit
        finally:
            stopped.set()


def compile_graph(
    graph: torch.fx.GraphModule,
    args: Sequence[Any],
    threads: int,
    submit: Submit | None = None,
) -> Compiled:
    """Compile a traced graph for arguments like these; its CPU kernels use so many threads.

    The generated code checks no sizes. ``submit`` of ``compilers`` has the C++ compiler run in
    another thread. Raises NotTraceableError if its results would differ between calls, and what
    Inductor raises.
    """
    from torch._inductor import config, standalone_compile
    from torch._inductor.graph import GraphLowering

    from autosched.fusion.broadcasts import StoreBroadcasts

    on_cpu = all(as_tensor(arg).device.type == "cpu" for arg in args)
    patches: dict[str, Any] = {
        "cpp_wrapper": on_cpu,
        "cpp_wrapper_build_separate": True,  # the wrapper with less optimization: half the time
        "conv_1x1_as_mm": on_cpu,  # libraries for CPUs are slower at such convolutions
        "cpp.threads": threads,  # CPU kernels contain the number of threads
        "size_asserts": False,
        "alignment_asserts": False,
        "joint_graph_constant_folding": False,  # it takes x * 0 for 0, and x + zeros for x
        "post_grad_custom_post_pass": StoreBroadcasts(kernel_code),
    }
    if hasattr(config.cpp, "use_two_step_variance_threshold"):  # not in all versions of torch
        patches["cpp.use_two_step_variance_threshold"] = _MOST_IN_CACHE
    written = written_arguments(graph)
    codes: list[str] = []
    listen = mock.patch.object(GraphLowering, "save_output_code", codes.append)
    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        listen,
        kernel_code.changes(),
        _linkable(),
        _quiet(),
        _compiled_by(submit) as pending,
    ):
        artifact = standalone_compile(
            graph,
            [arg.detach() for arg in map(as_tensor, args)],
            dynamic_shapes="from_example_inputs",
            options={"config_patches": patches},
        )
    if (threads > 1 or not on_cpu) and any("atomic_add" in code for code in codes):
        raise NotTraceableError("its kernels would add numbers in an order that varies")
    call = DirectCalls(artifact, written) if on_cpu else artifact
    return Compiled(call, lambda: [load() for load in pending])


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


@contextlib.contextmanager
def _compiled_by(submit: Submit | None) -> Iterator[list[Callable[[], Any]]]:
    """Compile C++ functions that can be called directly, and whose sums stay in registers.

    ``submit`` has another thread run the compiler. Yield the list of functions that wait for it.
    """
    from torch._inductor.codecache import CppWrapperCodeCache

    pending: list[Callable[[], Any]] = []

    def begin(cls: Any, *args: Any, **kwargs: Any) -> Entry:
        if kernels := kwargs.get("kernel_code"):
            kwargs["kernel_code"] = kernel_code.sums_in_registers(kernels)
        load = cls.load_pybinding_async(*args, **kwargs, submit_fn=submit)
        if submit is None:
            load()
        pending.append(load)
        return Entry(load)

    with mock.patch.object(CppWrapperCodeCache, "load_pybinding", classmethod(begin)):
        yield pending


@contextlib.contextmanager
def _linkable() -> Iterator[None]:
    """Let Inductor link with torch in a folder whose path contains spaces, which it does not quote.

    It finds the libraries by a symbolic link in its cache.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils import cpp_extension

    libraries = cpp_extension.TORCH_LIB_PATH
    if " " not in libraries:
        yield
        return
    digest = hashlib.sha256(libraries.encode()).hexdigest()[:16]
    link = os.path.join(cache_dir(), f"torch-lib-{digest}")
    with contextlib.suppress(FileExistsError):
        os.symlink(libraries, link)
    with mock.patch.object(cpp_extension, "TORCH_LIB_PATH", link):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings about torch's own code, and what Inductor logs: it raises errors, too.

    Where its log has a level, as by ``TORCH_LOGS``, that is kept.
    """
    log = logging.getLogger("torch._inductor")
    level = log.level
    log.setLevel(level or logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def described(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
