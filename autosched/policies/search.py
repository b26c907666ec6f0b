"""Search: the portfolio's best, improved by annealing for as long as one likes.

Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 220, 1983, over the order and the device of
tasks; see ``annealing`` for the moves. A move costs O(e) for e readings, often much less, since what turns out too late
is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

from autosched.bounds import bounds
from autosched.costs import Costs
from autosched.graph import Graph
from autosched.machine import Machine
from autosched.placement import Placement
from autosched.policies.annealer import Annealer, cool, cool_until
from autosched.policies.heft import heft
from autosched.policies.jit import mode
from autosched.policies.listing import Listed, Listing
from autosched.policies.portfolio import best_listed, members, steps
from autosched.policies.possible import Possible
from autosched.policies.problem import Policy, Problem
from autosched.policies.tables import Tables

__all__ = ["quick", "search"]

_MOVES = 300_000  # of a search that is given no time
_QUICK, _EACH = 20_000, 500  # of a search that shall not be felt: at most, and for each task
_DECODED = 4_000_000  # tasks that it places, at most
_TOO_MANY = 2_000  # tasks, from which so few moves gain nothing
_BOUNDED = 2_000  # tasks, up to which it is worth while to know when to stop


Progress = Callable[[float, float], None]


def search(
    seconds: float | None = None, seed: int = 0, *, moves: int = _MOVES, progress: Progress | None = None
) -> Policy:
    """Return the policy that improves the portfolio's best placement for so many seconds, or else by so many moves.

    Counted in moves it gives the same placement each time; ``seed`` makes it another one. It is never worse than its
    start, and ends early where that meets a lower bound. Ctrl-C ends it with the best so far. ``progress`` is called
    with the part that is done, 0 to 1, and the best makespan.
    """

    def policy(graph: Graph, machine: Machine, costs: Costs) -> Placement:
        problem = Problem.of(graph, machine, costs)
        if Possible(problem).partial:
            return heft(graph, machine, costs)
        work = members(problem) * steps(problem) + 4.0 * moves * len(problem.tasks)
        listing = Listing(Tables.of(problem), mode(work if seconds is None else math.inf), problem.tasks)
        least = max(bounds(graph, machine, costs).values()) if len(graph) <= _BOUNDED else 0.0
        found = best_listed(listing, members(problem), least)
        if least < found.makespan < math.inf and moves:
            found = _annealed(Annealer(listing, found, seed, least), seconds, moves, progress or (lambda *_: None))
        return listing.placement(problem, found)

    return policy


def _annealed(annealer: Annealer, seconds: float | None, moves: int, report: Progress) -> Listed:
    """Return the best plan found by so much annealing, or until ctrl-C."""
    with suppress(KeyboardInterrupt):
        report(0.0, annealer.makespan)
        if seconds is None:
            cool(annealer, moves, report)
        else:
            cool_until(annealer, perf_counter() + seconds, report)
        report(1.0, annealer.makespan)
    return annealer.best


def quick(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place tasks as the portfolio does, and improve that by so few moves that nobody waits for it."""
    n = len(graph)
    moves = min(_QUICK, _EACH * n, _DECODED // max(n, 1)) if n <= _TOO_MANY else 0
    return search(moves=moves)(graph, machine, costs)
