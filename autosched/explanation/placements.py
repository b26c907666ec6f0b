"""Suggest other placements, and fewer or more devices.

The placements are those of the policies that ``auto`` tries, with and without the devices to which
the user bound tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autosched._lib.text import count, device_list, duration, file_name, name_list, percent, spelled
from autosched.errors import ScheduleError
from autosched.explanation.what_if import Advice, Case
from autosched.graph.graph import Task
from autosched.placement import Placement
from autosched.policies.candidates import candidates
from autosched.program.program import Copy

_MOST = 20_000  # tasks, up to which there is time to plan again
_FAR = 3  # times the makespan, from which percentages are hard to read
_SAME = 0.05  # of the makespan, by which fewer devices may be slower and are still mentioned


@dataclass(frozen=True)
class Plans:
    """Other placements, as ``"auto"`` finds them, the best first: ``bound`` respects bindings.

    ``freed`` ignores bindings to accelerators, ``off_host`` ignores bindings to a CPU of tasks that
    are slow there.
    """

    bound: tuple[Case, ...]
    freed: tuple[Case, ...]
    off_host: tuple[Case, ...]

    @classmethod
    def of(cls, case: Case) -> Plans:
        """Plan with other policies, unless the graph is too large."""
        return cls(
            _plans(case, [case.placement]),
            _plans(case.freed, [case.placement]) if case.bound else (),
            _plans(case.unbound(case.slow_on_host), []) if case.slow_on_host else (),
        )


def promised(case: Case) -> float:
    """Return the makespan of a changed case, as placed, or of the best plan if that is longer.

    Whoever follows advice plans again, and may then get either.
    """
    return max([case.makespan, *(plan.makespan for plan in _plans(case, [])[:1])])


def _plans(case: Case, tried: list[Placement]) -> tuple[Case, ...]:
    """Return the plans of all policies but those ``tried``, the best first; none of large graphs."""
    graph = case.graph
    if len(graph) > _MOST:
        return ()
    plans: list[Case] = []
    confined = case.problem.confined
    for policy in candidates(case.problem):
        try:
            placement = policy(confined)
            if placement not in tried:
                tried.append(placement)
                plan = case.placed(placement)
                _ = plan.makespan  # raises for instructions that the machine cannot execute
                plans.append(plan)
        except ScheduleError:  # another policy may succeed
            continue
    return tuple(sorted(plans, key=lambda plan: plan.makespan))


def change_placement(case: Case, plans: Plans) -> Iterator[Advice]:
    """Suggest other placements, and name the bindings that prevent them."""
    best = case.makespan
    for plan in plans.bound[:1]:
        yield _remedy(case, plan, "policy")
        best = min(best, plan.makespan)
    for plan in plans.off_host[:1]:
        moved = [t for t in case.slow_on_host if plan.placement.device[t.name] in case.workers]
        if plan.makespan < best and moved:
            yield _off_host_remedy(case, plan, moved)
    for plan in plans.freed[:1]:
        if plan.makespan < best:
            free = plan.having(costs=case.costs)
            yield replace(_remedy(case, plan, "bound"), makespan=promised(free))


def _off_host_remedy(case: Case, plan: Case, moved: Sequence[Task]) -> Advice:
    """Suggest releasing tasks that are bound to a CPU and slow there."""
    names = tuple(task.name for task in moved)
    host = case.placement.device[names[0]]
    taken = duration(sum(case.task_seconds(task, host) for task in moved))
    there = device_list(list(dict.fromkeys(plan.placement.device[name] for name in names)))
    are, them = ("is", "it") if len(names) == 1 else ("are", "them")
    words = (
        f"{name_list(names)} {are} bound to {host} ({file_name(moved[0].source)}), which takes "
        f"{taken} for that; policy='auto' without that puts {them} on {there}"
    )
    return Advice("host bound", words, names, (), plan.makespan)


def _remedy(case: Case, plan: Case, kind: str) -> Advice:
    """Describe what is wrong with the devices of tasks."""
    bound = case.bound if kind == "bound" else ()
    unused = [name for name in plan.used if name not in case.used]
    binding = _binding(case, bound) if bound else ""
    reason = f"{binding}; " if bound else ""
    auto = "policy='auto'" + (" without that" if bound else "")
    if len(plan.used) < len(case.used):
        kind = f"fewer {kind}"
        if len(plan.used) > 1:
            words = f"{device_list(plan.used)} do better than {spelled(len(case.used))}"
        else:
            words = f"{_no_gain(case, plan.makespan)}; {_alone(plan)} takes less"
        words += f", but {binding}" if bound else ""
    elif unused:
        kind = f"idle {kind}"
        stand, them = ("stands", "it") if len(unused) == 1 else ("stand", "them")
        idle = f"{device_list(unused)} could help and {stand} idle"
        words = f"{idle}: {reason}{auto} uses {them}"
    elif plan.placement.device == case.placement.device:
        words = f"tasks could be issued in a better order: {auto} finds one"
    else:
        words = f"{reason or 'tasks could be placed better: '}{auto} finds a faster plan"
    return Advice(kind, words, tuple(task.name for task in bound), (), plan.makespan)


def _binding(case: Case, bound: Sequence[Task]) -> str:
    what = f"{count(len(bound), 'task')} {'is' if len(bound) == 1 else 'are'}"
    if 1 < len(bound) == len(case.graph.tasks):
        what = "all tasks are"
    devices = device_list(list(dict.fromkeys(str(case.problem.constraint(task)) for task in bound)))
    return f"{what} bound to {devices} (at {file_name(bound[0].source)}, or by place=)"


def device_count_note(case: Case, plans: Plans) -> tuple[str, ...]:
    """Describe that more devices, or fewer, would not help."""
    more = [plan for plan in plans.bound if len(plan.used) > len(case.used)]
    fewer = [plan for plan in plans.bound if len(plan.used) < len(case.used)]
    if more and more[0].makespan >= case.makespan > 0:
        take = "takes" if len(more[0].used) == 1 else "take"
        longer = f"{take} {_longer(more[0].makespan / case.makespan)}"
        devices = device_list(more[0].used)
        return (f"{_no_gain(more[0], case.makespan)} ({devices} {longer})",)
    if fewer and case.makespan < fewer[0].makespan <= case.makespan * (1 + _SAME):
        return (f"on {_alone(fewer[0])} it takes {duration(fewer[0].makespan)}, hardly longer",)
    return ()


def _longer(ratio: float) -> str:
    if ratio > _FAR:
        return f"{ratio:.0f} times as long"
    return f"{percent(ratio - 1)} longer" if ratio > 1.005 else "as long"


def _no_gain(plan: Case, other: float) -> str:
    """Write that the devices do not help: copies are the reason if it were better without."""
    pairs = zip(plan.program, plan.seconds, strict=True)
    without_copies = plan.timed([0.0 if isinstance(i, Copy) else s for i, s in pairs])
    why = "there is too little to do at once"
    if without_copies < other:
        why = "copies take longer than the compute they save"
    if len(plan.used) == 1:
        return f"using {device_list(plan.used)} gives nothing here: {why}"
    return f"{spelled(len(plan.used))} devices give nothing here: {why}"


def _alone(case: Case) -> str:
    return f"{device_list(case.used) or case.machine.host} alone"
