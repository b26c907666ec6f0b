"""Run a program in chosen interleavings, and return each result.

Uses the backend ``virtual``. A program that ``verify`` rejects is run, too, to show what fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autosched.errors import AutoschedError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import Program
from autosched.runtime.backends.virtual import Virtual
from autosched.runtime.execute import Executor
from autosched.runtime.threads.interleaver import Choose
from autosched.testing.interleavings import following, interleavings
from autosched.testing.reference import Setting

__all__ = ["Explored", "attempt", "explore"]


class Explored(NamedTuple):
    """An interleaving and its result.

    ``choices`` are the names of the streams that continued, one after another; ``left`` is the
    resulting state (outputs, inputs, state of tasks), and ``error`` the error if a step raised.
    """

    choices: tuple[str, ...]
    left: Mapping[str, Any]
    error: AutoschedError | None


def explore(
    program: Program, graph: Graph, machine: Machine, *, examples: Mapping[str, Any], seed: int = 0
) -> Iterator[Explored]:
    r"""Yield the result of each of the ``interleavings`` of a program.

    Freed memory is overwritten with NaN.

    >>> import torch
    >>> graph = Graph()
    >>> _ = graph.input("x").add_(1).mul_(10)
    >>> program = Program.parse("input x on cpu\n cpu/a run add\n cpu/b run mul")  # no wait between
    >>> runs = explore(program, graph, Machine.emulated(gpus=0), examples={"x": torch.ones(1)})
    >>> [run.left["input 'x'"].item() for run in runs]
    [20.0, 11.0]
    """
    setting = Setting(graph, examples, seed)
    for choices in interleavings(program, graph):
        yield Explored(choices, *attempt(setting, program, graph, machine, following(choices)))


def attempt(
    setting: Setting,
    program: Program,
    graph: Graph,
    machine: Machine,
    choose: Choose | None,
    seconds: Sequence[float] | None = None,
) -> tuple[dict[str, Any], AutoschedError | None]:
    """Run a program once; return its result, or the error that it raises."""
    executor = Executor(program, graph, machine, Virtual(choose), seconds or [0.0] * len(program))
    try:
        return setting.run(executor), None
    except AutoschedError as error:
        return {}, error
    finally:
        executor.close()
