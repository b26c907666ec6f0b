"""Predict the steady-state seconds per run of a loop.

The start times of a loop are a linear system over maximum and sum: each instruction starts when
the last of its predecessors has ended, of the same run or of earlier ones. Since run r begins when
run r - ``in_flight`` has ended, all instructions depend on each other over the runs. The system is
then eventually periodic: from some run on, times repeat after a number of runs c, increased by c
periods. The period is the maximum cycle ratio of the system: see ``_lib.cycles``. So it is exact,
and no number of runs must be guessed. That holds for the model of ``simulate``, for submission
without delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autosched._lib.cycles import maximum_cycle_ratio
from autosched.program.program import Copy, Program, Run
from autosched.simulation.issuing import Issuing, System
from autosched.simulation.simulate import makespan

_NEARLY = 1.01  # of the best period


class Period(NamedTuple):
    """Seconds per run, and the cycle that bounds them, as positions with distances in runs.

    ``cycle`` has pairs of a run or copy and the distance to the next, in order of time. ``gated``
    says that it contains the rule that run r begins when run r - ``in_flight`` has ended, ``issued``
    that it contains the issuing of an instruction that takes time.
    """

    seconds: float
    cycle: tuple[tuple[int, int], ...] = ()
    gated: bool = False
    issued: bool = False


def period(program: Program, seconds: Sequence[float], issued: Issuing | None = None) -> Period:
    r"""Return the period, given the seconds of each instruction, and of issuing it.

    >>> lines = ["2 runs in flight", "cpu/compute run a", "cpu/compute record e0"]
    >>> lines += ["cuda:0/compute wait e0", "cuda:0/compute run b"]
    >>> loop = Program.parse("\n".join(lines))
    >>> period(loop, [3.0, 0.0, 0.0, 2.0]).seconds
    3.0
    """
    if program.in_flight == 1:
        return Period(makespan(program, seconds, issued), gated=True)
    system = System(program, seconds, issued)
    return _described(system, *maximum_cycle_ratio(system.seconds, system.edges))


def fewest_in_flight(
    program: Program, seconds: Sequence[float], issued: Issuing | None, most: int
) -> int:
    """Return the fewest runs in flight, up to ``most``, with nearly the period of ``most``.

    ``program`` is a loop with any number of them; nearly means within 1%.
    """

    def at(count: int) -> float:
        return period(replace(program, in_flight=count), seconds, issued).seconds

    best = _NEARLY * at(most)
    single = makespan(program, seconds, issued)
    if single <= best or most == 1:
        return 1
    # A run takes the makespan at least, and so do as many periods.
    counts = range(max(2, math.ceil(single / best)), most)
    return next((count for count in counts if at(count) <= best), most)


def _described(system: System, ratio: float, cycle: Sequence[tuple[int, int]]) -> Period:
    position = {node: i for i, node in enumerate(system.node)}
    issuing = {*system.issue, *system.threads}
    found: list[tuple[int, int]] = []
    apart = 0  # before the first instruction of the list
    for node, distance in cycle:
        at = position.get(node)
        if at is not None and isinstance(system.program.instructions[at], (Run, Copy)):
            found.append((at, distance))
        elif found:
            found[-1] = found[-1][0], found[-1][1] + distance
        else:
            apart += distance
    if found:
        found[-1] = found[-1][0], found[-1][1] + apart
    nodes = {node for node, _ in cycle}
    return Period(
        ratio,
        tuple(found),
        system.end in nodes,
        any(system.seconds[node] > 0 for node in nodes & issuing),
    )
