"""Suggest other placements, and fewer or more devices.

The placements are those of the policies that ``auto`` tries, with and without the devices to which
the user bound tasks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

from autosched.errors import ScheduleError
from autosched.explanation.advice import Remedy
from autosched.explanation.case import SMALL, Case
from autosched.explanation.words import count, joined, names, place, share, spelled
from autosched.graph.graph import Task
from autosched.placement import Placement, choices, home
from autosched.policies import Policy, candidates, heft, single
from autosched.program.program import Copy
from autosched.viz.paint import duration

__all__ = ["Plans", "note", "places"]

_MOST = 20_000  # tasks, up to which there is time for some policies
_FAR = 3  # times the makespan, from which percentages are hard to read
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are still mentioned


@dataclass(frozen=True)
class Plans:
    """Other placements: ``kept`` respects the user's bindings; the best first.

    ``freed`` ignores bindings to accelerators, ``off_host`` ignores bindings to a CPU of tasks that
    are slow there. ``split`` is the best of the plans that divide the tasks between two devices, if
    all of them are on one.
    """

    kept: tuple[Case, ...]
    freed: tuple[Case, ...]
    off_host: tuple[Case, ...]
    split: Case | None = None

    @classmethod
    def of(cls, case: Case) -> Plans:
        """Plan with other policies: few of them for large graphs, or none."""
        return cls(
            _plans(case, (heft,) if case.bound else (single, heft)),
            _plans(case.freed, (heft,)) if case.bound else (),
            _plans(case.unbound(case.slow_here), (heft,)) if case.slow_here else (),
            _split(case),
        )


def _plans(case: Case, few: Sequence[Policy]) -> tuple[Case, ...]:
    """Plan with all policies, or with a few."""
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
        except ScheduleError:  # another policy may succeed
            continue
    return tuple(plan for _, plan in sorted(made, key=itemgetter(0)))


def _split(case: Case) -> Case | None:
    """Return the best plan with the first tasks on the used device and the others on a second.

    Policies minimize the makespan, so of plans with more devices than pay off they may return only
    poor ones. Inputs on the first device that only the second reads are moved to the second.
    """
    others = [name for name in case.workers if name not in case.used]
    if len(case.used) != 1 or not others or len(case.graph) > SMALL:
        return None
    made = [_cut(case, others[0], at) for at in _cuts(case)]
    return min(
        (plan for plan in made if plan is not None), key=lambda plan: plan.makespan, default=None
    )


def _cuts(case: Case) -> list[int]:
    """Return a few positions to cut, such that each side has at least a third of the work.

    A device that only gets a small task would show nothing about the cost of distributing work.
    """
    ends = list(
        accumulate(
            case.costs.task_seconds(task, case.machine.device(case.used[0]))
            for task in _mobile(case)
        )
    )
    if not ends or not 0 < ends[-1] < math.inf:
        return []
    least = ends[-1] * (1 / 3 - 1e-9)
    most = ends[-1] * (2 / 3 + 1e-9)
    sound = [number for number, end in enumerate(ends, 1) if least <= end <= most]
    step = max(1, -(-len(sound) // case.tries))
    return sound[::step] or [bisect.bisect_left(ends, ends[-1] / 2) or 1]


def _mobile(case: Case) -> list[Task]:
    """Return the tasks that are on the single used device and can move."""
    return [task for task in case.graph.tasks if case.placement.device[task.name] == case.used[0]]


def _cut(case: Case, other: str, at: int) -> Case | None:
    """Return the case with all but the first tasks on another device, or None if impossible."""
    allowed = choices(case.graph, case.machine)
    device = dict(case.placement.device)
    goes: dict[int, bool] = {}  # by group, whether it moves to the other device
    for number, task in enumerate(_mobile(case)):
        moves = goes.setdefault(allowed.group[task.index], number >= at)
        if moves and other in allowed.devices[task.index]:
            device[task.name] = other
    homes = _followed(case, device, other)
    try:
        plan = replace(case, graph=case.graph.pinned(homes)).placed(
            Placement(device, case.placement.order)
        )
        return plan if other in plan.used else None
    except ScheduleError:
        return None


def _followed(case: Case, device: Mapping[str, str], other: str) -> dict[str, str]:
    """Return the inputs that are on the used device and read only on the other one."""
    readers: dict[int, set[str]] = {}
    for task in case.graph.tasks:
        for use in case.graph.needs(task):
            readers.setdefault(case.graph.values[use.value].root, set()).add(device[task.name])
    return {
        value.name: other
        for value in case.graph.sources
        if home(case.graph, case.machine, value) == case.used[0]
        and readers.get(value.index) == {other}
    }


def places(case: Case, plans: Plans) -> Iterator[Remedy]:
    """Suggest other placements, and name the bindings that prevent them."""
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
    """Return the tasks that a plan moves away from the CPU to which they are bound."""
    return [task for task in case.slow_here if plan.placement.device[task.name] in case.workers]


def _off_host(case: Case, plan: Case, moved: Sequence[Task]) -> Remedy:
    """Suggest releasing tasks that are bound to a CPU and slow there."""
    host = case.placement.device[moved[0].name]
    called = [task.name for task in moved]
    taken = sum(case.costs.task_seconds(task, case.machine.device(host)) for task in moved)
    there = joined(list(dict.fromkeys(plan.placement.device[task.name] for task in moved)))
    are = "is" if len(called) == 1 else "are"
    words = (
        f"{names(called)} {are} bound to {host} ({place(moved[0])}), which takes {duration(taken)} for that; "
        f"policy='auto' without that puts {'it' if len(called) == 1 else 'them'} on {there}"
    )
    return Remedy("host bound", words, tuple(called), (), plan.makespan)


def _remedy(case: Case, plan: Case, kind: str) -> Remedy:
    """Describe what is wrong with the devices of tasks."""
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
        words = (
            f"{f'{who}; ' if who else 'tasks could be placed better: '}{auto} finds a faster plan"
        )
    return Remedy(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def note(case: Case, plans: Plans) -> tuple[str, ...]:
    """Describe that more devices, or fewer, would not help."""
    more = [plan for plan in plans.kept if len(plan.used) > len(case.used)]
    more = sorted([*more, *filter(None, [plans.split])], key=lambda plan: plan.makespan)
    fewer = [plan for plan in plans.kept if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan > 0:
        take = "takes" if len(more[0].used) == 1 else "take"
        longer = f"{take} {_longer(more[0].makespan / case.makespan)}"
        best = ", in the best way that was tried" if len(more[0].used) > 1 else ""
        return (f"{_nothing(more[0], case.makespan)} ({joined(more[0].used)} {longer}{best})",)
    if fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        return (f"on {_alone(fewer[0])} it takes {duration(fewer[0].makespan)}, hardly longer",)
    return ()


def _longer(ratio: float) -> str:
    """Write how many times as long it takes."""
    if ratio > _FAR:
        return f"{ratio:.0f} times as long"
    return f"{share(ratio - 1)} longer" if ratio > 1.005 else "as long"


def _nothing(plan: Case, other: float) -> str:
    """Write that the devices of a plan do not help, and why.

    Copies are the reason if the plan is better when they take no time.
    """
    free = plan.timed(_without_copies(plan))
    why = (
        "copies take longer than the compute they save"
        if free < other
        else "there is too little to do at once"
    )
    one = len(plan.used) == 1
    gives = f"using {joined(plan.used)} gives" if one else f"{spelled(len(plan.used))} devices give"
    return f"{gives} nothing here: {why}"


def _without_copies(case: Case) -> Sequence[float]:
    return [
        0.0 if isinstance(i, Copy) else s for i, s in zip(case.program, case.seconds, strict=True)
    ]


def _alone(case: Case) -> str:
    return f"{joined(case.used) or case.machine.host} alone"
