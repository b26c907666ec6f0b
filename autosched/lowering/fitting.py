"""Make a program fit the memory of each device.

This module returns a program that fits unchanged, or one that is lowered again with a limit. It
counts bytes as ``footprint`` does. It knows no times: its callers choose among several placements
that fit.

Sufficient memory changes nothing: a program is first lowered without a limit, and again with one
only if ``footprint`` exceeds a device's memory. Then copies are as late as possible, and
allocations are ordered by events after the frees that make room. So the limit holds for every
interleaving of streams, not only in issue order.
"""

from __future__ import annotations

from autosched.lowering import lower
from autosched.placement import Placement
from autosched.problem import Problem
from autosched.program.program import Program
from autosched.simulation.footprint import footprint


def fits(program: Program, problem: Problem) -> bool:
    """Return whether every device has enough memory at all times, in issue order."""
    courses = footprint(program, problem)
    device = problem.machine.device
    return all(max(course) <= device(name).nbytes for name, course in courses.items())


def fitted(problem: Problem, placement: Placement) -> Program:
    """Lower a placement to a program that fits the memory of each device.

    The program is that of ``lower`` if it fits. Otherwise copies are late, allocations wait for
    frees, and values that do not fit are spilled to another device and reloaded. Raises
    MemoryLimitError if that does not suffice, and ScheduleError as ``lower`` does.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", nbytes=8, on="cuda:0"))
    >>> placement = Placement({"y": "cuda:0"}, ("y",))
    >>> fitted(Problem(graph, asc.Machine.emulated(gpus=1)), placement).outputs
    (('y', 'cuda:0'),)
    """
    program = lower(problem, placement)
    if not problem.is_limited or fits(program, problem):
        return program
    return lower(problem, placement, limited=True)
