"""Write a timeline as Chrome trace JSON for Perfetto.

ui.perfetto.dev and chrome://tracing open such traces. They have a process for each device, a thread
for each stream, arrows for waits, and counters for bytes. The module follows the rules of
Perfetto's importer, which silently drops what violates them.

Times are whole nanoseconds, since Perfetto drops slices that overlap by a rounding error. Slices of
one thread do not touch and last at least 1 ns, because Perfetto binds an arrow to the slice that
was opened last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from autosched._lib.text import duration
from autosched.errors import ChartError
from autosched.graph.graph import Graph
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.format import Steps, sorted_streams

Memory = Mapping[str, Steps]
_Event = dict[str, Any]
# The order of events at one time: an arrow binds to the slice that was opened last.
_ORDER = {"M": 0, "X": 1, "C": 2, "s": 3, "f": 4}


def perfetto_json(
    timeline: Timeline,
    *,
    measured: Timeline | None = None,
    graph: Graph | None = None,
    memory: Memory | None = None,
    title: str = "",
) -> str:
    """Return the text of a trace of a timeline and, if given, of what was ``measured``.

    With ``graph``, slices of tasks have the source line, the module and the phase, and those of
    merged tasks the names of their calls. ``memory`` has the bytes held on devices: (second, bytes)
    in order. Spans that overlap on a stream are shifted after each other; an arrow to a span that
    ended before the other began is left out. Raises ChartError for times and bytes that are not
    finite.

    >>> text = perfetto_json(Timeline((Span("run", "h", (Stream("cpu", "compute"),), 0, 2, 0),)))
    >>> [event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    ['h']
    """
    lines = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    pids = count(1)
    arrows = count(1)
    shown = memory or {}
    groups = [
        _Group(name, line, {} if name == "measured" else shown, pids)
        for name, line in lines.items()
    ]
    # No thread has the number of a process, or it would be taken as its main thread.
    tids = count(next(pids))
    events = [event for group in groups for event in group.events(graph, tids, arrows)]
    events.sort(key=lambda event: (event.get("ts", -1), _ORDER[event["ph"]]))
    for event in events:
        event.update({key: _microseconds(event[key]) for key in ("ts", "dur") if key in event})
    doubt = max(line.doubt for line in lines.values())
    other = {"title": title} | ({"clocks agree within": duration(doubt)} if doubt else {})
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


class _Group:
    """The processes of one timeline: its devices in order."""

    def __init__(self, name: str, timeline: Timeline, memory: Memory, pids: Iterator[int]):
        self.name = name
        self.timeline = timeline
        self.memory = memory
        streams = sorted_streams(timeline) if timeline.hosts else timeline.streams
        devices = dict.fromkeys([*(stream.device for stream in streams), *self.memory])
        self.pids = {device: next(pids) for device in devices}
        self.runs = next(pids) if timeline.run_count > 1 else 0
        self.slices = _slices(timeline)

    def events(
        self, graph: Graph | None, tids: Iterator[int], arrows: Iterator[int]
    ) -> Iterator[_Event]:
        """Yield all events, in no order; times are in nanoseconds."""
        for device, pid in self.pids.items():
            yield from self._process(pid, device, self.timeline.hosts.get(device, ""))
        threads: dict[Stream, _Event] = {}
        for stream in self.timeline.streams:
            threads[stream] = {"pid": self.pids[stream.device], "tid": next(tids)}
            yield from _named_thread(threads[stream], stream.name)
        for (i, stream), (start, end) in self.slices.items():
            span = self.timeline.spans[i]
            args = _args(span, graph)
            yield {**_slice(span.kind, span.name, start, end), **threads[stream], "args": args}
        if self.runs:
            yield from self._runs(tids)
        yield from self._arrows(threads, arrows)
        yield from self._bytes_in_flight()
        for device, steps in self.memory.items():
            changes = [(_ns(time), held) for time, held in steps]
            yield from _counter(self.pids[device], "memory", "bytes", changes)

    def _process(self, pid: int, name: str, host: str = "") -> Iterator[_Event]:
        known = ", ".join(filter(None, (host, self.name)))
        shown = f"{name} ({known})" if known else name
        yield _meta("process_name", {"pid": pid}, name=shown)
        yield _meta("process_sort_index", {"pid": pid}, sort_index=pid)

    def _arrows(self, threads: Mapping[Stream, _Event], numbers: Iterator[int]) -> Iterator[_Event]:
        """Yield arrows from the end of a span to the start of the span that waited."""
        spans = self.timeline.spans
        for a, b in self.timeline.arrows:
            source = spans[a].streams[-1]
            target = spans[b].streams[0]
            (start, end), (first, last) = self.slices[a, source], self.slices[b, target]
            leaves = max(start, min(end - 1, first))  # measured clocks may disagree a little
            arrives = max(first, leaves)
            if arrives < last:
                arrow = {"cat": "wait", "name": "wait", "id": next(numbers)}
                yield {"ph": "s", **arrow, **threads[source], "ts": leaves}
                yield {"ph": "f", "bp": "e", **arrow, **threads[target], "ts": arrives}

    def _runs(self, tids: Iterator[int]) -> Iterator[_Event]:
        """Yield a slice for each run, on as few threads as runs overlap; and the period."""
        yield from self._process(self.runs, "runs")
        ends: list[int] = []  # by thread, when its last run ends
        threads: list[_Event] = []
        spans: dict[int, list[tuple[int, int]]] = {}
        for (i, _), times in self.slices.items():
            spans.setdefault(self.timeline.spans[i].run, []).append(times)
        for run, mine in sorted(spans.items()):
            start, end = min(first for first, _ in mine), max(last for _, last in mine)
            free = next((k for k, ended in enumerate(ends) if ended <= start), len(ends))
            if free == len(ends):
                ends.append(0)
                threads.append({"pid": self.runs, "tid": next(tids)})
                yield from _named_thread(threads[free], f"in flight {free}")
            ends[free] = end
            yield {**_slice("whole run", f"run {run}", start, end), **threads[free]}
        if self.timeline.period:
            thread = {"pid": self.runs, "tid": next(tids)}
            yield from _named_thread(thread, "period")
            end = _ns(self.timeline.makespan)
            start = max(end - _ns(self.timeline.period), 0)
            yield {**_slice("period", "period", start, max(end, start + 1)), **thread}

    def _bytes_in_flight(self) -> Iterator[_Event]:
        changes: dict[Stream, list[tuple[int, float]]] = {}
        for (i, stream), (start, end) in self.slices.items():
            span = self.timeline.spans[i]
            if span.kind == "copy" and span.nbytes:
                changes.setdefault(stream, []).extend([(start, span.nbytes), (end, 0.0)])
        for stream, mine in changes.items():
            yield from _counter(self.pids[stream.device], stream.name, "bytes in flight", mine)


def _slices(timeline: Timeline) -> dict[tuple[int, Stream], tuple[int, int]]:
    """Return the times of each span on each of its streams, in nanoseconds, without overlaps."""
    free = dict.fromkeys(timeline.streams, 0)
    found: dict[tuple[int, Stream], tuple[int, int]] = {}
    for i, span in sorted(enumerate(timeline.spans), key=lambda item: (item[1].start, item[1].end)):
        for stream in span.streams:
            found[i, stream] = _after(free[stream], span.start, span.end)
            free[stream] = found[i, stream][1]
    return found


def _after(free: int, start: float, end: float) -> tuple[int, int]:
    first = max(free, _ns(start))
    return first, max(first + 1, _ns(end))


def _args(span: Span, graph: Graph | None) -> _Event:
    args: _Event = {"instruction": span.instruction} | ({"run": span.run} if span.run else {})
    if span.kind == "copy" and span.nbytes:
        args["bytes"] = _finite(span.nbytes)
    if span.kind == "run" and graph is not None:
        task = graph.task(span.name)
        origin = {"module": task.origin.module, "phase": task.origin.phase}
        origin["calls"] = ", ".join(task.operators)
        facts = {"task": task.name, "source": task.source, **origin}
        args.update({key: text for key, text in facts.items() if text})
    return args


def _counter(
    pid: int, name: str, unit: str, changes: Sequence[tuple[int, float]]
) -> Iterator[_Event]:
    for ns, number in dict(changes).items():  # of several at the same time the last counts
        args = {unit: _finite(number)}
        yield {"ph": "C", "name": name, "pid": pid, "ts": max(0, ns), "args": args}


def _slice(category: str, name: str, start: int, end: int) -> _Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


def _named_thread(thread: _Event, name: str) -> Iterator[_Event]:
    yield _meta("thread_name", thread, name=name)
    yield _meta("thread_sort_index", thread, sort_index=thread["tid"])


def _meta(what: str, where: _Event, **args: Any) -> _Event:
    return {"ph": "M", "name": what, **where, "args": args}


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ChartError(f"a trace holds finite numbers alone, got {number!r}")
    return int(number) if number == int(number) else float(number)


def _ns(seconds: float) -> int:
    return round(_finite(seconds) * 1e9)


def _microseconds(ns: int) -> float:
    """Format nanoseconds as microseconds that readers reconstruct by rounding or truncation."""
    number = ns / 1000
    return number if int(number * 1000.0) == ns else math.nextafter(number, math.inf)
