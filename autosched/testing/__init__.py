"""Tests of schedules of a user's graph.

    check                run a graph on many machines and in many interleavings
    machines_for         the machines that ``check`` uses by default
    contrary, uniform    choices of streams, for the backend ``virtual``
    scattered            a policy for tests: random devices and order
    declare              say what a kernel does on simulated GPUs
    simulated_gpus       let torch find simulated GPUs, and watch what is done on them

The last two are in ``simulated_gpus.kernels`` and ``sanitizer``, the others are in ``checking``.
``comparing`` compares results bit for bit.
"""

from __future__ import annotations

from autosched.sanitizer import watching as simulated_gpus
from autosched.simulated_gpus.kernels import declare
from autosched.testing.checking import (
    Checked,
    check,
    contrary,
    machines_for,
    scattered,
    uniform,
)

__all__ = [
    "Checked",
    "check",
    "contrary",
    "declare",
    "machines_for",
    "scattered",
    "simulated_gpus",
    "uniform",
]
