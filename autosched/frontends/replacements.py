"""Make torch choose the same operators while it is traced as eagerly.

Some functions check whether a mode observes their operators, and then choose others, whose results
differ in the last bits; ``tests/frontends/test_op_db.py`` finds such functions. They are called so
that they choose as they do eagerly, or, where they read elements to choose, an error is raised. For
some, attributes of torch are replaced for as long as a capture lasts. Each has a reason; no other
module of this package sets attributes of torch's modules, and nothing of Python is replaced. Other
threads are not affected: a replacement does what torch does, except in the thread that captures.
Knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch._aot_autograd import logging_utils
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributions import Distribution
from torch.fx import proxy
from torch.fx.traceback import get_current_meta
from torch.nn.modules import activation
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from autosched._lib.replacing import replaced
from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.capture_lock import is_capturing
from autosched.frontends.random_state import TracedGenerator
from autosched.frontends.settings import Counters, Number, call_with_floats
from autosched.graph.effects import function_name

# These return singular values or eigenvalues only. Vectors, which backward needs, are also computed
# where autograd records, in transforms of torch.func, and whenever a mode is active.
_VALUES_ONLY = frozenset("cond eigvalsh matrix_norm matrix_rank norm nuclear_norm svdvals".split())
# Of both operators, the third argument says whether to compute vectors.
_WITH_VECTORS = (torch.ops.aten._linalg_svd.default, torch.ops.aten._linalg_eigh.default)

# Their backward reads elements: which are zero, or which a mask selects. By name, the position and
# name of the argument whose gradient does so.
_DATA_DEPENDENT = {
    **dict.fromkeys(("prod", "cumprod"), (0, "input")),
    **dict.fromkeys(("masked_fill", "masked_fill_"), (2, "value")),
}


class EagerOperators(TorchFunctionMode):
    """Makes torch functions choose as they do eagerly, or refuses their backward."""

    def __init__(self, counters: Counters):
        super().__init__()
        self.counters = counters

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(fn, "__name__", "")).removeprefix("linalg_")
        if name in _VALUES_ONLY and not any(map(_is_transformed, (*args, *kwargs.values()))):
            with _ValuesOnly():  # type: ignore[no-untyped-call]
                return fn(*args, **kwargs)
        if name in ("matmul", "__matmul__", "__rmatmul__") and len(args) == 2 and not kwargs:
            one, other = args if name != "__rmatmul__" else args[::-1]
            if _is_folded_if_traced(one, other):
                return torch.bmm(one, other.expand(len(one), -1, -1))
        if name.startswith("_fused_") and any(isinstance(i, Number) for i in kwargs.values()):
            return call_with_floats(fn, args, kwargs)
        result = self.counters.call(fn, args, kwargs)
        if name in _DATA_DEPENDENT:
            position, word = _DATA_DEPENDENT[name]
            argument = args[position] if len(args) > position else kwargs.get(word)
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                _refuse_backward(function_name(fn), result)
        return result


class _ValuesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Requests no vectors where autograd does not record."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_VECTORS and not (torch.is_grad_enabled() and args[0].requires_grad):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False))
            return func(**{**given, **kwargs, names[2]: False})
        return func(*args, **kwargs)


def _is_transformed(item: Any) -> bool:
    """Whether a tensor belongs to a transform of torch.func, or may have a tangent."""
    is_wrapped = isinstance(item, torch.Tensor) and is_functorch_wrapped_tensor(item)
    return is_wrapped or forward_ad._current_level >= 0


def _is_folded_if_traced(one: Any, other: Any) -> bool:
    """Whether only tracing would use one matrix product for the batch."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    batched = one.dim() == other.dim() == 3 and len(other) == 1 and len(one) > 1
    return batched and one.is_contiguous() and not other.requires_grad


def _refuse_backward(name: str, result: Any) -> None:
    """Make the backward of a call raise CaptureError."""

    def refuse(gradients: Any) -> NoReturn:
        raise CaptureError(
            f"the backward of {name} reads elements to choose how it computes, and a graph has no "
            "data; write it as a torch.autograd.Function, or compute this gradient outside of the "
            "step"
        )

    for leaf in flatten(result):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(refuse)


# ---- what is replaced


@contextlib.contextmanager
def replacing(checks: FakeChecks) -> Iterator[None]:
    """Replace what captures need; ``checks`` collects the lines that ask for fake tensors."""
    # torch restores a trace's state in a callback at the end of a backward pass. One that fails
    # leaves this flag set, and no later pass would queue the callback.
    logging_utils.callback_set = False
    with contextlib.ExitStack() as stack:
        if not hasattr(torch.compiler, "_patch_engine_backward"):
            stack.enter_context(_marking_backward_nodes())
            stack.enter_context(_tracing_generators())
        stack.enter_context(
            replaced(
                # Reads elements to validate arguments, which Dynamo leaves out, too.
                (Distribution, "_validate_args", False),
                # Through it, all of torch's functions of seeds and states reach the generator.
                (torch.random, "default_generator", TracedGenerator()),
                # Libraries ask for fake tensors in order not to read elements.
                (torch._subclasses, "FakeTensor", checks.kind()),
                *_fast_paths(),
            )
        )
        yield


