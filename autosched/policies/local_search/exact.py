"""Find an optimal placement, with proof, by constraint programming.

Optimality refers to the programs that lowering makes. The model includes the order of issue, which
is the order in which copies are issued, so its bound holds for all placements; exhaustive tests on
small graphs confirm that. No bound is claimed for graphs where in-place writes may overtake
readers. The solver knows no copies of outputs; ``schedule`` compares its plan with those of all
other policies.
"""

from __future__ import annotations

from time import perf_counter

from autosched.errors import ScheduleError
from autosched.placement import Placement
from autosched.policies.constraint_programming.proof import can_solve, solved
from autosched.policies.local_search.annealer import Progress
from autosched.policies.local_search.search import handed_over, quick
from autosched.problem import Policy, Problem

__all__ = ["exact"]

_ABOUT = 24.0  # seconds, at most, without a time limit
_FIRST = 0.1  # of the time, for the initial placement: the fraction, and the most seconds
_LONGEST = 2.0


def exact(
    seconds: float | None = None, seed: int = 0, *, progress: Progress | None = None
) -> Policy:
    """Return the policy that finds an optimal placement by CP-SAT, as far as time allows.

    It works for at most ``seconds``, or else for a fixed amount of work, about 20 s, with which it
    returns the same placement each time. Ctrl-C stops it with the best placement so far. In its own
    model the result is never worse than the initial placement of ``search``.

    ``Placement.bound`` is the proved lower bound: for an optimal placement its makespan, up to
    rounding. It is 0 where tasks write in place or data would have to be forwarded by other
    devices, for then there may be placements that the model does not contain. On a device with
    several compute streams the model assumes that a task gets the one that is free first, which is
    not always so: a plan may then take longer than predicted by the model, but never less than the
    bound.

    ``progress`` is called with the part of the time that has passed, 0 to 1, and the best makespan.
    The policy raises ScheduleError where OR-Tools is not installed, or tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> durations = {"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> placement = exact()(Problem(graph, Machine.emulated(gpus=1)))  # where HEFT needs 7 s
    >>> placement.device["a"] == placement.device["b"], placement.bound
    (True, 6.0)
    """

    def policy(problem: Problem) -> Placement:
        if not can_solve():
            raise ScheduleError(
                'policy "exact" needs OR-Tools, which is not installed: '
                "pip install 'autosched[exact]'"
            )
        if seconds is not None:
            first = min(_FIRST * seconds, _LONGEST)
            return handed_over(problem, seconds, first, seed, progress or (lambda *_: None))
        began = perf_counter()
        start = quick(problem)
        improved = None if progress is None else (lambda end: progress(_part(began), end))
        return solved(problem, start, None, seed, improved)

    policy.__name__ = "exact"
    return policy


def _part(began: float) -> float:
    return min((perf_counter() - began) / _ABOUT, 1.0)
