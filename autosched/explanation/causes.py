"""Find what each task and each copy of a timeline waited for.

A span begins when the last of its predecessors has ended: a span whose result it needs, or the
previous span on its stream. If both end at the same time, the needed result is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from autosched.explanation.case import Case
from autosched.program.program import Copy, Run, Stream
from autosched.timeline.timeline import Timeline

__all__ = ["Behind", "Cause", "all_before", "gates"]

Cause = Literal["data", "copy", "order", "device", "link", "batch"]
"""Why a span follows another.

The other span produced data that are needed here (data), copied them (copy), or had to end before
for another reason, such as reuse of memory (order). Or it only preceded this one on the stream: a
task on the stream of a device (device), a copy on the stream of a link (link), or a copy that the
same task needs (batch).
"""

_NEEDED = ("data", "copy", "order")


class Behind(NamedTuple):
    """A predecessor of a span, ``span`` in the timeline, and the cause of the order."""

    span: int
    cause: Cause

    @property
    def needed(self) -> bool:
        """Whether the order is required by the graph, and not only by the stream."""
        return self.cause in _NEEDED


def all_before(case: Case, timeline: Timeline) -> list[list[Behind]]:
    """Return the direct predecessors of each span of a timeline."""
    found: list[dict[int, None]] = [{} for _ in timeline.spans]
    for a, b in timeline.arrows:
        if a < b:  # clocks that disagree a little may measure the opposite order
            found[b][a] = None
    last: dict[Stream, int] = {}
    for i, span in enumerate(timeline.spans):
        for stream in span.streams:
            if stream in last:
                found[i][last[stream]] = None
            last[stream] = i
    return [
        [Behind(other, _cause(case, timeline, i, other)) for other in before]
        for i, before in enumerate(found)
    ]


def gates(timeline: Timeline, before: Sequence[Sequence[Behind]]) -> list[Behind | None]:
    """Return for each span the predecessor that determined its start, or None."""
    ends = [span.end for span in timeline.spans]
    return [max(some, key=lambda b: (ends[b.span], b.needed), default=None) for some in before]


def _cause(case: Case, timeline: Timeline, here: int, other: int) -> Cause:
    """Return why one span follows another."""
    ours = case.program.instructions[timeline.spans[here].instruction]
    theirs = case.program.instructions[timeline.spans[other].instruction]
    shared = not set(timeline.spans[here].streams).isdisjoint(timeline.spans[other].streams)
    if isinstance(ours, Run) and isinstance(theirs, Run):
        kind = next(
            (
                d.kind
                for d in case.graph.task(ours.task).dependencies
                if d.task == _index(case, theirs)
            ),
            None,
        )
        return "data" if kind == "data" else "order" if kind or not shared else "device"
    if isinstance(ours, Run) and isinstance(theirs, Copy):
        value = case.graph.value(theirs.value).index
        return (
            "copy"
            if any(use.value == value for use in case.graph.task(ours.task).reads)
            else "order"
        )
    if isinstance(ours, Copy) and isinstance(theirs, Run):
        value = case.graph.value(ours.value).index
        task = case.graph.task(theirs.task)
        return (
            "data" if any(use.value == value for use in (*task.outputs, *task.changes)) else "order"
        )
    if isinstance(ours, Copy) and isinstance(theirs, Copy):
        relayed = (theirs.value, theirs.version, theirs.destination) == (
            ours.value,
            ours.version,
            ours.source,
        )
        if relayed or not shared:
            return "copy" if relayed else "order"
        return "batch" if case.readers(ours) & case.readers(theirs) else "link"
    return "order"


def _index(case: Case, run: Run) -> int:
    return case.graph.task(run.task).index
