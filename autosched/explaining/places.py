"""Remedies for placements: what the policies that ``auto`` tries would make, with what users bound and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from autosched.errors import ScheduleError
from autosched.explaining.advice import Remedy
from autosched.explaining.case import SMALL, Case
from autosched.explaining.words import count, joined, names, place, share, spelled
from autosched.graph import Task
from autosched.policies import Policy, candidates, heft, single
from autosched.program import Copy
from autosched.viz.paint import duration

__all__ = ["Plans", "note", "places"]

_MOST = 20_000  # tasks, up to which there is time for some policies
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are worth a word


@dataclass(frozen=True)
class Plans:
    """What could be instead: ``kept`` with what the user bound, the best first.

    ``freed`` without what is bound to accelerators, ``off_host`` without what is bound to a CPU and slow there.
    """

    kept: tuple[Case, ...]
    freed: tuple[Case, ...]
    off_host: tuple[Case, ...]

    @classmethod
    def of(cls, case: Case) -> Plans:
        """Plan anew. Of large graphs by few policies, or by none."""
        return cls(
            _plans(case, (heft,) if case.bound else (single, heft)),
            _plans(case.freed, (heft,)) if case.bound else (),
            _plans(case.unbound(case.slow_here), (heft,)) if case.slow_here else (),
        )


def _plans(case: Case, few: Sequence[Policy]) -> tuple[Case, ...]:
    """Plan by all policies, or by a few."""
    graph = case.graph
    if len(graph) > _MOST:
        return ()
    made: list[tuple[float, Case]] = []
    tried = [case.placement]
    for policy in candidates(graph, case.machine) if len(graph) <= SMALL else few:
        try:
            placement = policy(graph, case.machine, case.costs)
            if placement in tried:
                continue
            tried.append(placement)
            plan = case.placed(placement)
            made.append((plan.makespan, plan))
        except ScheduleError:  # another policy may find a way
            continue
    return tuple(plan for _, plan in sorted(made, key=itemgetter(0)))


def places(case: Case, plans: Plans) -> Iterator[Remedy]:
    """Say what another placement would give, and who is in its way."""
    best = case.makespan
    for plan in plans.kept[:1]:
        yield _remedy(case, plan, "policy")
        best = min(best, plan.makespan)
    for plan in plans.off_host[:1]:
        if plan.makespan < best and (moved := _moved(case, plan)):
            yield _off_host(case, plan, moved)
    for plan in plans.freed[:1]:
        if plan.makespan < best:
            yield _remedy(case, plan, "bound")


def _moved(case: Case, plan: Case) -> list[Task]:
    """Return what a plan takes off the CPU that it is bound to."""
    return [task for task in case.slow_here if plan.placement.device[task.name] in case.workers]


def _off_host(case: Case, plan: Case, moved: Sequence[Task]) -> Remedy:
    """Say what is bound to a CPU and slow there."""
    host, called = case.placement.device[moved[0].name], [task.name for task in moved]
    taken = sum(case.costs.task_seconds(task, case.machine.device(host)) for task in moved)
    there = joined(list(dict.fromkeys(plan.placement.device[task.name] for task in moved)))
    are = "is" if len(called) == 1 else "are"
    words = (
        f"{names(called)} {are} bound to {host} ({place(moved[0])}), which takes {duration(taken)} for that; "
        f"policy='auto' without that puts {'it' if len(called) == 1 else 'them'} on {there}"
    )
    return Remedy("host bound", words, tuple(called), (), plan.makespan)


def _remedy(case: Case, plan: Case, kind: str) -> Remedy:
    """Say what is wrong with where tasks are."""
    bound = case.bound if kind == "bound" else ()
    unused = [name for name in plan.used if name not in case.used]
    who = ""
    if bound:
        what = f"{count(len(bound), 'task')} {'is' if len(bound) == 1 else 'are'}"
        what = "all tasks are" if 1 < len(bound) == len(case.graph.tasks) else what
        devices = joined(list(dict.fromkeys(str(task.device) for task in bound)))
        who = f"{what} bound to {devices} (at {place(bound[0])}, or by place=)"
    auto = "policy='auto'" + (" without that" if bound else "")
    if len(plan.used) < len(case.used):
        kind = f"fewer {kind}"
        less = f"{_nothing(case, plan.makespan)}; {_alone(plan)} takes less"
        if len(plan.used) > 1:
            less = f"{joined(plan.used)} do better than {spelled(len(case.used))}"
        words = less + (f", but {who}" if who else "")
    elif unused:
        kind = f"idle {kind}"
        several = len(unused) > 1
        idle = f"{joined(unused)} could help and {'stand' if several else 'stands'} idle"
        words = f"{idle}: {f'{who}; ' if who else ''}{auto} uses {'them' if several else 'it'}"
    elif plan.placement.device == case.placement.device:
        words = f"tasks could be issued in a better order: {auto} finds one"
    else:
        words = f"{f'{who}; ' if who else 'tasks could be placed better: '}{auto} finds a faster plan"
    return Remedy(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def note(case: Case, plans: Plans) -> tuple[str, ...]:
    """Say what more devices, or fewer, would not give."""
    more = [plan for plan in plans.kept if len(plan.used) > len(case.used)]
    fewer = [plan for plan in plans.kept if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan > 0:
        slower = more[0].makespan / case.makespan - 1
        take = "takes" if len(more[0].used) == 1 else "take"
        longer = f"{take} {share(slower)} longer" if slower > 0.005 else f"{take} as long"
        return (f"{_nothing(more[0], case.makespan)} ({joined(more[0].used)} {longer})",)
    if fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        return (f"on {_alone(fewer[0])} it takes {duration(fewer[0].makespan)}, hardly longer",)
    return ()


def _nothing(plan: Case, other: float) -> str:
    """Say that the devices of a plan give nothing, and why; copies are to blame if it wins when they take no time."""
    free = plan.timed(_without_copies(plan))
    why = "copies take longer than the compute they save" if free < other else "there is too little to do at once"
    one = len(plan.used) == 1
    gives = f"using {joined(plan.used)} gives" if one else f"{spelled(len(plan.used))} devices give"
    return f"{gives} nothing here: {why}"


def _without_copies(case: Case) -> Sequence[float]:
    return [0.0 if isinstance(i, Copy) else s for i, s in zip(case.program, case.seconds, strict=True)]


def _alone(case: Case) -> str:
    return f"{joined(case.used) or case.machine.host} alone"
