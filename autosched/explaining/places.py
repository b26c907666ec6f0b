"""Remedies for placements: what the policies that ``auto`` tries would make, with what users bound and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autosched.errors import ScheduleError
from autosched.explaining.advice import Remedy
from autosched.explaining.case import Case
from autosched.explaining.words import duration, place, share, spelled
from autosched.graph import Graph
from autosched.placement import Placement
from autosched.policies import candidates, heft, single
from autosched.program import Copy

__all__ = ["Plans", "note", "places"]

_SMALL, _MOST = 2_000, 20_000  # tasks up to which there is time for all policies, and for two of them
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are worth a word


@dataclass(frozen=True)
class Plans:
    """What could be instead: ``kept`` with what the user bound to accelerators, ``freed`` without, the best first."""

    kept: tuple[Case, ...]
    freed: tuple[Case, ...]

    @classmethod
    def of(cls, case: Case) -> Plans:
        """Plan anew. Of large graphs by few policies, or by none."""
        return cls(_plans(case, case.graph), _plans(case, case.freed) if case.bound else ())


def _plans(case: Case, graph: Graph) -> tuple[Case, ...]:
    if len(graph) > _MOST:
        return ()
    made: list[Case] = []
    tried: list[Placement] = []
    for policy in candidates(graph, case.machine) if len(graph) <= _SMALL else (single, heft):
        try:
            placement = policy(graph, case.machine, case.costs)
            if placement in tried:
                continue
            tried.append(placement)
            plan = case.placed(placement, graph)
            plan.simulate()
        except ScheduleError:  # another policy may find a way
            continue
        made.append(plan)
    return tuple(sorted(made, key=lambda plan: plan.makespan))


def places(case: Case, plans: Plans) -> Iterator[Remedy]:
    """Say what another placement would give, and who is in its way."""
    best = case.makespan
    for plan in plans.kept[:1]:
        yield _remedy(case, plan, "policy")
        best = min(best, plan.makespan)
    for plan in plans.freed[:1]:
        if plan.makespan < best:
            yield _remedy(case, plan, "bound")


def _remedy(case: Case, plan: Case, kind: str) -> Remedy:
    """Say what is wrong with where tasks are."""
    bound = case.bound if kind == "bound" else ()
    where = _alone(plan)
    unused = [name for name in plan.used if name not in case.used]
    who = ""
    if bound:
        what = "all tasks are" if len(bound) == len(case.graph.tasks) else f"{len(bound):,} tasks are"
        devices = " and ".join(dict.fromkeys(str(task.device) for task in bound))
        who = f"{what} bound to {devices} ({place(bound[0])})"
    auto = "policy='auto'" + (" without that" if bound else "")
    if len(plan.used) < len(case.used):
        kind = "fewer devices"
        words = f"{_nothing(case, case, plan.makespan)}; {where} takes less" + (f", but {who}" if who else "")
    elif unused:
        idle = f"{' and '.join(unused)} could help and {'stand' if len(unused) > 1 else 'stands'} idle"
        words = f"{idle}: {f'{who}; ' if who else ''}{auto} uses {'them' if len(unused) > 1 else 'it'}"
    else:
        words = f"{f'{who}; ' if who else 'tasks could be placed better: '}{auto} finds a faster plan"
    return Remedy(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def note(case: Case, plans: Plans) -> tuple[str, ...]:
    """Say what more devices, or fewer, would not give."""
    more = [plan for plan in plans.kept if len(plan.used) > len(case.used)]
    fewer = [plan for plan in plans.kept if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan:
        slower = more[0].makespan / case.makespan - 1 if case.makespan else 0.0
        longer = f"take {share(slower)} longer" if slower > 0.005 else "take as long"
        return (f"{_nothing(case, more[0], case.makespan)} ({' and '.join(more[0].used)} {longer})",)
    if fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        return (f"{_alone(fewer[0])} takes {duration(fewer[0].makespan)}, hardly longer",)
    return ()


def _nothing(case: Case, plan: Case, other: float) -> str:
    """Say that a plan on several devices gives nothing, and why, if copies that took no time would change that."""
    free = plan.timed(_without_copies(plan))
    why = "copies take longer than the compute they save" if free < other else "there is too little to do at once"
    return f"{spelled(len(plan.used))} devices give nothing here: {why}"


def _without_copies(case: Case) -> Sequence[float]:
    return [0.0 if isinstance(i, Copy) else s for i, s in zip(case.program, case.seconds, strict=True)]


def _alone(case: Case) -> str:
    return f"{' and '.join(case.used) or case.machine.host} alone"
