"""Replace attributes of torch for as long as a capture lasts. Each has a reason.

No other module of this package sets attributes of torch's modules, and nothing of Python is
replaced. Other threads are not affected: a replacement does what torch does, except in the thread
that captures. Knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import logging_utils
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.fx import proxy
from torch.fx.traceback import get_current_meta
from torch.nn.modules import activation

from autosched._lib.replacing import replaced
from autosched._lib.tree import flatten
from autosched.frontends.capture_lock import is_capturing
from autosched.frontends.eager_operators import encoded, is_captured, is_overridden
from autosched.frontends.random_state import TracedGenerator


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
    encode = nn.TransformerEncoder.forward
    has_override = torch.overrides.has_torch_function
    is_traced = activation._is_make_fx_tracing

    def forward(self: nn.TransformerEncoder, *args: Any, **kwargs: Any) -> Tensor:
        return (encoded if is_captured() else call)(encode, self, *args, **kwargs)

    def has_torch_function(arguments: Any) -> bool:
        return is_overridden(arguments) if is_captured() else has_override(arguments)

    def is_make_fx_tracing() -> bool:
        return not is_captured() and bool(is_traced())  # type: ignore[no-untyped-call]

    yield nn.TransformerEncoder, "forward", forward
    yield torch.overrides, "has_torch_function", has_torch_function
    yield activation, "_is_make_fx_tracing", is_make_fx_tracing


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