# ---- fused attention kernels
#
# ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call one fused operator where autograd
# does not record. They do not use it while ``make_fx`` traces, or while a TorchFunctionMode is
# active, as one is in each capture. Its results differ from those of the other path in the last bits.


def _fast_paths() -> Iterator[tuple[Any, str, Any]]:
    """Yield what lets modules choose the same path in captures as outside."""
    has_override = torch.overrides.has_torch_function
    is_traced = activation._is_make_fx_tracing

    def has_torch_function(arguments: Any) -> bool:
        return is_overridden(arguments) if is_capturing() else has_override(arguments)

    def is_make_fx_tracing() -> bool:
        return not is_capturing() and bool(is_traced())  # type: ignore[no-untyped-call]

    yield torch.overrides, "has_torch_function", has_torch_function
    yield activation, "_is_make_fx_tracing", is_make_fx_tracing


# Modules of the modes that captures enter.
_OF_CAPTURES = ("autosched.", "torch.fx.experimental.proxy_tensor")
_NOT_OVERRIDDEN = (
    Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_function_impl,
)


def is_overridden(arguments: Any) -> bool:
    """Whether something other than a capture overrides torch functions for these arguments."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if any(not type(mode).__module__.startswith(_OF_CAPTURES) for mode in modes):
        return True
    own = [type(item).__torch_function__ for item in arguments if isinstance(item, Tensor)]
    return any(getattr(method, "__func__", method) not in _NOT_OVERRIDDEN for method in own)


# ---- code that tests for fake tensors
#
# Libraries test whether a tensor is a fake one in order not to read its elements (for example to
# build masks, in the transformers library). Their results may then differ from those of an eager
# call.

_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows it once for each step


class FakeChecks:
    """The lines that tested for fake tensors in a capture.

    The test is False, as it would be in an eager call, unless ``truthful``.
    """

    def __init__(self) -> None:
        self.truthful = False
        self.lines: list[tuple[str, int]] = []

    def answer(self) -> bool:
        """Store the caller's line, and return the result of the test."""
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autosched"):
            return True
        self.lines.append((frame.f_code.co_filename, frame.f_lineno))
        return self.truthful

    def kind(self) -> type:
        """Return a class that stands for ``FakeTensor``; ``answer`` is its ``isinstance``."""

        class Kind(type(FakeTensor)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, FakeTensor) and (not is_capturing() or self.answer())

            def __subclasscheck__(cls, subclass: type) -> bool:
                return issubclass(subclass, FakeTensor)

        return Kind("FakeTensor", (FakeTensor,), {})


def warn_of_fake_check(check: tuple[str, int], why: str, step: tuple[str, int]) -> None:
    """Warn that a step was captured differently from an eager call. ``why`` is the reason."""
    warnings.warn_explicit(
        f"{check[0]}:{check[1]} checks whether a tensor is a fake one, and then runs other code "
        "than in an eager call: results may differ in the last bits (leave out a mask that masks "
        f"nothing). The code of the eager call {why}",
        RuntimeWarning,
        *step,
        registry=_WARNED,
    )


# ---- what older versions of torch lack
#
# Knows torch's tracers, and nothing of graphs.

# The key of nodes' metadata by which later versions mark nodes of backward.
_BACKWARD = "autograd_backward"


@contextlib.contextmanager
def _marking_backward_nodes() -> Iterator[None]:
    """Let ``make_fx`` mark nodes of backward, with their forward nodes' numbers.

    Later versions have ``torch.compiler._patch_engine_backward`` for it.
    """
    original = torch.autograd.graph._engine_run_backward
    fields = proxy._COPY_META_FIELDS  # that new nodes take from the metadata of the trace
    is_new = _BACKWARD not in fields

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in flatten(outputs) if isinstance(leaf, torch.Tensor)]
        setup_stacktrace_preservation_hooks(
            [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        )
        meta = get_current_meta()
        # Backward may run within backward, under a reentrant checkpoint.
        before = meta.get(_BACKWARD, False)
        meta[_BACKWARD] = True
        try:
            return original(outputs, *args, **kwargs)
        finally:
            meta[_BACKWARD] = before

    fields += [_BACKWARD] if is_new else []
    homes = (torch.autograd.graph, torch.autograd)
    try:
        with replaced(*((home, "_engine_run_backward", run) for home in homes)):
            yield
    finally:
        if is_new:
            fields.remove(_BACKWARD)
        get_current_meta().pop(_BACKWARD, None)


@contextlib.contextmanager
def _tracing_generators() -> Iterator[None]:
    """Let ``make_fx`` accept random number generators as arguments, like later versions.

    They become attributes of the graph's module.
    """
    handlers = proxy._create_arg_bypass
    if torch.Generator in handlers:
        yield
        return

    def attribute(tracer: Any, generator: torch.Generator) -> Any:
        held = vars(tracer.root).items()
        name = next((name for name, item in held if item is generator), None)
        if name is None:
            name = tracer.get_fresh_qualname("_generator")
            setattr(tracer.root, name, generator)
        return tracer.create_node("get_attr", name, (), {})

    handlers[torch.Generator] = attribute
    try:
        yield
    finally:
        del handlers[torch.Generator]
