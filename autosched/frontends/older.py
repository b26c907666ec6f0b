"""Provide tracing functions that old torch versions lack.

Knows torch's tracers, and nothing of graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx import proxy
from torch.fx.traceback import get_current_meta
from torch.utils._pytree import tree_leaves

__all__ = ["backward_noted", "generators_traced"]

_BACKWARD = "autograd_backward"  # the key of nodes' meta by which later versions say that a node is backward's


@contextlib.contextmanager
def backward_noted() -> Iterator[None]:
    """Let ``make_fx`` mark the nodes of backward, with the number of the forward node of each.

    Later versions have ``torch.compiler._patch_engine_backward`` for it.
    """
    original = torch.autograd.graph._engine_run_backward

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        setup_stacktrace_preservation_hooks(
            [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        )
        meta = get_current_meta()
        before = meta.get(
            _BACKWARD, False
        )  # backward may run within backward, under a reentrant checkpoint
        meta[_BACKWARD] = True
        try:
            return original(outputs, *args, **kwargs)
        finally:
            meta[_BACKWARD] = before

    with _replaced(run), _copied(_BACKWARD):
        try:
            yield
        finally:
            get_current_meta().pop(_BACKWARD, None)


@contextlib.contextmanager
def _replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Replace autograd's entry to its engine, under both its names."""
    places: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
    before = [place._engine_run_backward for place in places]
    for place in places:
        place._engine_run_backward = run
    try:
        yield
    finally:
        for place, original in zip(places, before, strict=True):
            place._engine_run_backward = original


@contextlib.contextmanager
def _copied(field: str) -> Iterator[None]:
    """Let new nodes take this field from the metadata of the trace."""
    fields = proxy._COPY_META_FIELDS
    new = field not in fields
    if new:
        fields.append(field)
    try:
        yield
    finally:
        if new:
            fields.remove(field)


@contextlib.contextmanager
def generators_traced() -> Iterator[None]:
    """Let ``make_fx`` accept random number generators as arguments, as attributes of the graph, like later versions."""
    handlers = proxy._create_arg_bypass
    if torch.Generator in handlers:
        yield
        return

    def attribute(tracer: Any, generator: torch.Generator) -> Any:
        known = {
            id(item): name
            for name, item in vars(tracer.root).items()
            if isinstance(item, torch.Generator)
        }
        if id(generator) not in known:
            known[id(generator)] = tracer.get_fresh_qualname("_generator")
            setattr(tracer.root, known[id(generator)], generator)
        return tracer.create_node("get_attr", known[id(generator)], (), {})

    handlers[torch.Generator] = attribute
    try:
        yield
    finally:
        del handlers[torch.Generator]
