"""Heterogeneous earliest finish time (HEFT).

Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
computing", IEEE TPDS 13(3), 2002. Tasks are placed by descending upward rank, each on the device
where it finishes first; a task may be inserted into a gap between tasks placed earlier.
O(e p + n log n) for e reads and p devices, since few gaps are examined.

Extensions of the paper: a device may have several compute streams; a value is copied to a device
once; links may differ; and where the machine models contention, copies occupy copy streams.
"""

from __future__ import annotations

from autosched._lib.gc_pause import without_collecting
from autosched._lib.jit import mode
from autosched.placement import Placement
from autosched.policies.base.kernels import list_schedule
from autosched.policies.base.listing import Listing
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import longest
from autosched.problem import Problem


@without_collecting()
def heft(problem: Problem) -> Placement:
    """Place tasks by upward rank where each finishes first (Topcuoglu, Hariri, Wu, IEEE TPDS 2002).

    The order is that of planned starts; ties go to the task added earlier and to the earlier
    device. Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> durations = {"short": 1, "long": 3, "middle": 2}
    >>> tasks = [graph.add(int, name=name, seconds=s) for name, s in durations.items()]
    >>> placed = heft(Problem(graph, Machine.emulated(gpus=1)))
    >>> placed.device, placed.order
    ({'short': 'cuda:0', 'long': 'cpu', 'middle': 'cuda:0'}, ('long', 'middle', 'short'))
    """
    Possible(problem)  # raises ScheduleError
    steps = 4 * len(problem.tasks) * len(problem.devices)
    listing = Listing(problem.tables, mode(steps, list_schedule, longest))
    return listing.placement(problem, listing.plan(listing.order(listing.mean)))
