"""Explain why a task runs on its device and at its time.

Other devices are compared by moving the task there, together with the tasks that must be on the
same device, and predicting the whole schedule again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from autosched._lib.gc_pause import without_collecting
from autosched._lib.text import duration, file_name, name_list, ranges, wrapped
from autosched.errors import ScheduleError
from autosched.explanation.facts import Predecessor, binding_predecessors, predecessors, slack
from autosched.explanation.what_if import SMALL, Case
from autosched.graph.task import Task
from autosched.placement import Choices, Placement
from autosched.program.program import Copy
from autosched.timeline.timeline import Span, Timeline

_OPERATORS = 12  # of a merged task, in the text
_FEW = 3  # other devices to compare in a large graph


@dataclass(frozen=True)
class Option:
    """A task on a device: its predicted end and makespan, or a refusal."""

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
    predicted, even if the rest is measured. A merged task calls ``operators``. Of predicted
    ``seconds``, ``basis`` says how they were found, if they were not given, and ``alone`` how long
    the task takes when no other shares its device.
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
    operators: tuple[str, ...] = ()
    basis: str = ""
    alone: float = 0.0

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        how = "measured" if self.measured else "predicted"
        start, end, makespan = map(duration, (self.start, self.end, self.makespan))
        times = f"{how} from {start} to {end} of {makespan}"
        lines = wrapped(f"{self.name} on {self.device}: {times} ({self.source})", indent=9)
        if self.operators:
            lines += wrapped(name_list(self.operators, _OPERATORS), "  calls  ", 9)
        lines += [*wrapped(self.reason, "  where  ", 9), *_option_lines(self)]
        slack = f"it could end {duration(self.slack)} later at no cost"
        if self.slack <= 1e-9 * self.makespan:
            slack = "none: whatever makes it later makes the run longer"
        return "\n".join([*lines, *wrapped(_when(self), "  when   ", 9), f"  slack  {slack}"])


@without_collecting()
def explain_task(case: Case, name: str, measured: Timeline | None = None) -> TaskExplanation:
    """Explain a task. Raises GraphError for an unknown name."""
    task = case.graph.task(name)
    timeline = case.predicted if measured is None else measured
    spans = timeline.spans
    before = predecessors(case, timeline)
    allowed = case.problem.choices
    group = allowed.group[task.index]
    others = (t for t in case.graph.tasks if allowed.group[t.index] == group and t is not task)
    together = tuple(other.name for other in others)
    at = _position(timeline, name)
    span = spans[at]
    needed = _needed(case, name, timeline, before[at])
    last = max(needed, key=lambda i: spans[i].end, default=None)
    binding = binding_predecessors(timeline, before)[at]
    return TaskExplanation(
        name=name,
        source=file_name(task.source),
        device=case.placement.device[name],
        reason=_reason(case, task, allowed),
        measured=measured is not None,
        seconds=span.seconds,
        start=span.start,
        end=span.end,
        makespan=timeline.makespan,
        ready=0.0 if last is None else spans[last].end,
        needed="" if last is None else _description(case, spans[last]),
        ahead=(
            "" if binding is None or binding.needed else _description(case, spans[binding.span])
        ),
        slack=slack(timeline, before)[at],
        bound=len(allowed.devices[task.index]) == 1,
        together=together,
        options=_options(case, task, together),
        operators=task.operators,
        basis=case.costs.basis(task) if measured is None else "",
        alone=(
            case.costs.task_seconds(task, case.machine.device(case.placement.device[name]))
            if measured is None
            else span.seconds
        ),
    )


def _position(timeline: Timeline, name: str) -> int:
    spans = enumerate(timeline.spans)
    return next(i for i, span in spans if span.kind == "run" and span.name == name)


def _needed(case: Case, name: str, timeline: Timeline, before: Sequence[Predecessor]) -> list[int]:
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
    found = [predecessor.span for predecessor in before if predecessor.needed]
    for i, span in enumerate(timeline.spans):
        instruction = case.program.instructions[span.instruction]
        if isinstance(instruction, Copy):
            if (instruction.value, instruction.version, instruction.destination) in brought:
                found.append(i)
        elif span.name in made and case.placement.device[span.name] == here:
            found.append(i)
    return found


def _description(case: Case, span: Span) -> str:
    if span.kind == "run":
        return f"{span.name!r} on {span.streams[0].device}"
    copy = case.program.instructions[span.instruction]
    return f"the copy of {span.name!r} from {getattr(copy, 'source', '')}"


def _reason(case: Case, task: Task, allowed: Choices) -> str:
    device = case.placement.device[task.name]
    bound = case.problem.bound
    if bound[task.index]:
        return f"bound to {device}, where it was added or by place="
    if len(allowed.devices[task.index]) > 1:
        return "chosen by the policy"
    group = allowed.group[task.index]
    for other in case.graph.tasks:
        if allowed.group[other.index] == group and bound[other.index]:
            bond = f"shares memory, or is kept together, with {other.name!r}"
            return f"{bond}, which is bound to {device}"
    if len(case.machine.devices) == 1:
        return "there is no other"
    return f"shares memory with what lives on {device}"


def _options(case: Case, task: Task, together: tuple[str, ...]) -> tuple[Option, ...]:
    """Return the result of each device on which the task could run, its own first."""
    own = case.placement.device[task.name]
    devices = case.problem.choices.devices[task.index]
    if len(devices) == 1:
        case = case.freed
        devices = case.problem.choices.devices[task.index]
    moved = [task, *map(case.graph.task, together)]
    others = [
        device
        for device in map(case.machine.device, devices)
        if device.name != own
        and all(case.costs.task_seconds(one, device) < math.inf for one in moved)
    ]
    few = others if len(case.graph) <= SMALL else others[:_FEW]
    names = task.name, *together
    return tuple(_option(case, names, name) for name in (own, *(device.name for device in few)))


def _option(case: Case, tasks: tuple[str, ...], device: str) -> Option:
    """Return the result of tasks that share a device on this device."""
    devices = {**case.placement.device, **dict.fromkeys(tasks, device)}
    try:
        if devices != case.placement.device:
            case = case.placed(Placement(devices, case.placement.order))
        timeline = case.predicted
    except ScheduleError as error:
        return Option(device, 0.0, 0.0, str(error))
    return Option(device, timeline.spans[_position(timeline, tasks[0])].end, timeline.makespan)


# ---- text


def _option_lines(found: TaskExplanation) -> list[str]:
    """Return a line for each device, if there are several."""
    if len(found.options) < 2:
        return []
    own, *others = ((option.device, _outcome(option, found.options[0])) for option in found.options)
    rows = [own, *ranges(others)]
    width = max(len(device) for device, _ in rows)
    lines = ["         if it were free:"] if found.bound else []
    lines += [f"{'':9}{device:<{width}}  {outcome}" for device, outcome in rows]
    if found.together:
        along = "goes" if len(found.together) == 1 else "go"
        lines += wrapped(f"to another device {name_list(found.together)} {along} along", " " * 9, 9)
    return lines


def _outcome(option: Option, own: Option) -> str:
    """Write when a task and the run end, compared with its own device."""
    if option.refusal:
        return f"impossible: {option.refusal}"
    task = f"{duration(option.end)}{_difference(option.end, own.end)}"
    run = f"{duration(option.makespan)}{_difference(option.makespan, own.makespan)}"
    return f"ends at {task}, the run at {run}"


def _difference(there: float, here: float) -> str:
    more = there - here
    if abs(more) <= 1e-9 * here:
        return ""
    return f" ({'+' if more > 0 else '-'}{duration(abs(more))})"


def _when(found: TaskExplanation) -> str:
    last = f" ({found.needed})" if found.needed else ""
    ready = f"all it needs is there at {duration(found.ready)}{last}"
    basis = f" ({found.basis})" if found.basis else ""
    takes = f"takes {duration(found.seconds)}{basis}"
    if found.seconds > found.alone * (1 + 1e-9):
        takes += f", {duration(found.alone)} alone: tasks on other streams share {found.device}"
    waited = found.start - found.ready
    if waited <= 1e-9 * found.end:
        return f"{ready}; it starts at once and {takes}"
    why = f"behind {found.ahead}" if found.ahead else "though nothing was ahead of it"
    return f"{ready}; it starts {duration(waited)} later, {why}, and {takes}"
