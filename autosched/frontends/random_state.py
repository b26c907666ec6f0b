"""Capture seeds and states of torch's random number generator as operators.

``torch.manual_seed``, ``get_rng_state``, ``set_rng_state`` and functions that use them, such as
``fork_rng``, access the generator through one variable of ``torch.random``. During a capture it
holds a substitute that calls operators, which ``make_fx`` traces. Knows the CPU's generator only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autosched.errors import CaptureError
from autosched.frontends.capture_lock import is_capturing
from autosched.frontends.origins import traced_at
from autosched.graph.effects import effects_of
from autosched.graph.graph import HOST, Graph, Value

SEEDING = 5e-6  # seconds that the state of a generator takes
_DEFAULT = torch.default_generator
_STATE_BYTES = _DEFAULT.get_state().numel()
_LIBRARY: Any = torch.library.Library("autosched", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS: dict[str, Callable[..., Any]] = {  # their schemas, and what they do on fake tensors
    "get_rng_state() -> Tensor": lambda: torch.empty(_STATE_BYTES, dtype=torch.uint8),
    "set_rng_state(Tensor state) -> ()": lambda state: None,
    "manual_seed(int seed) -> ()": lambda seed: None,
}
for _schema, _fake in _OPERATORS.items():
    _LIBRARY.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
    torch.library.register_fake(f"autosched::{_schema.partition('(')[0]}", _fake)
_OPS = torch.ops.autosched
_GET = _OPS.get_rng_state.default
_SET = _OPS.set_rng_state.default
_SEED = _OPS.manual_seed.default
# The functions that tasks of these operators call.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _GET: torch.get_rng_state,
    _SET: torch.set_rng_state,
    _SEED: torch.manual_seed,
}


def _set_state(state: torch.Tensor) -> torch.Generator:
    _SET(state)
    return _DEFAULT


def _manual_seed(seed: int) -> torch.Generator:
    _SEED(int(seed) - 2**64 if seed >= 2**63 else int(seed))
    return _DEFAULT


def _refusing(why: str) -> Callable[[], NoReturn]:
    def refuse() -> NoReturn:
        raise CaptureError(why)

    return refuse


_TRACED: dict[str, Callable[..., Any]] = {
    "get_state": _GET,
    "set_state": _set_state,
    "manual_seed": _manual_seed,
    "seed": _refusing(
        "torch.seed() returns another seed in each call, and a graph would contain the first one; "
        "pass a number to torch.manual_seed"
    ),
    "initial_seed": _refusing(
        "torch.initial_seed() is called, whose result would be a constant of the graph; pass the "
        "seed as an argument"
    ),
}


class TracedGenerator:
    """torch's generator; in the thread that captures, its methods are operators."""

    def __getattr__(self, name: str) -> Any:
        if name in _TRACED and is_capturing():
            if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
                raise CaptureError(
                    "the state of torch's random number generator is accessed under no_dispatch, "
                    "where operators cannot be traced; use torch.random.fork_rng"
                )
            return _TRACED[name]
        return getattr(_DEFAULT, name)


def add_state(graph: Graph, name: str) -> Value:
    """Add a task that returns the state of torch's generator; return the value."""
    facts: dict[str, Any] = {"name": name, "by": FUNCTIONS[_GET], "on": HOST}
    found: Value = graph.record(_GET, (), {}, random=True, seconds=SEEDING, **facts)
    return found


def random_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes that draw or seed, if any sets a state.

    Removes operations without effect. Raises CaptureError where there are accelerators: their
    generators are not supported.
    """
    states = [node for node in graph.nodes if node.target in FUNCTIONS]
    draws = [node for node in graph.nodes if node not in states and _draws(node)]
    # Of activation checkpoints without dropout, or without backward.
    is_idle = not draws and not any(_changes_state(node) for node in states)
    for node in reversed(states[:]):
        if not node.users and (is_idle or node.target is _GET):
            graph.erase_node(node)
            states.remove(node)
    if states and torch.accelerator.is_available():
        raise CaptureError(
            f"the step calls torch.{FUNCTIONS[states[0].target].__name__}, which also changes the "
            "generators of accelerators, but only the generator of the CPU is supported; call it "
            f"outside of the step{traced_at(states[0])}"
        )
    return {*states, *draws} if states else set()


def _changes_state(node: torch.fx.Node) -> bool:
    """Whether a node sets the generator to a new state."""
    before = node.args[0] if node.args else None
    sets = node.target is _SET and getattr(before, "target", None) is not _GET
    return node.target is _SEED or sets


def _draws(node: torch.fx.Node) -> bool:
    target: Any = node.target
    return node.op == "call_function" and effects_of(target, node.args, node.kwargs).random
