"""Policies choose the device of each task and the order of issue.

A policy is a pure function ``(problem: Problem) -> Placement``. It returns no times and no streams.
The placement must pass ``placement.check``. If no such placement is found, the policy raises
ScheduleError, which names the task, the devices and the reason.

To add a policy, write such a function in a module of its own, cite its paper in the docstring, and
add it to ``POLICIES``; the tests run over that table. The modules of ``base`` provide the parts:
``Possible`` tracks the devices that are left for each task, ``ranks`` computes priorities, and
``Listing`` times tasks and copies. A policy with parameters is a function that returns a policy, such
as ``single_on(device)``, ``in_order(sequences)``. Any function with this signature works as
``policy=``, also if it is not in the table.

``simple`` has those that need no costs but sums; ``heft`` follows a paper, beyond whose model it
supports copies, streams, links and groups; ``least_memory`` searches an order for little
memory, and those of ``local_search`` and ``constraint_programming`` search. ``candidates`` lists
what ``policy="auto"`` tries.

The copies that a placement lists are hints: lowering skips needless ones, and issues none before
its value is computed or after a task that reads it. So a policy cannot make a program wrong by its
copies; only names that do not exist are refused.

A task that exceeds the memory of a device by itself has infinite costs there. So every policy
avoids such devices without a model of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autosched.policies.candidates import candidates
from autosched.policies.heft import heft
from autosched.policies.in_order import in_order
from autosched.policies.least_memory import least_memory
from autosched.policies.local_search.annealer import Progress
from autosched.policies.local_search.portfolio import portfolio
from autosched.policies.local_search.search import exact, search
from autosched.policies.simple import round_robin, single, single_on
from autosched.problem import Policy

__all__ = [
    "POLICIES",
    "TIMED",
    "Policy",
    "Progress",
    "candidates",
    "exact",
    "heft",
    "in_order",
    "least_memory",
    "portfolio",
    "round_robin",
    "search",
    "single",
    "single_on",
]

TIMED: Mapping[str, Callable[..., Policy]] = {"search": search, "exact": exact}
"""Policies with a time limit, as functions of (seconds, seed, progress=)."""

POLICIES: Mapping[str, Policy] = {
    "single": single,
    "round_robin": round_robin,
    "heft": heft,
    "portfolio": portfolio,
}
