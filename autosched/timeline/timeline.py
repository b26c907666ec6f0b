"""Define timelines, predicted or measured, their measures, and how traces are read.

A timeline knows no graph and no machine. It has one clock, that of the host, from the beginning of
the run. The median of several runs is taken instruction by instruction, because that preserves
every order that all runs have: the median is a timeline, too.

Traces are JSON, from ``viz.perfetto`` or from torch.profiler. Unknown events are ignored.
torch.profiler has a slice for each task on the thread that issued it (``user_annotation``), under
the name that ``profile.annotation`` gives. It has another slice on the device
(``gpu_user_annotation``) if the task made the device do something.
"""

from __future__ import annotations

import bisect
import gzip
import json
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autosched._lib.allowed import is_number
from autosched._lib.display import renderer_of
from autosched.errors import TimelineError, shown
from autosched.program.program import Copy, Program, Receive, Run, Send, Stream, occupied

if TYPE_CHECKING:
    from autosched.costs.costs import Costs

__all__ = ["Overlap", "Span", "Timeline", "preceding_spans", "read", "what"]


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
    the first. ``pauses`` are intervals (start, end) in which Python's garbage collector blocked its
    thread. ``runs`` are the runs of which this is the median, if any. ``doubt`` is a bound in
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
    pauses: tuple[tuple[float, float], ...] = ()
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
        every = [*((a, b, 0) for a, b in arrows), *carried]
        runs = dict.fromkeys(span.run for span in spans)
        return cls.joined(
            spans, (((run - ago, a), (run, b)) for run in runs for a, b, ago in every)
        )

    @classmethod
    def joined(
        cls, spans: Iterable[Span], pairs: Iterable[tuple[tuple[int, int], tuple[int, int]]]
    ) -> Timeline:
        """Make a timeline with arrows between spans, each named by (run, instruction)."""
        ordered = tuple(sorted(spans, key=lambda span: (span.start, span.run, span.instruction)))
        position = {(span.run, span.instruction): i for i, span in enumerate(ordered)}
        known = ((position[a], position[b]) for a, b in pairs if a in position and b in position)
        return cls(ordered, tuple(known))

    @classmethod
    def median(cls, timelines: Iterable[Timeline]) -> Timeline:
        """Return the median of several runs of one program: of each instruction's start and end.

        What comes first in every run comes first in the median: if each a is at most the b of the
        same run, then at least k values of a are at most the k-th smallest b, and so is the k-th
        smallest a; a median is such a value, or the mean of two. The result pauses where most runs
        do. Raises TimelineError for runs of different programs, and for none.

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
            pauses=_common([run.pauses for run in runs]),
            runs=runs,
            learn=runs[0].learn,
            doubt=max(run.doubt for run in runs),
            hosts=runs[0].hosts,
        )

    @classmethod
    def from_chrome_trace(
        cls,
        trace: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any],
        program: Program | None = None,
    ) -> Timeline:
        """Read a Chrome trace, of ``viz.perfetto_json`` or of torch.profiler around calls.

        ``trace`` is a path (also of a ``.json.gz``), the text, or the result of ``json.loads``.
        ``program`` is that of the schedule: with it, spans of torch.profiler are on the program's
        streams and have its arrows, and slices of other programs are left out; otherwise spans are
        on threads. Several calls give their median. If a trace holds both a prediction and a
        measurement, the measurement is read. Raises TimelineError for texts that are not such a
        trace, and for several traces in one.

        >>> from autosched.viz import perfetto_json
        >>> timeline = Timeline((Span("run", "h", (Stream("cpu", "compute"),), 0, 2, 0),))
        >>> Timeline.from_chrome_trace(perfetto_json(timeline)) == timeline
        True
        """
        from autosched.timeline.timeline import read

        return read(trace, program)

    def costs(self) -> Costs:
        """Return the costs of a prediction, or those learnt from a measurement.

        Use them in ``asc.schedule(graph, machine, costs=timeline.costs())``. Raises TimelineError
        if neither is available, as for a trace that was read; ``autosched.costs.learning.learn``
        takes the missing arguments.

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
        return renderer_of(self).show(self)

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


def _common(pauses: Sequence[Sequence[tuple[float, float]]]) -> tuple[tuple[float, float], ...]:
    """Return the intervals in which more than half of the runs paused."""
    intervals = chain.from_iterable(pauses)
    steps = sorted(chain.from_iterable(((start, 1), (end, -1)) for start, end in intervals))
    found: list[tuple[float, float]] = []
    paused = 0
    for (moment, change), (later, _) in pairwise(steps):
        paused += change
        if 2 * paused > len(pauses) and moment < later:
            found.append((moment, later))
    return tuple(_union(found))


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


_ANNOTATION = re.compile(r"autosched::((run|copy) ([^\s@]+).*)#(\d{1,9})")
_MOST = 1e15  # microseconds: 30 years
_Thread = tuple[Any, Any]  # pid, tid
_Key = tuple[int, int]  # run and instruction


