"""Compute facts of a timeline: what spans waited for, critical path, idle times, slack.

A span begins when the last of its predecessors has ended: a span whose result it needs, or the
previous span on its stream. If both end at the same time, the needed result is the cause.

All numbers are seconds. Contains no advice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from autosched.explanation.what_if import Case
from autosched.program.parts import crosses
from autosched.program.program import Copy, Instruction, Program, Run
from autosched.timeline.timeline import Span, Timeline, preceding_spans

Cause = Literal["data", "copy", "order", "device", "link", "batch"]
"""Why a span follows another.

The other span produced data that are needed here (data), copied them (copy), or had to end before
for another reason, such as reuse of memory (order). Or it only preceded this one on the stream: a
task on the stream of a device (device), a copy or a read on the stream of a link (link), or a copy
that the same task needs (batch).
"""

_NEEDED = ("data", "copy", "order")


class Predecessor(NamedTuple):
    """A predecessor of a span, ``span`` in the timeline, and the cause of the order."""

    span: int
    cause: Cause

    @property
    def needed(self) -> bool:
        """Whether the order is required by the graph, and not only by the stream."""
        return self.cause in _NEEDED


def predecessors(case: Case, timeline: Timeline) -> list[list[Predecessor]]:
    """Return the direct predecessors of each span of a timeline."""
    return [
        [Predecessor(other, _cause(case, timeline, i, other)) for other in before]
        for i, before in enumerate(preceding_spans(timeline))
    ]


def binding_predecessors(
    timeline: Timeline, before: Sequence[Sequence[Predecessor]]
) -> list[Predecessor | None]:
    """Return for each span the predecessor that determined its start, or None."""
    ends = [span.end for span in timeline.spans]
    return [max(some, key=lambda b: (ends[b.span], b.needed), default=None) for some in before]


def _cause(case: Case, timeline: Timeline, later: int, earlier: int) -> Cause:
    ours = case.program.instructions[timeline.spans[later].instruction]
    theirs = case.program.instructions[timeline.spans[earlier].instruction]
    one_stream = not set(timeline.spans[later].streams).isdisjoint(timeline.spans[earlier].streams)
    otherwise: Cause = "link"
    match ours, theirs:
        case Run(), Run():
            index = case.graph.task(theirs.task).index
            dependencies = case.graph.task(ours.task).dependencies
            kind = next((d.kind for d in dependencies if d.task == index), None)
            if kind is not None:
                return "data" if kind == "data" else "order"
            otherwise = "device"
        case Run(), Copy():
            value = case.graph.value(theirs.value).index
            if any(use.value == value for use in case.graph.task(ours.task).reads):
                return "copy"
        case Copy(), Run():
            task = case.graph.task(theirs.task)
            value = case.graph.value(ours.value).index
            if any(use.value == value for use in (*task.outputs, *task.changes)):
                return "data"
        case Copy(), Copy():
            arrived = theirs.value, theirs.version, theirs.destination
            if arrived == (ours.value, ours.version, ours.source):
                return "copy"
            otherwise = "batch" if case.readers(ours) & case.readers(theirs) else "link"
    return otherwise if one_stream else "order"


Bindings = Sequence[Predecessor | None]
"""By span, the predecessor that determined its start."""


@dataclass(frozen=True)
class Step:
    """A task or a copy of the critical path: device, times, predecessor and cause.

    It starts ``gap`` seconds after its predecessor ends. ``where`` is a device, or two with an
    arrow between. ``cause`` is one of ``causes.Cause``, or ``start``.
    """

    kind: str
    name: str
    where: str
    start: float
    end: float
    cause: str
    behind: str
    gap: float


@dataclass(frozen=True)
class Idle:
    """The idle time of a device, and its parts by cause.

    ``copy``: data of the next task were being copied; ``link``: that copy was queued after other
    copies; the name of a device: the data were being computed there; ``gap``: the data were there
    already; ``end``: there was nothing left to do.
    """

    device: str
    seconds: float
    causes: Mapping[str, float]


def critical_path(program: Program, timeline: Timeline, binding: Bindings) -> tuple[Step, ...]:
    """Return the critical path: the chain of steps that ends with the last span."""
    spans = timeline.spans
    ranks = dict(program.ranks)
    steps = list[Step]()
    at = max(range(len(spans)), key=lambda i: spans[i].end, default=None)
    while at is not None:
        span = spans[at]
        where = _where(program.instructions[span.instruction], span, ranks)
        times = where, span.start, span.end
        before = binding[at]
        if before is None:
            at = None
            steps.append(Step(span.kind, span.name, *times, "start", "", max(0.0, span.start)))
        else:
            at = before.span
            gap = max(0.0, span.start - spans[at].end)
            steps.append(Step(span.kind, span.name, *times, before.cause, spans[at].name, gap))
    return tuple(reversed(steps))


def path_seconds(path: Sequence[Step]) -> dict[str, float]:
    """Return the seconds of the critical path by cause; they sum to the makespan.

    ``compute`` and ``copy`` produced and copied data of the next step; ``device`` and ``link`` only
    preceded it on the stream; ``order`` had to end before it for another reason; in a ``gap``
    nothing was waited for.
    """
    total = dict.fromkeys(("compute", "copy", "device", "link", "order", "gap"), 0.0)
    for i, step in enumerate(path):
        following = path[i + 1] if i + 1 < len(path) else None
        ended = step.end if following is None else min(step.end, following.start)
        cause = "data" if following is None else following.cause
        if cause == "data":
            cause = "compute" if step.kind == "run" else "copy"
        total["copy" if cause == "batch" else cause] += ended - step.start
        total["gap"] += step.gap
    return {cause: seconds for cause, seconds in total.items() if seconds > 0}


def idle(device: str, timeline: Timeline, binding: Bindings) -> Idle:
    """Return how long no task ran on a device, by cause."""
    causes: dict[str, float] = {}
    for span, cause, seconds in _waits(device, timeline, binding):
        name = cause
        if span is not None:
            name = timeline.spans[span].streams[0].device if cause == "data" else cause
        causes[name] = causes.get(name, 0.0) + seconds
    return Idle(device, sum(causes.values()), causes)


def slack(timeline: Timeline, before: Sequence[Sequence[Predecessor]]) -> list[float]:
    """Return how much later each span could end without delaying the last one."""
    latest = [timeline.makespan] * len(timeline.spans)
    for i in reversed(range(len(latest))):
        for other, _ in before[i]:
            latest[other] = min(latest[other], latest[i] - timeline.spans[i].seconds)
    return [max(0.0, late - span.end) for late, span in zip(latest, timeline.spans, strict=True)]


def _waits(
    device: str, timeline: Timeline, binding: Bindings
) -> Iterator[tuple[int | None, str, float]]:
    """Yield idle intervals of a device: awaited span, cause, length."""
    busy = 0.0
    for i, span in enumerate(timeline.spans):
        if span.kind == "run" and span.streams[0].device == device:
            if span.start > busy:
                yield from _chain(i, busy, device, timeline, binding)
            busy = max(busy, span.end)
    if timeline.makespan > busy:
        yield None, "end", timeline.makespan - busy


def _chain(
    span: int, since: float, device: str, timeline: Timeline, binding: Bindings
) -> Iterator[tuple[int | None, str, float]]:
    """Yield what a span waited for from ``since`` to its start, along its chain of predecessors.

    If the predecessor is a task on another device, the device waits for what that task waits for,
    too.
    """
    until = timeline.spans[span].start
    while until > since:
        before = binding[span]
        if before is None:
            yield None, "gap", until - since
            return
        other = timeline.spans[before.span]
        if (ended := max(since, min(until, other.end))) < until:
            yield None, "gap", until - ended
            until = ended
        began = max(since, min(until, other.start))
        if began < until:
            cause = "data" if other.kind == "run" else "link" if before.cause == "link" else "copy"
            here = other.kind == "run" and other.streams[0].device == device
            yield (None, "gap", until - began) if here else (before.span, cause, until - began)
            until = began
        span = before.span


def _where(instruction: Instruction, span: Span, ranks: Mapping[str, int]) -> str:
    if isinstance(instruction, Copy):
        network = " over the network" if crosses(instruction, ranks) else ""
        return f"{instruction.source} -> {instruction.destination}{network}"
    return span.streams[0].device
