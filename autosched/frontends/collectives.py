"""Functional collectives of torch.distributed in a captured graph.

In eager code such an operator starts a collective, and ``wait_tensor`` waits for it. In between,
memory of its arguments is still read, which no schema says. So a task of a collective ends when the
collective has: then ``wait_tensor`` is its argument, and a collective overlaps with tasks of other
streams. Process groups are shared state (``graph.effects``), so collectives keep their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.graph.effects import COLLECTIVES


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node starts a collective."""
    return _is_functional(node) and not _waits(node)


def is_wait_for_collective(node: torch.fx.Node) -> bool:
    """Whether a node waits for a collective of the same graph, whose task has ended."""
    if not _waits(node):
        return False
    source: Any = node.args[0]
    while _waits(source) or _is_item(source):
        source = source.args[0]
    return is_collective(source)


def completed(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a collective and waits for it."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        for leaf in flatten(result):
            torch.ops._c10d_functional.wait_tensor(leaf)
        return result

    return call


def check_collectives() -> None:
    """Raise CaptureError if a trace, which is under way, has a collective that is not functional."""
    mode = get_proxy_mode()
    assert mode is not None
    for node in mode.tracer.graph.nodes:
        if _namespace(node) == "c10d":
            raise CaptureError(
                f"the step calls {str(node.target).removesuffix('.default')}, a collective with a "
                "result that is no tensor; use all_reduce, all_gather_tensor and others of "
                "torch.distributed._functional_collectives"
            )


def _is_functional(node: torch.fx.Node) -> bool:
    return _namespace(node) in COLLECTIVES


def _namespace(node: torch.fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def _waits(node: torch.fx.Node) -> bool:
    return _is_functional(node) and "wait_tensor" in str(node.target)


def _is_item(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
