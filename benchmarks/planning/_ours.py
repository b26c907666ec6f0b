"""Planning an instance with autosched, timed; each plan is checked by the rules of the instance, and each bound too.

Knows nothing of families, targets and tables.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from _instances import Instance, checked, placed

import autosched as asc
from autosched.policies import Policy

TINY = 1e-6  # by how much a makespan may differ from what it is compared with, in rounding


class Outcome(NamedTuple):
    """A makespan, the best bound that the schedule proves, and how long planning took."""

    makespan: float
    bound: float
    seconds: float

    def over(self, best: float) -> float:
        """Return the gap to a makespan, 0 within rounding."""
        gap = self.makespan / best - 1 if best else 0.0
        return 0.0 if abs(gap) < TINY else gap

    @property
    def proved(self) -> bool:
        """Whether it is optimal, as far as rounding tells."""
        return self.makespan <= self.bound * (1 + TINY)


def planned(instance: Instance, policy: str | Policy, seconds: float | None = None) -> Outcome:
    """Plan in the classic model. Raises ValueError for a plan that breaks a rule, or a bound that is none."""
    graph, machine = instance.graph(), instance.machine()
    schedule, took = timed(graph, machine, policy, seconds)
    makespan = checked(instance, placed(instance, schedule))
    found = Outcome(makespan, schedule.lower_bound, took)
    known = f"{instance.name} by {policy}: "
    if makespan < instance.bound * (1 - TINY):
        raise ValueError(
            f"{known}{makespan} is below {instance.bound}, which is proved to be a bound"
        )
    if found.bound > min(instance.best, makespan) * (1 + TINY):
        raise ValueError(
            f"{known}the bound {found.bound} is above a schedule of {min(instance.best, makespan)}"
        )
    return found


def timed(
    graph: asc.Graph,
    machine: asc.Machine,
    policy: str | Policy,
    seconds: float | None = None,
    **options: Any,
) -> tuple[asc.Schedule, float]:
    """Plan a graph, with garbage of before collected; return the schedule, and how long it took."""
    gc.collect()
    start = time.perf_counter()
    schedule = asc.schedule(graph, machine, policy=policy, seconds=seconds, **options)
    return schedule, time.perf_counter() - start


class Gaps(NamedTuple):
    """Of several instances by one policy: mean and largest gap, share without gap, the longest planning."""

    graphs: int
    mean: float
    worst: float
    optimal: float
    seconds: float

    @classmethod
    def of(cls, gaps: Sequence[float], seconds: Iterable[float]) -> Gaps:
        mean = statistics.fmean(gaps)
        return cls(
            len(gaps), mean, max(gaps), sum(gap == 0 for gap in gaps) / len(gaps), max(seconds)
        )


def gaps(instances: Sequence[Instance], policy: str | Policy, seconds: float | None = None) -> Gaps:
    """Plan instances whose optimum is known; return how far from it the plans end."""
    found = [planned(instance, policy, seconds) for instance in instances]
    over = [outcome.over(instance.best) for outcome, instance in zip(found, instances, strict=True)]
    return Gaps.of(over, (outcome.seconds for outcome in found))


def spread(items: Sequence[Instance], count: int) -> list[Instance]:
    """Return so many of them, evenly spread."""
    return (
        list(items)
        if len(items) <= count
        else [items[i * len(items) // count] for i in range(count)]
    )


def exact_is_there() -> bool:
    """Whether OR-Tools is installed."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        return False
    return True
