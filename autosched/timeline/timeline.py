"""Define timelines, predicted or measured, and their measures.

A timeline knows no graph and no machine. It has one clock, that of the host, from the beginning of
the run. The median of several runs is taken instruction by instruction, because that preserves
every order that all runs have: the median is a timeline, too.
"""

from __future__ import annotations

import bisect
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from autosched._lib.display import function_of
from autosched.errors import TimelineError
from autosched.program.program import Copy, Receive, Run, Send, Stream

if TYPE_CHECKING:
    from autosched.costs.costs import Costs


@dataclass(frozen=True, slots=True)
class Span:
    """A task or a copy from ``start`` to ``end``, in seconds since the run began.

    ``streams`` are those that it occupied (a copy may occupy two), ``instruction`` is its position
    in the program, and ``nbytes`` the bytes that a copy moved, if known. ``run`` is the number of
    the run, from 0, where a timeline has several.
    """

    kind: Literal["run", "copy"]
    name: str
    streams: tuple[Stream, ...]
    start: float
    end: float
    instruction: int
    # Not compared: a measured tensor may differ in size from the costs.
    nbytes: float = field(default=0.0, compare=False)
    run: int = 0

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Overlap:
    """The overlap of copies and compute, in seconds.

    It has the seconds of each, of both concurrently, and the share of copies that is hidden.
    """

    compute_seconds: float
    copy_seconds: float
    together_seconds: float
    copies_hidden: float  # share of copy seconds during which some device computed


