"""Find what each task and each copy of a timeline waited for.

A span begins when the last of its predecessors has ended: a span whose result it needs, or the
previous span on its stream. If both end at the same time, the needed result is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from autosched.explanation.case import Case
from autosched.program.program import Copy, Run
from autosched.timeline.timeline import Timeline, preceding_spans

__all__ = ["Cause", "Predecessor", "binding_predecessors", "predecessors"]

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
    match ours, theirs:
        case Run(), Run():
            index = case.graph.task(theirs.task).index
            dependencies = case.graph.task(ours.task).dependencies
            kind = next((d.kind for d in dependencies if d.task == index), None)
            if kind is None:
                return "device" if one_stream else "order"
            return "data" if kind == "data" else "order"
        case Run(), Copy():
            reads = case.graph.task(ours.task).reads
            value = case.graph.value(theirs.value).index
            if any(use.value == value for use in reads):
                return "copy"
            return "link" if one_stream else "order"
        case Copy(), Run():
            task = case.graph.task(theirs.task)
            value = case.graph.value(ours.value).index
            made = (*task.outputs, *task.changes)
            if any(use.value == value for use in made):
                return "data"
            return "link" if one_stream else "order"
        case Copy(), Copy():
            arrived = theirs.value, theirs.version, theirs.destination
            if arrived == (ours.value, ours.version, ours.source):
                return "copy"
            if not one_stream:
                return "order"
            return "batch" if case.readers(ours) & case.readers(theirs) else "link"
    return "order"
