"""Timeline: what ran when, predicted or measured, and its measures. Knows no graph and no machine."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from autosched.program import Copy, Run, Stream

__all__ = ["Overlap", "Span", "Timeline", "what"]


@dataclass(frozen=True, slots=True)
class Span:
    """A task or a copy from ``start`` to ``end``, in seconds since the run began.

    ``streams`` are those it occupied (a copy may occupy two), ``instruction`` its position in the program, ``nbytes``
    what a copy moved, where that is known.
    """

    kind: Literal["run", "copy"]
    name: str
    streams: tuple[Stream, ...]
    start: float
    end: float
    instruction: int
    nbytes: float = field(default=0.0, compare=False)  # a measured tensor may be of another size than costs say

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Overlap:
    """How much copies and compute ran together, in seconds: each of the two, both at once, and the share hidden."""

    compute_seconds: float
    copy_seconds: float
    together_seconds: float
    copies_hidden: float  # of all copies' seconds, the share during which some device computed


@dataclass(frozen=True)
class Timeline:
    """Spans by start, as predicted by ``simulate`` or measured by ``profile``.

    ``arrows`` are pairs of positions in ``spans``: the second waited for an event behind the first. ``pauses`` (start,
    end) are when Python's garbage collector held up the thread that it ran in.

    >>> cuda, out = Stream("cuda:0", "compute"), Stream("cuda:0", "copy-out")
    >>> timeline = Timeline((Span("run", "h", (cuda,), 0, 2, 0), Span("copy", "h", (out,), 1, 4, 1)))
    >>> timeline.makespan, timeline.overlap().copies_hidden
    (4, 0.3333333333333333)
    """

    spans: tuple[Span, ...]
    arrows: tuple[tuple[int, int], ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span], arrows: Iterable[tuple[int, int]]) -> Timeline:
        """Order spans by start; ``arrows`` name instructions, as ``Program.arrows`` does."""
        ordered = tuple(sorted(spans, key=lambda span: (span.start, span.instruction)))
        position = {span.instruction: i for i, span in enumerate(ordered)}
        kept = ((position[a], position[b]) for a, b in arrows if a in position and b in position)
        return cls(ordered, tuple(kept))

    @cached_property
    def makespan(self) -> float:
        """Seconds from the beginning to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams with spans, by device as first seen, compute before copies."""
        seen = dict.fromkeys(stream for span in self.spans for stream in span.streams)
        devices = list(dict.fromkeys(stream.device for stream in seen))
        return tuple(sorted(seen, key=lambda s: (devices.index(s.device), not s.name.startswith("compute"), s.name)))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Show it in a notebook, as a Gantt chart."""
        from autosched.drawing import show_timeline

        return show_timeline(self)

    def busy_seconds(self, stream: Stream) -> float:
        """Return how long a stream was in use."""
        return sum(span.seconds for span in self.spans if stream in span.streams)

    def overlap(self) -> Overlap:
        """Return how much of copying and computing went on at the same time."""
        compute = _union((s.start, s.end) for s in self.spans if s.kind == "run")
        copies = [(s.start, s.end) for s in self.spans if s.kind == "copy"]
        total = sum(end - start for start, end in copies)
        hidden = sum(_covered(start, end, compute) for start, end in copies)
        joined = _union(copies)
        return Overlap(
            compute_seconds=_length(compute),
            copy_seconds=_length(joined),
            together_seconds=sum(_covered(start, end, compute) for start, end in joined),
            copies_hidden=hidden / total if total else 1.0,
        )

    def critical_path(self) -> tuple[Span, ...]:
        """Return the spans that hold each other up: from the one that ends last, back to the beginning.

        Before each span stands the one that ended last among those it waited for and those on its streams.
        """
        if not self.spans:
            return ()
        before: dict[int, list[int]] = {}
        for a, b in self.arrows:
            if a < b:  # clocks that disagree by a little may measure it the other way round
                before.setdefault(b, []).append(a)
        last: dict[Stream, int] = {}
        for i, span in enumerate(self.spans):
            for stream in span.streams:
                if stream in last:
                    before.setdefault(i, []).append(last[stream])
                last[stream] = i
        path = [max(range(len(self.spans)), key=lambda i: self.spans[i].end)]
        while path[-1] in before:
            path.append(max(before[path[-1]], key=lambda i: self.spans[i].end))
        return tuple(self.spans[i] for i in reversed(path))


def what(instruction: Run | Copy) -> tuple[Literal["run", "copy"], str]:
    """Return the kind and the name that the span of an instruction has."""
    return ("run", instruction.task) if isinstance(instruction, Run) else ("copy", instruction.value)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _covered(start: float, end: float, by: list[tuple[float, float]]) -> float:
    """Return how much of an interval lies in others, which are in order and apart."""
    first = max(bisect.bisect(by, start, key=operator.itemgetter(0)) - 1, 0)
    last = bisect.bisect(by, end, key=operator.itemgetter(0))
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in by[first:last])
