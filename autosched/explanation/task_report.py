"""Explain why a task runs on its device and at its time.

Other devices are compared by moving the task there, together with the tasks that must be on the
same device, and predicting the whole schedule again.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from autosched._lib.gc_pause import without_collecting
from autosched.errors import ScheduleError
from autosched.explanation.case import SMALL, Case
from autosched.explanation.causes import Behind, all_before, gates
from autosched.explanation.facts import slack
from autosched.explanation.words import names, place
from autosched.graph.task import Task
from autosched.placement import Placement, choices, constraint
from autosched.program.program import Copy
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.paint import duration

__all__ = ["Option", "TaskExplanation", "explain_task"]

_FEW = 3  # other devices to compare in a large graph


@dataclass(frozen=True)
class Option:
    """A task on a device: its predicted end and the makespan, or why it cannot run there."""

    device: str
    end: float
    makespan: float
    refusal: str = ""


@dataclass(frozen=True)
class TaskExplanation:
    """Why a task runs on its device and at its time; ``print`` it to read it.

    Times are seconds since the run began. The task could start at ``ready``, when everything it
    needs was there; ``needed`` arrived last. Then the stream was busy with ``ahead``, if that is
    not empty. The task could end ``slack`` seconds later without increasing the makespan. If it
    moves to another device, the tasks ``together`` move with it. ``options`` are its devices, its
    own first; if it is ``bound``, they are the devices it could run on otherwise. They are
    predicted, even if the rest is measured.
    """

    name: str
    source: str
    device: str
    reason: str
    measured: bool
    seconds: float
    start: float
    end: float
    makespan: float
    ready: float
    needed: str
    ahead: str
    slack: float
    bound: bool
    together: tuple[str, ...]
    options: tuple[Option, ...]

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        how = "measured" if self.measured else "predicted"
        times = f"{how} from {duration(self.start)} to {duration(self.end)} of {duration(self.makespan)}"
        lines = [
            *_filled(f"{self.name} on {self.device}: {times} ({self.source})", ""),
            *_filled(self.reason, "  where  "),
            *_compared(self),
            *_filled(_when(self), "  when   "),
            f"  slack  {_slack(self)}",
        ]
        return "\n".join(lines)


@without_collecting()
def explain_task(case: Case, name: str, measured: Timeline | None = None) -> TaskExplanation:
    """Explain a task. Raises GraphError for an unknown name."""
    task = case.graph.task(name)
    timeline = case.predicted if measured is None else measured
    before = all_before(case, timeline)
    at = next(
        i for i, span in enumerate(timeline.spans) if span.kind == "run" and span.name == name
    )
    spans = timeline.spans
    span = timeline.spans[at]
    needed = max(
        _needed(case, name, timeline, before[at]), key=lambda i: spans[i].end, default=None
    )
    gate = gates(timeline, before)[at]
    group = choices(case.graph, case.machine).group
    together = tuple(
        t.name for t in case.graph.tasks if group[t.index] == group[task.index] and t is not task
    )
    return TaskExplanation(
        name=name,
        source=place(task),
        device=case.placement.device[name],
        reason=_reason(case, name),
        measured=measured is not None,
        seconds=span.seconds,
        start=span.start,
        end=span.end,
        makespan=timeline.makespan,
        ready=spans[needed].end if needed is not None else 0.0,
        needed=_called(case, needed, spans),
        ahead=_called(case, gate.span, spans) if gate is not None and not gate.needed else "",
        slack=slack(timeline, before)[at],
        bound=len(choices(case.graph, case.machine).devices[task.index]) == 1,
        together=together,
        options=_options(case, name, together),
    )


def _needed(case: Case, name: str, timeline: Timeline, before: Sequence[Behind]) -> list[int]:
    """Return the spans that must end before a task can start.

    They are its predecessors in the program, and earlier ones: a task needs no wait for what an
    earlier task on its stream waited for.
    """
    task = case.graph.task(name)
    here = case.placement.device[name]
    makers = {dependency.task for dependency in task.dependencies if dependency.kind == "data"}
    made = {case.graph.tasks[maker].name for maker in makers}
    brought = {
        (case.graph.values[value].name, version, here) for value, version in case.graph.needs(task)
    }
    found = [behind.span for behind in before if behind.needed]
    for i, span in enumerate(timeline.spans):
        instruction = case.program.instructions[span.instruction]
        if isinstance(instruction, Copy):
            if (instruction.value, instruction.version, instruction.destination) in brought:
                found.append(i)
        elif span.name in made and case.placement.device[span.name] == here:
            found.append(i)
    return found


def _called(case: Case, at: int | None, spans: Sequence[Span]) -> str:
    """Describe a task or a copy in words."""
    if at is None:
        return ""
    span = spans[at]
    if span.kind == "run":
        return f"{span.name!r} on {span.streams[0].device}"
    copy = case.program.instructions[span.instruction]
    return f"the copy of {span.name!r} from {getattr(copy, 'source', '')}"


def _reason(case: Case, name: str) -> str:
    """Say why the task is on its device."""
    task = case.graph.task(name)
    device = case.placement.device[name]
    if constraint(task, case.machine):
        return f"bound to {device}, where it was added or by place="
    allowed = choices(case.graph, case.machine)
    possible = allowed.devices[task.index]
    group = allowed.group
    if len(possible) > 1:
        return "chosen by the policy"
    for other in case.graph.tasks:
        if group[other.index] == group[task.index] and constraint(other, case.machine):
            return f"shares memory, or is kept together, with {other.name!r}, which is bound to {device}"
    return (
        f"shares memory with what lives on {device}"
        if len(case.machine.devices) > 1
        else "there is no other"
    )


def _options(case: Case, name: str, together: tuple[str, ...]) -> tuple[Option, ...]:
    """Return the result of each device on which the task is allowed, or would be if not bound.

    The first one is its own device.
    """
    here = case.placement.device[name]
    task = case.graph.task(name)
    if len(choices(case.graph, case.machine).devices[task.index]) == 1:
        case = case.freed
    allowed = choices(case.graph, case.machine).devices[task.index]
    moved = [task, *map(case.graph.task, together)]
    able = [
        device for device in allowed if max(_seconds(case, one, device) for one in moved) < math.inf
    ]
    others = [device for device in able if device != here][
        : None if len(case.graph) <= SMALL else _FEW
    ]
    return (
        _ended(here, name, case.predicted),
        *(_moved(case, (name, *together), device) for device in others),
    )


def _seconds(case: Case, task: Task, device: str) -> float:
    return case.costs.task_seconds(task, case.machine.device(device))


def _moved(case: Case, tasks: tuple[str, ...], device: str) -> Option:
    """Return the result of moving tasks that share a device to another device."""
    placement = Placement(
        {**case.placement.device, **dict.fromkeys(tasks, device)}, case.placement.order
    )
    try:
        return _ended(device, tasks[0], case.placed(placement).predicted)
    except ScheduleError as error:
        return Option(device, 0.0, 0.0, str(error))


def _ended(device: str, name: str, timeline: Timeline) -> Option:
    end = next(span.end for span in timeline.spans if span.kind == "run" and span.name == name)
    return Option(device, end, timeline.makespan)


# ---- words


def _filled(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=" " * 9, break_on_hyphens=False
    )


def _compared(found: TaskExplanation) -> list[str]:
    """Return a line for each device, if there are several."""
    if len(found.options) < 2:
        return []
    width = max(len(option.device) for option in found.options)
    lines = ["         if it were free:"] if found.bound else []
    lines += [
        f"{'':9}{option.device:<{width}}  {_ends(option, found.options[0])}"
        for option in found.options
    ]
    if found.together:
        along = "goes" if len(found.together) == 1 else "go"
        lines += _filled(f"to another device {names(found.together)} {along} along", " " * 9)
    return lines


def _ends(option: Option, here: Option) -> str:
    """Say when a task and the run end, and how much later that is than now."""
    if option.refusal:
        return f"impossible: {option.refusal}"
    task = f"ends at {duration(option.end)}{_later(option.end, here.end)}"
    return f"{task}, the run at {duration(option.makespan)}{_later(option.makespan, here.makespan)}"


def _later(there: float, here: float) -> str:
    more = there - here
    if abs(more) <= 1e-9 * here:
        return ""
    return f" ({'+' if more > 0 else '-'}{duration(abs(more))})"


def _when(found: TaskExplanation) -> str:
    needed = f"all it needs is there at {duration(found.ready)}" + (
        f" ({found.needed})" if found.needed else ""
    )
    waited = found.start - found.ready
    if waited <= 1e-9 * found.end:
        return f"{needed}; it starts at once and takes {duration(found.seconds)}"
    behind = f"behind {found.ahead}" if found.ahead else "though nothing was ahead of it"
    return f"{needed}; it starts {duration(waited)} later, {behind}, and takes {duration(found.seconds)}"


def _slack(found: TaskExplanation) -> str:
    if found.slack <= 1e-9 * found.makespan:
        return "none: whatever makes it later makes the run longer"
    return f"it could end {duration(found.slack)} later at no cost"
