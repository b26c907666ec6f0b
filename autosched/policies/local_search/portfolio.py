"""Take the best of many biased list schedules.

Each list traverses the graph forward or backward, by upward ranks at mean or at least durations,
and puts each task on the device of least earliest finish time + ``excess`` * (duration there -
least duration) + ``ahead`` * optimistic cost. The earliest finish time alone, which is HEFT, spends
a device's time on tasks that it runs slowly. The second term penalizes that. The third looks ahead,
as lookahead HEFT does (Bittencourt, Sakellariou, Madeira, PDP 2010), at almost no cost. Placing all
tasks on one device is always among the candidates, for each device.

It is a portfolio because no list is best everywhere: each of 15 known heuristics is at least twice
as bad as another on some graph (Coleman, Krishnamachari, arXiv 2403.07120). Each bias costs as
little as one list, and the portfolio reduces HEFT's gap to the lower bound to a third. O(e p) for
each of up to 72 lists, e reads and p devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from autosched._lib.gc_pause import without_collecting
from autosched._lib.jit import mode
from autosched.placement import Placement
from autosched.policies.base.kernels import decode, list_schedule
from autosched.policies.base.listing import Listed, Listing
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import longest, optimistic
from autosched.problem import Problem

_EXCESS = (4.0, 0.0, 1.0, 2.0, 0.5, 8.0)
_AHEAD = (0.0, 1.0, 0.3)
_BIASES = sorted(
    itertools.product(_EXCESS, _AHEAD), key=lambda b: _EXCESS.index(b[0]) + 2 * _AHEAD.index(b[1])
)
KERNELS = longest, list_schedule, decode, optimistic
_WORK = 2e7  # steps for all lists of a graph, about a second
LARGE = 2_000  # tasks, from which there is time for a few plans alone,
_PLACED = 120_000  # and for lists of so many tasks together


@without_collecting()
def portfolio(problem: Problem) -> Placement:
    """Place tasks as the best of many biased list schedules does, or on one device alone.

    Ties go to one device, then to the list tried first. Raises ScheduleError where tasks cannot all
    be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> durations = {"short": 1, "long": 3, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> portfolio(Problem(graph, Machine.emulated(gpus=1))).device
    {'short': 'cuda:0', 'long': 'cpu', 'middle': 'cuda:0'}
    """
    Possible(problem)  # raises ScheduleError
    return listed(problem)[1]


def listed(problem: Problem) -> tuple[float, Placement]:
    """Return the best list, or one device alone, with its makespan as it is planned."""
    listing = Listing(problem.tables, mode(members(problem) * steps(problem), *KERNELS))
    found = best_listed(listing, members(problem))
    return found.makespan, listing.placement(problem, found)


def steps(problem: Problem) -> float:
    """Return about how many steps a kernel needs for one list."""
    return 4.0 * len(problem.tasks) * len(problem.devices)


def members(problem: Problem) -> int:
    """Return how many lists there is time for, at least a few; one stream needs one list."""
    if problem.tables.streams.sum() == 1:
        return 1
    count = len(problem.graph)
    most = _WORK / max(steps(problem), 1) if count <= LARGE else _PLACED / count
    return max(6, min(4 * len(_BIASES), int(most)))


def best_listed(listing: Listing, most: int, bound: float = 0.0) -> Listed:
    """Return the best of ``most`` lists and of single devices; stop at a makespan of ``bound``."""
    plans = itertools.chain(_alone(listing), _listed(listing, most))
    best = next(plans)
    while best.makespan > bound and (other := next(plans, None)) is not None:
        if other.makespan < best.makespan:
            best = other
    return best


def _alone(listing: Listing) -> Iterator[Listed]:
    """Yield for each distinct device the placement that puts all possible tasks there."""
    n = listing.count
    devices = listing.devices
    together = listing.arrays.together.reshape(n, devices)
    quickest = together.argmin(axis=1)
    seen = set()
    for p in range(devices):
        device = np.where(np.isfinite(together[:, p]), p, quickest)
        alike = together[:, p].tobytes()
        if alike not in seen:
            seen.add(alike)
            yield listing.placed(listing.mode.whole(device), listing.mode.whole(np.arange(n)))


def _listed(listing: Listing, most: int) -> Iterator[Listed]:
    """Yield a number of list schedules; backward lists are placed again forward, in their order.

    Where devices are equally fast no excess differs from another. Of too many lists, some are left
    out between others: an odd number, so that all ways remain.
    """
    biases = [each for each in _BIASES if not listing.alike or each[0] == _EXCESS[0]]
    ways = [(way, rank) for way in (listing, listing.backwards) for rank in ("mean", "least")]
    lists = list(itertools.product(biases, ways))
    for (excess, ahead), (way, rank) in lists[:: (len(lists) - 1) // most | 1][:most]:
        planned = way.plan(way.order(getattr(way, rank)), excess, ahead)
        yield planned if way is listing else listing.placed(*listing.mirrored(planned))
