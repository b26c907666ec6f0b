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
from autosched.policies.listing import Listing
from autosched.policies.portfolio import Found, best_listed, members, steps
from autosched.policies.possible import Possible
from autosched.policies.problem import Policy, Problem
from autosched.policies.tables import Tables

__all__ = ["quick", "search"]

_MOVES = 300_000  # of a search that is given no time
_QUICK = 20_000, 500  # of a search that shall not be felt: at most, and for each task
_TOO_MANY = 500  # tasks, from which so few moves gain nothing
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
        began = perf_counter()
        problem = Problem.of(graph, machine, costs)
        if Possible(problem).partial:
            return heft(graph, machine, costs)
        work = members(problem) * steps(problem) + 4.0 * moves * len(problem.tasks)
        listing = Listing(Tables.of(problem), mode(work if seconds is None else math.inf), problem.tasks)
        least = max(bounds(graph, machine, costs).values()) if len(graph) <= _BOUNDED else 0.0
        found = best_listed(listing, members(problem), least)
        report = (lambda part, best: None) if progress is None else progress
        report(0.0, found.makespan)
        if found.makespan > least:
            with suppress(KeyboardInterrupt):
                annealer = Annealer(listing, found.device, found.order, found.makespan, seed, least)
                if seconds is None:
                    cool(annealer, moves, report)
                else:
                    cool_until(annealer, began + seconds, report)
            end, _, _ = listing.evaluate(annealer.device, annealer.order)
            if end < found.makespan:
                found = Found(end, annealer.device, annealer.order)
        report(1.0, found.makespan)
        return problem.placement(found.device, found.order)

    return policy


def quick(graph: Graph, machine: Machine, costs: Costs) -> Placement:
    """Place tasks as the portfolio does, and improve that by so few moves that nobody waits for it."""
    moves = min(_QUICK[0], _QUICK[1] * len(graph)) if len(graph) <= _TOO_MANY else 0
    return search(moves=moves)(graph, machine, costs)
