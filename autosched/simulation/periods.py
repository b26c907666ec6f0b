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

from autosched._lib.cycles import maximum_cycle_ratio
from autosched.program.program import Program
from autosched.simulation.issuing import Issuing, System
from autosched.simulation.simulate import makespan

_NEARLY = 1.01  # of the best period


def period(program: Program, seconds: Sequence[float], issued: Issuing | None = None) -> float:
    r"""Return the period, given the seconds of each instruction, and of issuing it.

    >>> lines = ["2 runs in flight", "cpu/compute run a", "cpu/compute record e0"]
    >>> lines += ["cuda:0/compute wait e0", "cuda:0/compute run b"]
    >>> loop = Program.parse("\n".join(lines))
    >>> period(loop, [3.0, 0.0, 0.0, 2.0])
    3.0
    """
    if program.in_flight == 1:
        return makespan(program, seconds, issued)
    system = System(program, seconds, issued)
    return maximum_cycle_ratio(system.seconds, system.edges)


def fewest_in_flight(
    program: Program, seconds: Sequence[float], issued: Issuing | None, most: int
) -> int:
    """Return the fewest runs in flight, up to ``most``, with nearly the period of ``most``.

    ``program`` is a loop with any number of them; nearly means within 1%.
    """

    def at(count: int) -> float:
        return period(replace(program, in_flight=count), seconds, issued)

    best = _NEARLY * at(most)
    single = makespan(program, seconds, issued)
    if single <= best or most == 1:
        return 1
    # A run takes the makespan at least, and so do as many periods.
    counts = range(max(2, math.ceil(single / best)), most)
    return next((count for count in counts if at(count) <= best), most)
