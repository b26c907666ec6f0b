"""Write a timeline as Chrome trace JSON for Perfetto.

ui.perfetto.dev and chrome://tracing open such traces. They have a process for each device, a thread
for each stream, arrows for waits, and counters for bytes. The module follows the rules of
Perfetto's importer, which silently drops what violates them. ``autosched.timeline.traces`` reads
the text back.

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

from autosched.errors import ChartError
from autosched.graph.graph import Graph
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline

__all__ = ["perfetto_json"]

Memory = Mapping[str, Sequence[tuple[float, float]]]
_Event = dict[str, Any]
_PYTHON = "Python"
_COLLECTOR = "garbage collector"
_ORDER = {
    "M": 0,
    "X": 1,
    "C": 2,
    "s": 3,
    "f": 4,
}  # at one moment: an arrow binds to the slice that was opened last


def perfetto_json(
    timeline: Timeline,
    *,
    measured: Timeline | None = None,
    graph: Graph | None = None,
    memory: Memory | None = None,
    title: str = "",
) -> str:
    """Return the text of a trace of a timeline and, if given, of what was ``measured``.

    With ``graph``, slices of tasks have the source line, the module and the phase. ``memory`` has
    the bytes held on devices: (second, bytes) in order. Spans that overlap on a stream are shifted
    after each other; an arrow to a span that ended before the other began is left out. Raises
    ChartError for times and bytes that are not finite.

    >>> text = perfetto_json(Timeline((Span("run", "h", (Stream("cpu", "compute"),), 0, 2, 0),)))
    >>> [event["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    ['h']
    """
    lines = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    pids = count(1)
    arrows = count(1)
    groups = [
        _Group(name, line, memory if line is timeline else None, pids)
        for name, line in lines.items()
    ]
    tids = count(
        next(pids)
    )  # no thread has the number of a process, or it would be taken as its main thread
    events = [event for group in groups for event in group.events(graph, tids, arrows)]
    events.sort(key=lambda event: (event.get("ts", -1), _ORDER[event["ph"]]))
    for event in events:
        event.update({key: _microseconds(event[key]) for key in ("ts", "dur") if key in event})
    document = {"displayTimeUnit": "ms", "otherData": {"title": title}, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


class _Group:
    """The processes of one timeline: its devices in order, and Python, if it paused."""

    def __init__(self, name: str, timeline: Timeline, memory: Memory | None, pids: Iterator[int]):
        self.name = name
        self.timeline = timeline
        self.memory = memory or {}
        devices = dict.fromkeys([*(stream.device for stream in timeline.streams), *self.memory])
        self.pids = {device: next(pids) for device in devices}
        self.python = next(pids) if timeline.pauses else 0
        self.slices = _apart(timeline)

    def events(
        self, graph: Graph | None, tids: Iterator[int], arrows: Iterator[int]
    ) -> Iterator[_Event]:
        """Yield all events, in no order; times are in nanoseconds."""
        for device, pid in self.pids.items():
            yield from self._process(pid, device)
        threads = {
            stream: _thread(self.pids[stream.device], next(tids))
            for stream in self.timeline.streams
        }
        for stream, thread in threads.items():
            yield from _named_thread(thread, stream.name)
        for (i, stream), (start, end) in self.slices.items():
            span = self.timeline.spans[i]
            args = _args(span, graph)
            yield {
                "ph": "X",
                "cat": span.kind,
                "name": span.name,
                **threads[stream],
                **_when(start, end),
                "args": args,
            }
        yield from self._arrows(threads, arrows)
        yield from self._bytes_in_flight()
        for device, course in self.memory.items():
            yield from _counter(
                self.pids[device],
                "memory",
                "bytes",
                [(_ns(moment), held) for moment, held in course],
            )
        if self.python:
            yield from self._pauses(next(tids))

    def _process(self, pid: int, name: str) -> Iterator[_Event]:
        shown = f"{name} ({self.name})" if self.name else name
        yield _meta("process_name", {"pid": pid}, name=shown, device=name, group=self.name)
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

    def _bytes_in_flight(self) -> Iterator[_Event]:
        steps: dict[Stream, list[tuple[int, float]]] = {}
        for (i, stream), (start, end) in self.slices.items():
            span = self.timeline.spans[i]
            if span.kind == "copy" and span.nbytes:
                steps.setdefault(stream, []).extend([(start, span.nbytes), (end, 0.0)])
        for stream, course in steps.items():
            yield from _counter(self.pids[stream.device], stream.name, "bytes in flight", course)

    def _pauses(self, tid: int) -> Iterator[_Event]:
        thread = _thread(self.python, tid)
        yield from self._process(self.python, _PYTHON)
        yield from _named_thread(thread, _COLLECTOR)
        ends = 0
        for pause in sorted(self.timeline.pauses):
            start, ends = _next_to(ends, *pause)
            yield {"ph": "X", "cat": "gc", "name": _COLLECTOR, **thread, **_when(start, ends)}


def _apart(timeline: Timeline) -> dict[tuple[int, Stream], tuple[int, int]]:
    """Return the times of each span on each of its streams, in nanoseconds, without overlaps."""
    free = dict.fromkeys(timeline.streams, 0)
    found: dict[tuple[int, Stream], tuple[int, int]] = {}
    for i, span in sorted(enumerate(timeline.spans), key=lambda item: (item[1].start, item[1].end)):
        for stream in span.streams:
            found[i, stream] = _next_to(free[stream], span.start, span.end)
            free[stream] = found[i, stream][1]
    return found


def _next_to(free: int, start: float, end: float) -> tuple[int, int]:
    first = max(free, _ns(start))
    return first, max(first + 1, _ns(end))


def _args(span: Span, graph: Graph | None) -> _Event:
    args: _Event = {"instruction": span.instruction}
    if span.kind == "copy" and span.nbytes:
        args["bytes"] = _finite(span.nbytes)
    if span.kind == "run" and graph is not None:
        task = graph.task(span.name)
        told = {
            "task": task.name,
            "source": task.source,
            "module": task.origin.module,
            "phase": task.origin.phase,
        }
        args.update({key: text for key, text in told.items() if text})
    return args


def _counter(
    pid: int, name: str, unit: str, course: Sequence[tuple[int, float]]
) -> Iterator[_Event]:
    for moment, number in dict(course).items():  # of several at the same time the last counts
        yield {
            "ph": "C",
            "name": name,
            "pid": pid,
            "ts": max(0, moment),
            "args": {unit: _finite(number)},
        }


def _thread(pid: int, tid: int) -> _Event:
    return {"pid": pid, "tid": tid}


def _named_thread(thread: _Event, name: str) -> Iterator[_Event]:
    yield _meta("thread_name", thread, name=name)
    yield _meta("thread_sort_index", thread, sort_index=thread["tid"])


def _meta(what: str, where: _Event, **args: Any) -> _Event:
    return {"ph": "M", "name": what, **where, "args": args}


def _when(start: int, end: int) -> _Event:
    return {"ts": start, "dur": end - start}


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
