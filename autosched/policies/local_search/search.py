"""Improve the best plan of the portfolio by simulated annealing.

Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220, 1983, over the
order and the devices of tasks. A state is a list of tasks and a device for each. It represents the
schedule in which each task in turn is inserted into the first gap of its device that is long enough,
and its copies are appended to their streams. A move changes the device of a task, or of a task and
its neighbours on that device, or moves a task to another position in the list, between its last
predecessor and its first successor; the moves are new. A move costs O(e) for e reads, and often much
less, since evaluation stops as soon as the plan turns out too late. Where OR-Tools is installed,
CP-SAT continues from the best plan of a small graph: see ``proof``.

``exact`` is that for any graph. Its bound refers to the programs that lowering makes: the model
includes the order of issue, which is the order in which copies are issued, so the bound holds for all
placements; exhaustive tests on small graphs confirm that. The solver knows no copies of outputs;
``schedule`` compares its plan with those of all other policies.

Without a time limit, searches count moves, so that planning twice returns the same bytes on any
computer.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from time import perf_counter

from autosched._lib.jit import mode
from autosched.bounds import bounds
from autosched.errors import ScheduleError
from autosched.placement import Placement
from autosched.policies.base.kernels import decode
from autosched.policies.base.listing import Listing
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import optimistic
from autosched.policies.constraint_programming.proof import can_solve, is_soon_solved, solved
from autosched.policies.local_search.annealer import Annealer, Progress, anneal, cool
from autosched.policies.local_search.portfolio import KERNELS, LARGE, best_listed, members, steps
from autosched.problem import Policy, Problem

_MOVES = 300_000  # of a search without a time limit
_QUICK = 40_000  # of a quick search: at most, and per task
_EACH = 2_000
_DECODED = 8_000_000  # tasks placed, at most; half as many with contention, which takes longer,
_STARTS = 4  # in this many starts at most, if their tasks are less than half of these
# Of the time, for annealing before CP-SAT: the fraction, and the most seconds.
_FIRST = 0.3
_LONGEST = 3.0
_EXACT_FIRST = 0.1  # and of ``exact``
_EXACT_LONGEST = 2.0
_EXACT_ABOUT = 24.0  # seconds of ``exact``, at most, without a time limit
_ROUNDING = 1e-12  # by which a sum of seconds in another order may exceed its bound, relatively


def search(
    seconds: float | None = None,
    seed: int = 0,
    *,
    moves: int = _MOVES,
    starts: int = 1,
    progress: Progress | None = None,
) -> Policy:
    """Return the policy that improves the portfolio's best placement by simulated annealing.

    It works for ``seconds``, or else for a number of moves. Counted in moves, it returns the same
    placement each time, the best of ``starts`` runs of that many moves each; ``seed`` changes the
    random numbers. With a time limit and OR-Tools installed, small graphs are handed over to CP-SAT
    after a while, which may prove ``Placement.bound``. The result is never worse than its start,
    and the search ends early if it meets a lower bound. Control-C stops it with the best placement so
    far. ``progress`` is called with the part that is done, 0 to 1, and the best makespan.
    """
    report = progress or (lambda *_: None)

    def policy(problem: Problem) -> Placement:
        if seconds is not None and is_soon_solved(problem):
            first = min(_FIRST * seconds, _LONGEST)
            return _handed_over(problem, seconds, first, seed, report)
        return _annealed(problem, seconds, moves, seed, report, starts)[0]

    policy.__name__ = "search"
    return policy


def _handed_over(
    problem: Problem, seconds: float, first: float, seed: int, report: Progress
) -> Placement:
    """Anneal for the first seconds, continue with CP-SAT, and return the best and its bound."""
    end = perf_counter() + seconds
    best = math.inf

    def improved(makespan: float) -> None:
        nonlocal best
        best = min(best, makespan)
        left = (end - perf_counter()) / max(seconds, 1e-9)
        report(min(max(1.0 - left, first / max(seconds, 1e-9)), 1.0), best)

    def annealed(done: float, makespan: float) -> None:
        nonlocal best
        best = makespan
        report(done * min(first / max(seconds, 1e-9), 1.0), makespan)

    start, stopped = _annealed(problem, first, 1, seed, annealed)
    if stopped:
        return start
    with suppress(KeyboardInterrupt):  # there is nothing better yet
        if perf_counter() < end:
            start = solved(problem, start, end, seed, improved)
        report(1.0, best)
    return start


def _annealed(
    problem: Problem,
    seconds: float | None,
    moves: int,
    seed: int,
    report: Progress,
    starts: int = 1,
) -> tuple[Placement, bool]:
    """Return the portfolio's best after annealing, and whether Control-C stopped it."""
    began = perf_counter()
    Possible(problem)  # raises ScheduleError
    work = members(problem) * steps(problem) if seconds is None else math.inf
    listing = Listing(problem.tables, mode(work, *KERNELS))
    least = max(bounds(problem).values()) if len(problem.graph) <= LARGE else 0.0
    enough = least * (1 + _ROUNDING)
    found = best = best_listed(listing, members(problem), enough)
    stopped = False
    if seconds is None and enough < found.makespan:  # only now importing numba may pay off
        work = 4.0 * starts * moves * len(problem.tasks)
        listing = Listing(problem.tables, mode(work, anneal, decode, optimistic))
    try:
        report(0.0, best.makespan)
        for number in range(starts if enough < best.makespan < math.inf and moves else 0):
            annealer = Annealer(listing, found, seed + number, enough)

            def progress(
                part: float, makespan: float, number: int = number, before: float = best.makespan
            ) -> None:
                report((number + part) / starts, min(before, makespan))

            try:
                limited = None if seconds is not None else moves
                cool(annealer, progress, limited, began + (seconds or 0.0))
            finally:
                best = min(best, annealer.best, key=attrgetter("makespan"))
            if annealer.done:
                break
        report(1.0, best.makespan)
    except KeyboardInterrupt:
        stopped = True
    return replace(listing.placement(problem, best), bound=min(least, best.makespan)), stopped


def quick(problem: Problem) -> Placement:
    """Improve the portfolio's best placement by few moves, in a moment."""
    n = max(len(problem.graph), 1)
    placed = _DECODED // (2 if problem.machine.contention else 1)
    moves = min(_QUICK, _EACH * n, placed // n) if n <= LARGE else 0
    starts = min(_STARTS, placed // max(2 * moves * n, 1))
    return search(moves=moves, starts=max(starts, 1))(problem)


def exact(
    seconds: float | None = None, seed: int = 0, *, progress: Progress | None = None
) -> Policy:
    """Return the policy that finds an optimal placement by CP-SAT, as far as time allows.

    It works for at most ``seconds``, or else for a fixed amount of work, about 20 s, with which it
    returns the same placement each time. Control-C stops it with the best placement so far. In its own
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
            first = min(_EXACT_FIRST * seconds, _EXACT_LONGEST)
            return _handed_over(problem, seconds, first, seed, progress or (lambda *_: None))
        began = perf_counter()
        start = quick(problem)

        def improved(end: float) -> None:
            if progress is not None:
                progress(min((perf_counter() - began) / _EXACT_ABOUT, 1.0), end)

        return solved(problem, start, None, seed, improved)

    policy.__name__ = "exact"
    return policy
