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

from autosched._lib.text import duration, natural
from autosched.errors import ChartError
from autosched.graph.graph import Graph
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline

Steps = Sequence[tuple[float, float]]  # (seconds, amount from then on), in the order of time
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
    numbers = count(1)  # no thread has the number of a process, or it would be its main thread
    events: list[_Event] = []
    for name, line in lines.items():
        shown = {} if memory is None or name == "measured" else memory
        events += _events(name, line, shown, graph, numbers)
    events.sort(key=lambda event: (event.get("ts", -1), _ORDER[event["ph"]]))
    for event in events:
        event.update({key: _microseconds(event[key]) for key in ("ts", "dur") if key in event})
    doubt = max(line.doubt for line in lines.values())
    other = {"title": title} | ({"clocks agree within": duration(doubt)} if doubt else {})
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _events(
    name: str, timeline: Timeline, memory: Memory, graph: Graph | None, numbers: Iterator[int]
) -> Iterator[_Event]:
    """Yield all events of one timeline, in no order; times are in nanoseconds."""
    hosts = timeline.hosts
    devices = {*(stream.device for stream in timeline.streams), *memory}
    ordered = sorted(devices, key=lambda name: (natural(hosts.get(name, "")), natural(name), name))
    pids = {device: next(numbers) for device in ordered}
    threads = {
        stream: {"pid": pids[stream.device], "tid": next(numbers)} for stream in timeline.streams
    }
    slices = _slices(timeline)
    for device, pid in pids.items():
        yield from _named_process(pid, device, hosts.get(device, ""), name)
    for stream, thread in threads.items():
        yield from _named_thread(thread, stream.name)
    in_flight: dict[Stream, list[tuple[int, float]]] = {}  # changes of bytes
    for (i, stream), (start, end) in slices.items():
        span = timeline.spans[i]
        args = _args(span, graph)
        yield {**_slice(span.kind, span.name, start, end), **threads[stream], "args": args}
        if span.kind == "copy" and span.nbytes:
            in_flight.setdefault(stream, []).extend([(start, span.nbytes), (end, 0.0)])
    for stream, changes in in_flight.items():
        yield from _counter(pids[stream.device], stream.name, "bytes in flight", changes)
    for device, steps in memory.items():
        held = [(nanoseconds(time), nbytes) for time, nbytes in steps]
        yield from _counter(pids[device], "memory", "bytes", held)
    for a, b in timeline.arrows:  # from the end of a span to the start of the one that waited
        source, target = timeline.spans[a].streams[-1], timeline.spans[b].streams[0]
        (start, end), (first, last) = slices[a, source], slices[b, target]
        leaves = max(start, min(end - 1, first))  # measured clocks may disagree a little
        arrives = max(first, leaves)
        if arrives < last:
            arrow = {"cat": "wait", "name": "wait", "id": next(numbers)}
            yield {"ph": "s", **arrow, **threads[source], "ts": leaves}
            yield {"ph": "f", "bp": "e", **arrow, **threads[target], "ts": arrives}
    if timeline.run_count > 1:
        runs: dict[int, list[int]] = {}
        for (i, _), times in slices.items():
            runs.setdefault(timeline.spans[i].run, []).extend(times)
        pid = next(numbers)
        yield from _named_process(pid, "runs", "", name)
        yield from _runs(pid, runs, timeline.period, numbers)


def _runs(
    pid: int, runs: Mapping[int, Sequence[int]], period: float | None, numbers: Iterator[int]
) -> Iterator[_Event]:
    """Yield a slice for each run, on as few threads as runs overlap; and the last period."""
    ends: list[int] = []  # by thread, when its last run ends
    threads: list[_Event] = []
    for run, times in sorted(runs.items()):
        start, end = min(times), max(times)
        free = next((k for k, ended in enumerate(ends) if ended <= start), len(ends))
        if free == len(ends):
            ends.append(0)
            threads.append({"pid": pid, "tid": next(numbers)})
            yield from _named_thread(threads[free], f"in flight {free}")
        ends[free] = end
        yield {**_slice("whole run", f"run {run}", start, end), **threads[free]}
    if period:
        thread = {"pid": pid, "tid": next(numbers)}
        yield from _named_thread(thread, "period")
        end = max(ends)
        start = max(end - nanoseconds(period), 0)
        yield {**_slice("period", "period", start, max(end, start + 1)), **thread}


def _slices(timeline: Timeline) -> dict[tuple[int, Stream], tuple[int, int]]:
    """Return the times of each span on each of its streams, in nanoseconds, without overlaps."""
    free = dict.fromkeys(timeline.streams, 0)
    found: dict[tuple[int, Stream], tuple[int, int]] = {}
    for i, span in sorted(enumerate(timeline.spans), key=lambda item: (item[1].start, item[1].end)):
        for stream in span.streams:
            first = max(free[stream], nanoseconds(span.start))
            free[stream] = max(first + 1, nanoseconds(span.end))
            found[i, stream] = first, free[stream]
    return found


def _args(span: Span, graph: Graph | None) -> _Event:
    args: _Event = {"instruction": span.instruction} | ({"run": span.run} if span.run else {})
    if span.kind == "copy" and span.nbytes:
        args["bytes"] = _finite(span.nbytes)
    if span.kind == "run" and graph is not None:
        task = graph.task(span.name)
        origin = {"module": task.origin.module, "phase": task.origin.phase}
        calls = ", ".join(task.operators)
        facts = {"task": task.name, "source": task.source, **origin, "calls": calls}
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


def _named_process(pid: int, name: str, host: str, group: str) -> Iterator[_Event]:
    known = ", ".join(filter(None, (host, group)))
    yield _meta("process_name", {"pid": pid}, name=f"{name} ({known})" if known else name)
    yield _meta("process_sort_index", {"pid": pid}, sort_index=pid)


def _named_thread(thread: _Event, name: str) -> Iterator[_Event]:
    yield _meta("thread_name", thread, name=name)
    yield _meta("thread_sort_index", thread, sort_index=thread["tid"])


def _meta(what: str, where: _Event, **args: Any) -> _Event:
    return {"ph": "M", "name": what, **where, "args": args}


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ChartError(f"a trace holds finite numbers alone, got {number!r}")
    return int(number) if number == int(number) else float(number)


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds. Raises ChartError for times that are not finite."""
    return round(_finite(seconds) * 1e9)


def _microseconds(ns: int) -> float:
    """Format nanoseconds as microseconds that readers reconstruct by rounding or truncation."""
    number = ns / 1000
    return number if int(number * 1000.0) == ns else math.nextafter(number, math.inf)
