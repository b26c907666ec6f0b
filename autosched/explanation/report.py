"""Assemble explanations of a whole schedule and of a task, and write them for a terminal.

That has about 100 columns. The text formats facts and remedies, and computes none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, pairwise

from autosched._lib.gc_pause import without_collecting
from autosched._lib.text import (
    amount,
    count,
    duration,
    file_name,
    name_list,
    percent,
    ranges,
    shortened,
    wrapped,
)
from autosched.bounds import bounds
from autosched.bounds.periods import period_bounds
from autosched.errors import ScheduleError
from autosched.explanation.advice import (
    change_placement,
    device_count_note,
    fuse_launches,
    host_note,
    is_issued_late,
    keep_inputs,
    pageable_note,
    pin_memory,
    plans_of,
    repeat_note,
    replay_launches,
    spill_note,
    worthwhile,
)
from autosched.explanation.facts import (
    Idle,
    Predecessor,
    Step,
    binding_predecessors,
    critical_path,
    idle,
    path_seconds,
    predecessors,
    slack,
)
from autosched.explanation.what_if import SMALL, Advice, Case
from autosched.graph.task import Task
from autosched.lowering import lower
from autosched.lowering.resident_state import without_resident_state
from autosched.placement import Choices, Placement
from autosched.program.parts import crosses
from autosched.program.program import Copy, Run
from autosched.simulation.footprint import needs_of_runs
from autosched.simulation.plan import Plan
from autosched.timeline.timeline import Span, Timeline, what

_NOTED = 0.1  # of the makespan, from which a shorter period is mentioned


def in_flight_note(case: Case) -> tuple[str, ...]:
    """Note the period of a loop with two runs in flight, if it is well below the makespan."""
    if case.program.in_flight > 1 or case.machine.ranks or len(case.graph) > SMALL:
        return ()
    problem = case.problem.constrained(outputs=case.outputs)
    loop = lower(problem, case.placement, in_flight=2)
    then = Plan(problem, case.placement, loop).period
    fits = min(need.most for need in needs_of_runs(loop, problem).values()) >= 2
    if not fits or then > (1 - _NOTED) * case.makespan:
        return ()
    took = f"{duration(then)} per run instead of {duration(case.makespan)}"
    return (f"in a loop, in_flight=2 takes {took}, since runs overlap",)


_MOST_LATE = 3
_OPERATORS = 12  # of a merged task, in the text
_FEW = 3  # other devices to compare in a large graph


@dataclass(frozen=True)
class Efficiency:
    """The lower bound divided by the makespan, and the name of that bound."""

    share: float
    bound: str
    seconds: float


@dataclass(frozen=True)
class Late:
    """A task, a copy or gaps that took longer than predicted."""

    kind: str
    name: str
    predicted: float
    measured: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a schedule takes as long as it does, and what would help. Times are seconds.

    ``bound`` is the number of tasks that must run on a certain accelerator; ``efficiency`` takes
    these bindings as given. ``path_seconds`` divides the makespan (see ``facts.path_seconds``); its
    ``host`` is predicted time in which work was not issued yet.
    ``idle`` has the accelerators, or all devices if there are none. ``twice_as_fast`` is the share
    of the makespan that links, the network, or accelerators of twice the speed would save.
    ``advice`` is predicted, the largest gain first; ``late`` refers to a measured run. ``period``
    is the seconds per run with ``in_flight`` runs; all else is about a single run.
    """

    name: str
    measured: bool
    makespan: float
    predicted: float
    tasks: int
    bound: int
    copies: int
    devices: tuple[str, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    efficiency: Efficiency
    critical_path: tuple[Step, ...]
    path_seconds: Mapping[str, float]
    idle: tuple[Idle, ...]
    copied_bytes: float
    copies_hidden: float
    twice_as_fast: Mapping[str, float]
    late: tuple[Late, ...]
    in_flight: int
    period: float
    period_bound: float

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return report_text(self)

    def __repr__(self) -> str:
        how = "measured" if self.measured else "predicted"
        advice = count(len(self.advice), "suggestion")
        return f"<Explanation of {self.name!r}: {self.makespan:.3g} s {how}, {advice}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self)}


@without_collecting()
def explain(case: Case, measured: Timeline | None = None) -> Explanation:
    """Explain a schedule, as predicted or as ``measured``.

    Raises ScheduleError for a timeline of another program.

    >>> import autosched as asc
    >>> graph = asc.Graph("one")
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", seconds=1.0))
    >>> asc.schedule(graph, asc.Machine.emulated(gpus=0)).explain().efficiency
    Efficiency(share=1.0, bound='critical_path', seconds=1.0)
    """
    timeline = case.predicted if measured is None else _checked(case, measured)
    before = predecessors(case, timeline)
    binding = binding_predecessors(timeline, before)
    path = critical_path(case.program, timeline, binding)
    plans = plans_of(case, case.placement)
    used = set(case.placement.device.values())
    guess = case.costs.guess(case.graph)
    known = bounds(without_resident_state(case.problem.original or case.problem))
    bound = max(known, key=known.__getitem__)
    share = known[bound] / timeline.makespan if timeline.makespan else 1.0
    causes = path_seconds(path)
    if measured is None and is_issued_late(case) and "gap" in causes:
        causes["host"] = causes.pop("gap")  # predicted gaps are the host's
    return Explanation(
        name=case.graph.name,
        measured=measured is not None,
        makespan=timeline.makespan,
        predicted=case.makespan,
        tasks=len(case.graph),
        bound=len(case.bound),
        copies=sum(isinstance(i, Copy) for i in case.program),
        devices=tuple(name for name in case.machine.names if name in used),
        advice=worthwhile(
            case,
            chain(
                pin_memory(case),
                keep_inputs(case),
                fuse_launches(case),
                replay_launches(case),
                change_placement(case, plans),
            ),
        ),
        notes=(
            *(
                [f"{guess}; a copy of what has no known size carries nothing: give examples="]
                if guess
                else []
            ),
            *host_note(case),
            *device_count_note(case, plans),
            *pageable_note(case),
            *repeat_note(case),
            *spill_note(case),
            *in_flight_note(case),
        ),
        efficiency=Efficiency(share, bound, known[bound]),
        critical_path=path,
        path_seconds=causes,
        idle=tuple(idle(name, timeline, binding) for name in case.workers),
        copied_bytes=sum(span.nbytes for span in timeline.spans),
        copies_hidden=timeline.overlap().copies_hidden,
        twice_as_fast=_twice_as_fast(case),
        late=_late(case, timeline, path) if measured is not None else (),
        in_flight=case.program.in_flight,
        period=case.period,
        period_bound=max(period_bounds(case.problem, case.program.in_flight).values()),
    )


def _checked(case: Case, timeline: Timeline) -> Timeline:
    """Return a timeline of this program. Raises ScheduleError for any other."""
    here = {
        i: what(instruction)
        for i, instruction in enumerate(case.program)
        if isinstance(instruction, (Run, Copy))
    }
    there = {span.instruction: (span.kind, span.name) for span in timeline.spans}
    if here != there:
        raise ScheduleError(
            "measured= is a timeline of another program; schedule.profile(...) makes one of this"
        )
    return timeline


def _twice_as_fast(case: Case) -> dict[str, float]:
    """Return the gain of links, of the network, and of accelerators of twice the speed."""
    workers = "accelerators" if case.machine.accelerators else "devices"
    copies = [isinstance(i, Copy) for i in case.program]
    on_workers = [i.stream.device in case.workers for i in case.program]
    compute = [on and not copy for on, copy in zip(on_workers, copies, strict=True)]
    ranks = dict(case.program.ranks)
    across = [crosses(i, ranks) for i in case.program]
    links = [copy and not far for copy, far in zip(copies, across, strict=True)]
    found = {}
    for name, faster in (("links", links), ("the network", across), (workers, compute)):
        if any(faster) and case.makespan:
            pairs = zip(case.seconds, faster, strict=True)
            seconds = [s / 2 if fast else s for s, fast in pairs]
            found[name] = 1 - case.timed(seconds) / case.makespan
    return found


def _late(case: Case, timeline: Timeline, path: Sequence[Step]) -> tuple[Late, ...]:
    """Return what took longer than predicted, the longest first."""
    seconds = case.seconds
    found = [Late(s.kind, s.name, seconds[s.instruction], s.seconds) for s in timeline.spans]
    found.append(Late("gaps", "", 0.0, sum(step.gap for step in path)))
    least = 0.01 * timeline.makespan
    late = [item for item in found if item.measured - item.predicted > least]
    late.sort(key=lambda item: item.predicted - item.measured)
    return tuple(late[:_MOST_LATE])


# ---- its text


_INDENT = 15  # of the facts, after their headings
_MOST_STEPS = 8
_MOST_CAUSES = 4
_MOST_DEVICES = 8  # whose idle time has all its causes

_BOUNDS = {
    "critical_path": "the longest chain of tasks and copies takes that long",
    "work": "the devices need that long for all tasks together",
    "interval": "there is a span of time in which devices must do that much",
    "copies": "copy streams need that long for what must go through them",
    "host": "threads of the host need that long to issue all tasks",
}
_PATH = {
    "compute": "computing",
    "copy": "copies",
    "device": "devices busy with other tasks",
    "link": "copies in line behind others",
    "order": "waiting for memory or order",
    "gap": "nothing (gaps)",
    "host": "waiting for the host to issue work",
}
_WAITS = {
    "copy": "for copies",
    "link": "for copies in line",
    "gap": "in gaps",
    "end": "with nothing left to do",
}
_ORDER = {"device": "device busy with", "link": "in line behind", "order": "after"}


def report_text(found: Explanation) -> str:
    """Return an explanation as text."""
    how = "measured" if found.measured else "predicted"
    also = f" ({duration(found.predicted)} predicted)" if found.measured else ""
    devices = ", ".join(name for name, _ in ranges((name, "") for name in found.devices))
    tasks = count(found.tasks, "task")
    lines = wrapped(
        f"{found.name}: {duration(found.makespan)} {how}{also}, {tasks} on {devices or 'no device'}"
    )
    if not found.makespan:
        return "\n".join([*lines, "", "It takes no time, so there is nothing to explain."])
    lines += ["", *_advice(found), ""]
    for heading, text in _facts(found):
        lines += wrapped(text, f"{heading:<{_INDENT}}", _INDENT)
    return "\n".join([*lines, *_steps(found.critical_path)])


def _advice(found: Explanation) -> Iterator[str]:
    if found.advice:
        yield "What would help, each alone, as simulated"
    else:
        yield "Nothing that was tried would make it faster."
    for number, advice in enumerate(found.advice, 1):
        head = f"{number:>3}. -{percent(advice.share)}  "
        yield from wrapped(f"{advice.words} -> {duration(advice.makespan)}", head, len(head))
    for note in found.notes:
        begins_with_name = ":" in note.split()[0]
        yield from wrapped(f"{note if begins_with_name else note[0].upper() + note[1:]}.")


def _facts(found: Explanation) -> Iterator[tuple[str, str]]:
    """Yield headings and texts."""
    best = found.efficiency
    if best.seconds:
        bound = f", {count(found.bound, 'task')} bound as they are," if found.bound > 1 else ""
        bound = ", 1 task bound as it is," if found.bound == 1 else bound
        least = f"no schedule{bound} takes less than {duration(best.seconds)}"
        yield "Efficiency", f"{percent(best.share)}: {least}: {_BOUNDS[best.bound]}"
    if found.copies:
        size = f"{amount(found.copied_bytes, 'B')} in " if found.copied_bytes else ""
        hidden = f"{percent(found.copies_hidden)} of their time hidden behind compute"
        yield "Copies", f"{size}{found.copies:,}, {hidden}"
    brief = len(found.idle) > _MOST_DEVICES
    yield from ranges((idle.device, _idle(idle, found.makespan, brief)) for idle in found.idle)
    if found.twice_as_fast:
        parts = found.twice_as_fast.items()
        saved = (f"{name} {'nothing' if part < 0.005 else f'-{part:.0%}'}" for name, part in parts)
        yield "Twice as fast", ", ".join(saved)
    if found.late:
        yield "Late", "; ".join(map(_late_words, found.late))
    if found.in_flight > 1:
        share = percent(found.period_bound / found.period) if found.period else "100%"
        least = f"no schedule with as many takes less than {duration(found.period_bound)} ({share})"
        each = f"{duration(found.period)} per run, with {found.in_flight} in flight"
        yield "Period", f"{each}; {least}"
    causes = _longest_first(found.path_seconds)
    shares = (f"{percent(seconds / found.makespan)} {_PATH[cause]}" for cause, seconds in causes)
    yield "Critical path", ", ".join(shares)


def _idle(found: Idle, makespan: float, brief: bool) -> str:
    """Write how long a device is idle, and why; if ``brief``, so that many devices share the words."""
    if found.causes.keys() == {"end"} and found.seconds >= makespan:
        return "not used"
    if found.seconds <= 1e-9 * makespan:
        return "never idle"
    causes = _longest_first(found.causes)
    share = f"idle {percent(found.seconds / makespan)}"
    if brief and not found.causes.keys() <= {"end"}:
        return f"{share}, mostly {_WAITS.get(causes[0][0], 'for another device')}"
    parts = [
        f"{duration(seconds)} {_WAITS.get(cause, f'for {cause}')}"
        for cause, seconds in causes[:_MOST_CAUSES]
    ]
    if rest := sum(seconds for _, seconds in causes[_MOST_CAUSES:]):
        parts.append(f"{duration(rest)} else")
    return f"{share}: {', '.join(parts)}"


def _late_words(late: Late) -> str:
    if late.kind == "gaps":
        more = duration(late.measured - late.predicted)
        return f"{more} of gaps in which nothing held anything up"
    kind = "task" if late.kind == "run" else "copy of"
    return f"{kind} {late.name!r} {duration(late.measured)} instead of {duration(late.predicted)}"


def _steps(path: Sequence[Step]) -> Iterator[str]:
    """Yield the longest steps of the critical path, in order, and single steps between."""
    # What only waits for others, such as a view, is left out.
    steps = [
        replace(step, cause="data") if before is not None and before.end <= before.start else step
        for before, step in pairwise((None, *path))
        if step is not None and step.end > step.start
    ]
    everything = range(len(steps))
    longest = sorted(everything, key=lambda i: -float(f"{steps[i].end - steps[i].start:.3g}"))
    ends = {*longest[:_MOST_STEPS], -1, len(steps)}
    shown = {i for i in everything if i in ends or {i - 1, i + 1} <= ends}
    width = max((len(_step(steps[i])) for i in shown), default=0)
    for is_shown, some in groupby(everything, shown.__contains__):
        part = [steps[i] for i in some]
        if not is_shown:
            seconds = sum(step.end - step.start for step in part)
            yield f"{'':11}  {duration(seconds):>8}  ... {count(len(part), 'step')}"
        for step in part if is_shown else ():
            times = f"{duration(step.start):>11}  {duration(step.end - step.start):>8}"
            yield f"{times}  {_step(step):<{width}}  {_why(step)}".rstrip()


def _step(step: Step) -> str:
    return f"{'copy ' if step.kind == 'copy' else ''}{shortened(step.name)}, {step.where}"


def _why(step: Step) -> str:
    """Write what a step waited for, unless it is the previous result."""
    parts = []
    if step.cause in _ORDER:
        parts.append(f"{_ORDER[step.cause]} {shortened(step.behind)!r}")
    if step.gap > 0.05 * (step.end - step.start) and step.gap > 0:
        parts.append(f"{duration(step.gap)} late")
    return ", ".join(parts)


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


# ---- a single task
#
# Other devices are compared by moving the task there, together with the tasks that must be on the
# same device, and predicting the whole schedule again.


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