@dataclass(frozen=True)
class Timeline:
    """Spans ordered by start, as predicted by ``simulate`` or measured by ``profile``.

    ``arrows`` are pairs of positions in ``spans``: the second waited for an event recorded after
    the first. ``runs`` are the runs of which this is the median, if any. ``doubt`` is a bound in
    seconds on the error of device times against the host's clock. ``period`` is the seconds per run
    in steady state, where several runs are shown and it is known. ``learn`` returns the costs for
    ``costs``; ``guess`` says what a prediction assumes for lack of costs.

    >>> cuda, out = Stream("cuda:0", "compute"), Stream("cuda:0", "copy-out")
    >>> spans = Span("run", "h", (cuda,), 0, 2, 0), Span("copy", "h", (out,), 1, 4, 1)
    >>> timeline = Timeline(spans)
    >>> timeline.makespan, timeline.overlap().copies_hidden
    (4, 0.3333333333333333)
    """

    spans: tuple[Span, ...]
    arrows: tuple[tuple[int, int], ...] = ()
    runs: tuple[Timeline, ...] = field(default=(), compare=False, repr=False)
    learn: Callable[[Timeline], Costs] | None = field(default=None, compare=False, repr=False)
    doubt: float = field(default=0.0, compare=False)
    period: float | None = field(default=None, compare=False)
    hosts: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    guess: str = field(default="", compare=False, repr=False)

    @classmethod
    def of(
        cls,
        spans: Iterable[Span],
        arrows: Iterable[tuple[int, int]],
        carried: Iterable[tuple[int, int, int]] = (),
    ) -> Timeline:
        """Make a timeline of spans of one or several runs.

        ``arrows`` and ``carried`` name instructions, as ``Program.arrows`` and
        ``Program.carried_arrows`` do.
        """
        spans = tuple(spans)
        ordered = tuple(sorted(spans, key=lambda span: (span.start, span.run, span.instruction)))
        position = {(span.run, span.instruction): i for i, span in enumerate(ordered)}
        every = [*((a, b, 0) for a, b in arrows), *carried]
        pairs = [
            ((run - ago, a), (run, b))
            for run in dict.fromkeys(span.run for span in spans)
            for a, b, ago in every
        ]
        known = ((position[a], position[b]) for a, b in pairs if a in position and b in position)
        return cls(ordered, tuple(known))

    @classmethod
    def median(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Return the median of several runs of one program: of each instruction's start and end.

        What comes first in every run comes first in the median: if each a is at most the b of the
        same run, then at least k values of a are at most the k-th smallest b, and so is the k-th
        smallest a; a median is such a value, or the mean of two. Raises TimelineError for runs of
        different programs, and for none.

        >>> stream = Stream("cpu", "compute")
        >>> runs = [Timeline((Span("run", "h", (stream,), 0, end, 0),)) for end in (5, 1, 2)]
        >>> Timeline.median(runs).makespan
        2
        """
        runs = tuple(timelines)
        if not runs:
            raise TimelineError("the median of no timelines is asked for; give one at least")
        if len(runs) == 1:
            return runs[0]
        lines = [sorted(run.spans, key=lambda span: (span.run, span.instruction)) for run in runs]
        kinds = {
            tuple((span.run, span.instruction, span.kind, span.name, span.streams) for span in line)
            for line in lines
        }
        if len(kinds) > 1:
            raise TimelineError(
                "the timelines are of different programs, and only runs of one have a median"
            )
        arrows = [
            (runs[0].spans[a].instruction, runs[0].spans[b].instruction) for a, b in runs[0].arrows
        ]
        return replace(
            cls.of(map(_median, zip(*lines, strict=True)), arrows),
            runs=runs,
            learn=runs[0].learn,
            doubt=max(run.doubt for run in runs),
            hosts=runs[0].hosts,
        )

    def costs(self) -> Costs:
        """Return the costs of a prediction, or those learnt from a measurement.

        Use them in ``asc.schedule(graph, machine, costs=timeline.costs())``. Raises TimelineError
        if neither is available; ``autosched.costs.learning.learn`` takes the missing arguments.

        >>> import autosched as asc
        >>> graph = asc.Graph()
        >>> graph.output(y=graph.input("x") + 1)
        >>> costs = asc.Costs.table({"add": 0.02})
        >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
        >>> schedule.profile(x=1).costs().seconds["add"] > 0.001
        True
        >>> schedule.simulate().costs() == costs
        True
        """
        if self.learn is None:
            raise TimelineError(
                "the timeline does not know what it was measured of, so it has no costs; those of "
                "Schedule.profile and simulate do, and "
                "autosched.costs.learning.learn(timeline, graph, machine, costs) is for others"
            )
        return self.learn(self)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the beginning to the end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def run_count(self) -> int:
        """The number of runs that it shows."""
        return 1 + max((span.run for span in self.spans), default=0)

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams with spans: by device in order of appearance, compute before copies."""
        seen = dict.fromkeys(stream for span in self.spans for stream in span.streams)
        devices = list(dict.fromkeys(stream.device for stream in seen))

        def rank(stream: Stream) -> tuple[int, bool, str]:
            is_copy = not stream.name.startswith("compute")
            return devices.index(stream.device), is_copy, stream.name

        return tuple(sorted(seen, key=rank))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Show the timeline in a notebook, as a Gantt chart."""
        shown: dict[str, str] = function_of(self, "show")(self)
        return shown

    def busy_seconds(self, stream: Stream) -> float:
        """Return the seconds in which a stream was busy."""
        return sum(span.seconds for span in self.spans if stream in span.streams)

    def computing(self, device: str) -> float:
        """Return the seconds in which a device computed, on one or more of its streams."""
        runs = (s for s in self.spans if s.kind == "run" and s.streams[0].device == device)
        return _length(_union((span.start, span.end) for span in runs))

    def overlap(self) -> Overlap:
        """Return how much copies and compute overlap."""
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
        """Return the critical path: from the span that ends last, back to the beginning.

        The predecessor of a span is the one that ended last, among those for which it waited and
        those before it on its streams.
        """
        if not self.spans:
            return ()
        before = preceding_spans(self)
        path = [max(range(len(self.spans)), key=lambda i: self.spans[i].end)]
        while before[path[-1]]:
            path.append(max(before[path[-1]], key=lambda i: self.spans[i].end))
        return tuple(self.spans[i] for i in reversed(path))


def preceding_spans(timeline: Timeline) -> list[list[int]]:
    """Return the predecessors of each span: those waited for, or earlier on its streams."""
    found: list[dict[int, None]] = [{} for _ in timeline.spans]
    for a, b in timeline.arrows:
        if a < b:  # small clock errors may reverse the measured order
            found[b][a] = None
    last: dict[Stream, int] = {}
    for i, span in enumerate(timeline.spans):
        for stream in dict.fromkeys(span.streams):  # a span may name a stream twice
            if stream in last:
                found[i][last[stream]] = None
            last[stream] = i
    return list(map(list, found))


def what(instruction: Run | Copy | Send | Receive) -> tuple[Literal["run", "copy"], str]:
    """Return the kind and the name of the span of an instruction."""
    if isinstance(instruction, Run):
        return "run", instruction.task
    return "copy", instruction.value


def _median(spans: Sequence[Span]) -> Span:
    return replace(
        spans[0],
        start=statistics.median(span.start for span in spans),
        end=statistics.median(span.end for span in spans),
        nbytes=statistics.median(span.nbytes for span in spans),
    )


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
    """Return how much of an interval is covered by others, which are sorted and disjoint."""
    first = max(bisect.bisect(by, start, key=operator.itemgetter(0)) - 1, 0)
    last = bisect.bisect(by, end, key=operator.itemgetter(0))
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in by[first:last])
