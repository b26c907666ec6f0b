"""Critical path on a processor (CPOP).

Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
computing", IEEE TPDS 13(3), 2002. Of the ready tasks, the one on the longest path is placed next,
measured by upward plus downward rank. All tasks of the critical path go to the device where their
total duration is least, other tasks to the device where they finish first. O(e p + n log n) for e
reads and p devices, since few gaps are examined.

Included for comparison: the other policies finish earlier on nearly all graphs. Extensions of the
paper: those of ``heft``; a task of the critical path that may not run on the chosen device goes
where it finishes first, and counts with its shortest duration in the choice of that device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add

from autosched.placement import Placement
from autosched.policies.base.plan import Plan, Slot, by_priority
from autosched.policies.base.possible import Possible
from autosched.policies.base.ranks import critical_path, downward_ranks, upward_ranks
from autosched.problem import Problem


def cpop(problem: Problem) -> Placement:
    """Place the critical path on one device, other tasks by finish (Topcuoglu et al. 2002).

    The order is that of planned starts; ties go to the task added earlier and to the earlier
    device. Raises ScheduleError where tasks cannot all be placed.

    >>> from autosched import Graph, Machine
    >>> graph = Graph()
    >>> a = graph.add(int, name="a", seconds={"cpu": 1, "cuda:0": 2})
    >>> b = graph.add(abs, a, name="b", seconds={"cpu": 9, "cuda:0": 2})
    >>> cpop(Problem(graph, Machine.emulated(gpus=1))).device
    {'a': 'cuda:0', 'b': 'cuda:0'}
    """
    possible = Possible(problem)
    through = list(map(add, upward_ranks(problem, possible), downward_ranks(problem, possible)))
    path = dict.fromkeys(critical_path(problem, through))
    one = _quickest(problem, possible, path)

    def pick(plan: Plan, task: int, devices: Sequence[int]) -> Slot:
        return plan.earliest_finish(task, [one] if task in path and one in devices else devices)

    return by_priority(problem, possible, through, pick)


def _quickest(problem: Problem, possible: Possible, path: Iterable[int]) -> int:
    """Return the device of least total duration; tasks not allowed there count their least."""
    total = [0.0] * len(problem.devices)
    for task in path:
        devices = possible.devices(task)
        seconds = problem.seconds[task]
        least = min(seconds[p] for p in devices)
        total = [before + (seconds[p] if p in devices else least) for p, before in enumerate(total)]
    return min(range(len(total)), key=total.__getitem__)