class _Slice(NamedTuple):
    """An ``X`` event of a trace, with times in seconds."""

    start: float
    end: float
    name: str
    category: str
    thread: _Thread
    args: Mapping[str, Any]


def read(
    trace: str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any],
    program: Program | None = None,
) -> Timeline:
    """Return the timeline in a trace; see ``Timeline.from_chrome_trace``."""
    events = _events(trace)
    slices = [found for found in map(_slice, events) if found is not None]
    slices.sort(key=lambda found: found.start)
    if any(map(_is_ours, slices)):
        return _read_ours(events, slices)
    runs = _read_profiled(slices, program)
    if not runs:
        raise TimelineError(
            f"the trace has {len(events)} events, and no slice of a task: it must come from "
            "viz.perfetto_json, or from torch.profiler around calls of a schedule"
        )
    return Timeline.median(runs)


# ---- parsing


def _events(trace: Any) -> list[Mapping[str, Any]]:
    document = _document(trace)
    if isinstance(document, Mapping):
        document = document.get("traceEvents")
    if not isinstance(document, Sequence) or isinstance(document, (str, bytes)):
        raise TimelineError(
            "no Chrome trace: it must be a list of events, or an object with the key 'traceEvents'"
        )
    return [event for event in document if isinstance(event, Mapping)]


def _document(trace: Any) -> Any:
    if isinstance(trace, os.PathLike):
        return _parsed(_content(Path(trace)), os.fspath(trace))
    if not isinstance(trace, str):
        return trace
    if _is_file(trace):
        return _parsed(_content(Path(trace)), trace)
    return _parsed(trace, "")


