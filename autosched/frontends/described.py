"""Read names and source lines from graphs of Dynamo and AOTAutograd.

Returns the user's variables, modules and lines that a node belongs to, or less where torch reports
less. Knows no graph of autosched.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from autosched.graph.task import Origin

__all__ = ["called", "named", "origin_of", "where_of"]


def called(node: torch.fx.Node) -> str:
    """Return the name of a placeholder of Dynamo's: a parameter's path, or a variable's name."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return _path(str(name() if callable(name) else name)) or node.name


def named(description: Any, names: Sequence[str]) -> str:
    """Return the name that AOTAutograd's description refers to: an input, or its gradient.

    Otherwise "".
    """
    if (of := getattr(description, "grad_of", None)) is not None:
        return f"{name}.grad" if (name := named(of, names)) else ""
    if type(description).__name__ == "PlainAOTInput" and description.idx < len(names):
        return names[int(description.idx)]
    return str(getattr(description, "target", ""))


def origin_of(node: torch.fx.Node, phase: str) -> Origin:
    """Return the user's line, the module and the phase.

    The line and module of a backward node are those of its forward node.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    module = _path([path for path, _ in stack.values()][-1]) if stack else ""
    return Origin(where_of(node), module, "backward" if phase == "backward" else "forward")


def where_of(node: torch.fx.Node) -> tuple[str, int]:
    """Return the innermost user's line that was traced."""
    lines = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else ("<unknown>", 0)


_PLUMBING = ("_modules", "_parameters", "_buffers")


def _path(source: str) -> str:
    """Return the path in an expression of Dynamo.

    There ``fn`` is the name of a module of torch's own.

    >>> _path("L['self']._modules['fc1']._parameters['weight']"), _path("L['x']")
    ('fc1.weight', 'x')
    """
    words = [word for word in re.findall(r"\w+", source) if word not in _PLUMBING]
    for root in (("L", "G"), ("self", "fn")):
        words = words[1:] if words and words[0] in root else words
    return ".".join(words)
