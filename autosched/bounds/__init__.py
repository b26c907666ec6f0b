"""Lower bounds on the makespan of every schedule of a graph.

Each bound holds for all policies. Knows no placement and no program. Bounds hold up to the rounding
of floating point sums.

relaxation  the problem as bounds see it: edges, fastest routes, arrival of inputs
chains      paths through the graph
load        total work: of devices, within intervals of time, of copy streams, of issuing threads
periods     the same for the period of a loop

Bounds assume that each task runs on one device; if it runs again, it runs there. If tasks could be
duplicated on several devices, chains with copies would bound nothing.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from autosched._lib.gc_pause import without_collecting
from autosched.bounds.chains import heads, tails, through
from autosched.bounds.load import copies, gathered, host, interval, shared
from autosched.bounds.relaxation import Array, Relaxation
from autosched.errors import MemoryLimitError, ScheduleError, shown
from autosched.problem import Problem

__all__ = ["bounds"]

_NAMES = ("critical_path", "work", "interval", "copies", "host")


@without_collecting()
@np.errstate(over="ignore")
def bounds(problem: Problem) -> dict[str, float]:
    """Return named lower bounds on the makespan, in seconds; infinity where no schedule exists.

    Of memory they know which tasks fit on which device.

    * ``critical_path``: the longest path of tasks and of copies that no choice of devices avoids.
      It accounts for predecessors and successors that must run on the device of a task, because
      their data would arrive too late from another device.
    * ``work``: the time that compute streams need for all tasks at the best distribution, if they
      are never idle; at least what the devices need for what they can do only once.
    * ``interval``: the same for intervals of time in which certain tasks must run.
    * ``copies``: the time that copy streams need for copies that constraints force; 0 without
      contention.
    * ``host``: the time that threads of the host need to issue all tasks; 0 if that takes no time.

    Where all costs are integers, so are bounds. Raises ScheduleError for contradictory constraints.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> y = graph.add(abs, graph.add(abs, graph.input("x"), seconds=1.0), seconds=2.0)
    >>> bounds(Problem(graph, Machine.emulated(gpus=1)))
    {'critical_path': 3.0, 'work': 1.5, 'interval': 3.0, 'copies': 0.0, 'host': 0.0}
    """
    if not isinstance(problem, Problem):
        raise ScheduleError(f"bounds are of a Problem, got {shown(problem)}")
    try:
        problem = problem.confined
    except MemoryLimitError:
        return dict.fromkeys(_NAMES, math.inf)
    relaxed = Relaxation.of(problem)
    head = heads(relaxed)
    tail = tails(relaxed)
    total = through(head, tail, relaxed.seconds)
    path = float(np.min(total, axis=1, initial=math.inf).max(initial=0.0))
    work = _work(relaxed)
    found = {
        "critical_path": path,
        "work": work,
        "interval": interval(relaxed, head, tail, max(path, work)),
        "copies": copies(relaxed),
    }
    if _is_whole(problem) and not problem.has_sharing:
        found = {name: _next_whole(seconds) for name, seconds in found.items()}
    return {**found, "host": host(relaxed)}


@np.errstate(over="ignore")
def exceeds(problem: Problem, seconds: float) -> bool:
    """Return whether a bound is at least so many seconds; most often the work alone shows that."""
    try:
        relaxed = Relaxation.of(problem.confined)
    except MemoryLimitError:
        return True
    return _work(relaxed) >= seconds or max(bounds(problem).values()) >= seconds


def _work(relaxed: Relaxation) -> float:
    work = shared(gathered(relaxed.seconds, relaxed.group), relaxed.streams)
    if not relaxed.problem.has_sharing:
        return work
    busy = _busy(relaxed)
    return max(work, shared(gathered(busy, relaxed.group), np.ones(busy.shape[1], np.int64)))


def _busy(relaxed: Relaxation) -> Array:
    """Return the seconds of each physical device that a task needs at least, if it is there."""
    machine, costs = relaxed.problem.machine, relaxed.problem.costs
    tasks = relaxed.problem.graph.tasks
    each = [[costs.busy_seconds(task, device) for device in machine.devices] for task in tasks]
    busy = np.where(np.isinf(relaxed.seconds), math.inf, np.reshape(each, relaxed.seconds.shape))
    hardware = [device.hardware for device in machine.devices]
    groups = [
        [i for i, name in enumerate(hardware) if name == one] for one in dict.fromkeys(hardware)
    ]
    return np.column_stack([busy[:, group].min(axis=1) for group in groups])


def _is_whole(problem: Problem) -> bool:
    """Whether each task and each copy takes an integer number of seconds."""
    seconds = problem.tables.seconds
    machine = problem.machine
    known = seconds[np.isfinite(seconds)]
    copied = product(set(problem.lists.nbytes), machine.links, (False, True))
    if machine.network is not None:
        return False
    return np.array_equal(known, np.floor(known)) and all(
        link.seconds(nbytes, pageable).is_integer() for nbytes, link, pageable in copied
    )


def _next_whole(seconds: float) -> float:
    return seconds if math.isinf(seconds) else float(math.ceil(seconds * (1 - 1e-9) - 1e-9))
