"""Provide tracing functions that old torch versions lack.

Knows torch's tracers, and nothing of graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx import proxy
from torch.fx.traceback import get_current_meta

from autosched._lib.replacing import replaced
from autosched._lib.tree import flatten

__all__ = ["marking_backward_nodes", "tracing_generators"]

# The key of nodes' metadata by which later versions mark nodes of backward.
_BACKWARD = "autograd_backward"


@contextlib.contextmanager
def marking_backward_nodes() -> Iterator[None]:
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
def tracing_generators() -> Iterator[None]:
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
