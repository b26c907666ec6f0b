"""Tests of schedules: of a user's graph, or of random graphs.

    check                           run a graph on many machines and in many interleavings
    machines_for                    the machines that ``check`` uses by default
    explore                         run a program in all interleavings that can differ
    interleavings                   iterate over these; based on ``races`` and ``footprints``
    following, contrary, uniform    choices of streams, for the backend ``virtual``
    run_parts                       run the parts of several ranks over a simulated wire
    scattered                       a policy for tests: random devices and order
    graphs, machines, inputs_for    Hypothesis strategies, and inputs for sampled graphs

These are in ``checking``, ``interleavings``, ``wire`` and ``strategies``. ``reference`` runs a graph
serially, and ``comparing`` compares results bit for bit.

Hypothesis is imported only where a strategy is requested.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autosched.testing.checking import Checked, check, machines_for, scattered
from autosched.testing.interleavings import (
    Explored,
    Footprint,
    contrary,
    explore,
    following,
    footprints,
    interleavings,
    races,
    uniform,
)
from autosched.testing.wire import run_parts

if TYPE_CHECKING:
    from autosched.testing.strategies import DEVICES, graphs, inputs_for, machines

__all__ = [
    "DEVICES",
    "Checked",
    "Explored",
    "Footprint",
    "check",
    "contrary",
    "explore",
    "following",
    "footprints",
    "graphs",
    "inputs_for",
    "interleavings",
    "machines",
    "machines_for",
    "races",
    "run_parts",
    "scattered",
    "uniform",
]

_STRATEGIES = ("DEVICES", "graphs", "inputs_for", "machines")

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import the strategies on demand: they need Hypothesis."""
        if name not in _STRATEGIES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module("autosched.testing.strategies"), name)
        except ModuleNotFoundError as error:
            if error.name != "hypothesis":
                raise
            raise ImportError(
                f"{__name__}.{name} needs Hypothesis, which is not installed: "
                f"pip install 'autosched[test]'"
            ) from error
