"""Assemble the explanation of a whole schedule, and write it for a terminal of about 100 columns.

The text formats facts and remedies, and computes none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, pairwise

from autosched._lib.gc_pause import without_collecting
from autosched._lib.text import amount, count, duration, percent, ranges, shortened, wrapped
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
    Step,
    binding_predecessors,
    critical_path,
    idle,
    path_seconds,
    predecessors,
)
from autosched.explanation.what_if import SMALL, Advice, Case
from autosched.lowering import lower
from autosched.lowering.resident_state import without_resident_state
from autosched.program.parts import crosses
from autosched.program.program import Copy, Run
from autosched.simulation.footprint import needs_of_runs
from autosched.simulation.plan import Plan
from autosched.timeline.timeline import Timeline, what

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