def _content(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (EOFError, OSError, ValueError) as error:
        raise TimelineError(f"{path}: {error}") from error


def _parsed(text: str, path: str) -> Any:
    """Parse a JSON text; ``path`` is the file from which it comes, if any."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        which = f"the text of {path}" if path else "its text"
        like_json = text.lstrip()[:1] in ("{", "[")
        also = "" if path or like_json else ", and there is no file of that name"
        raise TimelineError(f"no Chrome trace: {which} is not JSON{also}: {error}") from error


def _is_file(text: str) -> bool:
    """Whether a text is the path of a file, rather than a trace."""
    if text.lstrip()[:1] in ("{", "["):
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with characters that no name has
        return False


def _slice(event: Mapping[str, Any]) -> _Slice | None:
    start = _nanoseconds(event.get("ts"))
    length = _nanoseconds(event.get("dur"))
    name = event.get("name")
    if event.get("ph") != "X" or start is None or length is None or not isinstance(name, str):
        return None
    args = event.get("args")
    known = args if isinstance(args, Mapping) else {}
    category = str(event.get("cat", ""))
    return _Slice(start / 1e9, (start + length) / 1e9, name, category, _thread(event), known)


def _nanoseconds(microseconds: Any) -> int | None:
    return round(microseconds * 1000) if is_number(microseconds) and microseconds < _MOST else None


def _thread(event: Mapping[str, Any]) -> _Thread:
    return str(event.get("pid")), str(event.get("tid"))


# ---- traces of viz.perfetto


def _is_ours(found: _Slice) -> bool:
    return found.category in ("run", "copy") and type(found.args.get("instruction")) is int


def _read_ours(events: Iterable[Mapping[str, Any]], slices: Sequence[_Slice]) -> Timeline:
    """Return the measured timeline of a viz.perfetto trace, or the only one."""
    # 1. Choose the group of processes.
    processes = _labels(events, "process_name")
    threads = _labels(events, "thread_name")
    groups = {str(label.get("group", "")) for label in processes.values()}
    group = "measured" if "measured" in groups else min(groups, default="")
    # 2. Find the stream of each slice of that group.
    inside = []
    streams: dict[_Thread, Stream] = {}
    for found in slices:
        process = processes.get((found.thread[0], ""), {})
        if str(process.get("group", "")) == group:
            inside.append(found)
            device = str(process.get("device", found.thread[0]))
            name = str(threads.get(found.thread, {}).get("name", found.thread[1]))
            streams[found.thread] = Stream(device, name)
    # 3. Join the slices of each instruction.
    ours = list(filter(_is_ours, inside))
    pieces: dict[_Key, list[_Slice]] = {}
    for found in ours:
        pieces.setdefault(_key(found), []).append(found)
    spans = [_joined(key, found, streams) for key, found in pieces.items()]
    pauses = tuple((found.start, found.end) for found in inside if found.category == "gc")
    return replace(Timeline.joined(spans, _arrows(events, ours)), pauses=pauses)


def _key(found: _Slice) -> _Key:
    """Return the run and the instruction of a slice of ours."""
    run = found.args.get("run", 0)
    return run if type(run) is int else 0, found.args["instruction"]


def _labels(events: Iterable[Mapping[str, Any]], what: str) -> dict[_Thread, Mapping[str, Any]]:
    """Return the metadata of processes, or of threads."""
    return {
        (_thread(event)[0], "" if what == "process_name" else _thread(event)[1]): event["args"]
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == what
        and isinstance(event.get("args"), Mapping)
    }


def _joined(key: _Key, pieces: Sequence[_Slice], where: Mapping[_Thread, Stream]) -> Span:
    """Return a span made of its slices, one on each stream: copy-out before copy-in.

    Raises TimelineError if one run has more of them, as in a file that merges two traces.
    """
    run, i = key
    _require_one_run(i, pieces, where)
    used = (where[piece.thread] for piece in pieces)
    streams = tuple(sorted(used, key=lambda stream: stream.name == "copy-in"))
    first = pieces[0]
    kind: Literal["run", "copy"] = "run" if first.category == "run" else "copy"
    start = min(piece.start for piece in pieces)
    end = min(piece.end for piece in pieces)
    nbytes = first.args.get("bytes", 0.0)
    nbytes = nbytes if is_number(nbytes) else 0.0
    return Span(kind, first.name, streams, start, end, i, nbytes, run)


def _require_one_run(i: int, pieces: Sequence[_Slice], where: Mapping[_Thread, Stream]) -> None:
    """Raise TimelineError unless an instruction has one slice per stream, at most two."""
    kinds = {(piece.category, piece.name) for piece in pieces}
    streams = {where[piece.thread] for piece in pieces}
    most = 2 if pieces[0].category == "copy" else 1
    if len(kinds) == 1 and len(pieces) == len(streams) <= most:
        return
    found = ", ".join(
        f"{piece.category} {shown(piece.name)} on {shown(str(where[piece.thread]))} "
        f"at {piece.start * 1e6:.6g} us"
        for piece in pieces[:3]
    )
    raise TimelineError(
        f"the trace has {len(pieces)} slices of instruction {i} ({found}), where one run of one "
        "program has one on each stream that it occupies; read traces one by one, and join runs "
        "of one program by Timeline.median"
    )


def _arrows(
    events: Iterable[Mapping[str, Any]], slices: Sequence[_Slice]
) -> list[tuple[_Key, _Key]]:
    """Return the pairs of instructions that arrows connect, each with its run."""
    by_thread: dict[_Thread, tuple[list[float], list[_Key]]] = {}
    for found in slices:
        starts, instructions = by_thread.setdefault(found.thread, ([], []))
        starts.append(found.start)
        instructions.append(_key(found))
    ends: dict[str, dict[str, _Key]] = {}
    for event in events:
        moment = _nanoseconds(event.get("ts")) if event.get("ph") in ("s", "f") else None
        if moment is not None and _thread(event) in by_thread:
            starts, instructions = by_thread[_thread(event)]
            at = bisect.bisect(starts, moment / 1e9) - 1
            ends.setdefault(str(event.get("id")), {})[event["ph"]] = instructions[max(at, 0)]
    return [(pair["s"], pair["f"]) for pair in ends.values() if len(pair) == 2]


# ---- traces of torch.profiler


def _read_profiled(slices: Iterable[_Slice], program: Program | None) -> list[Timeline]:
    """Return the runs in a trace, each from its own beginning; incomplete runs are dropped."""
    seen: dict[int, dict[str, list[Span]]] = {}
    for found in slices:
        if found.category in ("user_annotation", "gpu_user_annotation"):
            span = _annotated(found, program)
            if span is not None:
                seen.setdefault(span.instruction, {}).setdefault(found.category, []).append(span)
    lines = [_best(by_category) for by_category in seen.values()]
    arrows = program.arrows if program is not None else ()
    runs = min(map(len, lines), default=0)
    # A later call may come from another thread, but it is the same program.
    return [
        _from_zero([replace(line[k], streams=line[0].streams) for line in lines], arrows)
        for k in range(runs)
    ]


def _best(by_category: Mapping[str, list[Span]]) -> list[Span]:
    """Return the device's slices if complete, else those of the issuing thread."""
    issued = by_category.get("user_annotation", [])
    done = by_category.get("gpu_user_annotation", [])
    return done if len(done) >= len(issued) else issued


def _annotated(found: _Slice, program: Program | None) -> Span | None:
    match = _ANNOTATION.fullmatch(found.name)
    if match is None:
        return None
    text, kind, name, digits = match.groups()
    number = int(digits)
    if program is None:
        stream = Stream(f"process {found.thread[0]}", f"thread {found.thread[1]}")
        span_kind: Literal["run", "copy"] = "run" if kind == "run" else "copy"
        return Span(span_kind, name, (stream,), found.start, found.end, number)
    instruction = program.instructions[number] if number < len(program) else None
    if not isinstance(instruction, (Run, Copy)) or str(instruction) != text:
        return None
    return Span(*what(instruction), occupied(instruction), found.start, found.end, number)


def _from_zero(spans: Sequence[Span], arrows: Iterable[tuple[int, int]]) -> Timeline:
    zero = min(span.start for span in spans)

    def since(moment: float) -> float:
        return round((moment - zero) * 1e9) / 1e9

    moved = [replace(span, start=since(span.start), end=since(span.end)) for span in spans]
    return Timeline.of(moved, arrows)
