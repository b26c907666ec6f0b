"""Draw a predicted or measured timeline as an SVG Gantt chart.

Knows spans and streams, no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple

from autosched._lib.text import duration
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.format import (
    idle_shares,
    shorten,
    sorted_streams,
    summary,
    text_width,
    ticks,
)
from autosched.viz.svg import (
    LABEL,
    PHASES,
    TITLE,
    document,
    escape,
    legend,
    number,
    path,
    rect,
    text,
)

__all__ = ["gantt_svg"]

WIDTH = 1000.0
MARGIN = 20.0
IDLE = 50.0  # to the right of rows, for the share of idle time
BOX = 22.0  # the height of a box, if no label in its row is vertical
TALL = 64.0  # the greatest height of a box
GAP = 9.0  # between streams, and twice as much between devices
HOST = 24.0  # above the first stream of a host, for its name
TICKS = 8  # the most steps of the time axis
CLOSE = 0.4  # pixels: a box that adds less than this to its row is left out
THIN = 4.0  # pixels: narrower boxes have no edge
NARROW = 12.0  # pixels: narrower boxes have no vertical label

Phases = Mapping[str, str]


@dataclass(frozen=True)
class _Axis:
    """A map from seconds to pixels."""

    left: float
    end: float
    right: ClassVar[float] = WIDTH - MARGIN - IDLE

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * (seconds / self.end if self.end else 0.0)


class _Row(NamedTuple):
    """The upper edge and the height of a stream's boxes."""

    y: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


class _Label(NamedTuple):
    """The text of a box, and its place: in the box, in it and vertical, or to the right of it."""

    text: str
    place: Literal["inside", "vertical", "right"]


Rows = Mapping[Stream, _Row]
Labels = Mapping[Stream, Mapping[int, _Label]]


def gantt_svg(
    timeline: Timeline,
    *,
    title: str = "",
    measured: Timeline | None = None,
    phases: Phases | None = None,
) -> str:
    """Draw a timeline as SVG: a row per stream, copies hatched, waits as arrows.

    The critical path is outlined. The end of each row shows the share of the makespan in which it
    is idle. Pauses of the garbage collector are bands over all rows. Of several runs, every second
    one is paler, and the last period is marked. With ``measured``, its rows are below those of
    ``timeline``, on the same time axis. ``phases`` has the phases of tasks by
    name: ``"backward"`` and ``"optimizer"`` have colours of their own.

    >>> timeline = Timeline((Span("run", "h", (Stream("cuda:0", "compute"),), 0.0, 0.002, 0),))
    >>> svg = gantt_svg(timeline, title="one task")
    >>> svg.startswith("<svg"), "makespan 2 ms" in svg
    (True, True)
    """
    charts = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    spans = [span for chart in charts.values() for span in chart.spans]
    hosts = {name: host for chart in charts.values() for name, host in chart.hosts.items()}
    streams = sorted_streams(Timeline(tuple(spans), hosts=hosts))
    widths = _widest(s.device for s in streams), _widest(s.name for s in streams)
    axis = _Axis(MARGIN + sum(widths), max(chart.makespan for chart in charts.values()))
    labels = {name: _labels(chart, axis) for name, chart in charts.items()}
    body = []
    y = MARGIN
    if title:
        y += 28
        body.append(text("ink title", MARGIN, y - 12, shorten(title, WIDTH - 2 * MARGIN, TITLE)))
    for name, chart in charts.items():
        body.append(_heading(name, chart, y))
        rows = _rows(streams, list(labels.values()), y + 24, hosts)
        bottom = max((row.y + row.height for row in rows.values()), default=y + BOX) + GAP
        body += [*_names(rows, widths[0], axis), *_idle(chart, rows), *_grid(axis, y + 20, bottom)]
        body += _period(chart, y + 17, axis)
        body += _hosts(rows, hosts, axis)
        body += _arrows(chart, rows, axis)
        body += _boxes(chart, rows, axis, labels[name], phases or {})
        body += _pauses(chart, y + 20, bottom, axis)
        y = bottom + 20
    seen = {_phase(span, phases or {}) for span in spans if span.kind == "run"}
    paused = any(chart.pauses for chart in charts.values())
    for time, label in ticks(axis.end, TICKS):
        body.append(text("muted middle", axis.x(time), bottom + 14, label))
    several = any(chart.run_count > 1 for chart in charts.values())
    entries = [*_task_entries(seen), *_ODD * several, *_ENTRIES, *_PAUSE * paused]
    body += legend(MARGIN, bottom + 44, entries)
    return document(WIDTH, bottom + 44 + MARGIN, title or "schedule", body)


_ENTRIES = (
    ("box", "copy", "copy"),
    ("line", "line wait", "waits for"),
    ("box", "track critical", "critical path"),
    ("box", "track", "idle"),
)
_PAUSE = (("band", "pause", "garbage collection"),)
_ODD = (("box", "task odd", "every second run"),)


def _task_entries(seen: set[str]) -> list[tuple[str, str, str]]:
    if not seen & {*PHASES}:
        return [("box", "task", "task")]
    entries = (("", "task", "forward"), *((phase, f"task {phase}", phase) for phase in PHASES))
    return [("box", cls, name) for phase, cls, name in entries if phase in seen]


def _phase(span: Span, phases: Phases) -> str:
    """Return the phase of a task if it has a colour of its own, else ""."""
    phase = phases.get(span.name, "") if span.kind == "run" else ""
    return phase if phase in PHASES else ""


def _heading(name: str, chart: Timeline, y: float) -> str:
    strong = f'<tspan class="ink strong">{name}: </tspan>' if name else ""
    place = f'x="{number(MARGIN)}" y="{number(y + 8)}"'
    return f'<text class="muted" {place}>{strong}{escape(summary(chart))}</text>'


def _period(chart: Timeline, y: float, axis: _Axis) -> Iterator[str]:
    if chart.period is not None and chart.run_count > 1:
        right = axis.x(chart.makespan)
        left = axis.x(max(chart.makespan - chart.period, 0.0))
        yield path("period", "M", left, y + 6, "V", y, "H", right, "V", y + 6)
        yield text("ink end label", left - 5, y + 4, "period")


# ---- rows


def _widest(names: Iterator[str]) -> float:
    return min(max(map(text_width, names), default=0.0), 140.0) + 14


def _rows(
    streams: Sequence[Stream], labels: Sequence[Labels], y: float, hosts: Mapping[str, str]
) -> Rows:
    """Return the rows of streams, which are as high as their vertical labels are long."""
    rows = {}
    host = ""
    for i, stream in enumerate(streams):
        y += GAP if i and stream.device != streams[i - 1].device else 0
        if hosts.get(stream.device, "") != host:
            host = hosts[stream.device]
            y += HOST
        mine = [label for chart in labels for label in chart.get(stream, {}).values()]
        lengths = [text_width(one.text, LABEL) + 8 for one in mine if one.place == "vertical"]
        rows[stream] = _Row(y, max(BOX, min(max(lengths, default=0.0), TALL)))
        y += rows[stream].height + GAP
    return rows


def _names(rows: Rows, indent: float, axis: _Axis) -> Iterator[str]:
    """Draw the name of each device once, and the name and the background of each stream."""
    for device, streams in groupby(rows, key=lambda stream: stream.device):
        for i, stream in enumerate(streams):
            row = rows[stream]
            if i == 0:
                yield text("ink strong", MARGIN, row.middle + 4, shorten(device, indent))
            name = shorten(stream.name, axis.left - MARGIN - indent)
            yield text("muted", MARGIN + indent, row.middle + 4, name)
            yield rect("track", axis.left, row.y, axis.right - axis.left, row.height, 2)


def _hosts(rows: Rows, hosts: Mapping[str, str], axis: _Axis) -> Iterator[str]:
    """Draw the name of each host above its rows, and a line."""
    for host, streams in groupby(rows, key=lambda stream: hosts.get(stream.device, "")):
        if host:
            top = rows[next(streams)].y
            yield text("ink strong", MARGIN, top - 8, shorten(host, axis.left - MARGIN))
            yield path("grid", "M", MARGIN, top - HOST, "H", axis.right)


def _idle(chart: Timeline, rows: Rows) -> Iterator[str]:
    """Draw the share of the makespan in which each stream is idle."""
    shares = idle_shares(chart)
    top = min((row.y for row in rows.values()), default=0.0)
    if rows:
        yield text("muted end", WIDTH - MARGIN, top - 16, "idle")
    for stream, row in rows.items():
        share = f"{shares.get(stream, 1.0):.0%}"
        yield text("muted end", WIDTH - MARGIN, row.middle + 4, share)


def _grid(axis: _Axis, top: float, bottom: float) -> Iterator[str]:
    for time, _ in ticks(axis.end, TICKS):
        yield path("grid", "M", axis.x(time), top, "V", bottom)


def _pauses(chart: Timeline, top: float, bottom: float, axis: _Axis) -> Iterator[str]:
    """Draw a band over all rows for each pause of the garbage collector."""
    for start, end in chart.pauses:
        left, right = (axis.x(min(max(time, 0.0), axis.end)) for time in (start, end))
        tooltip = f"garbage collection\nstart {duration(start)}, takes {duration(end - start)}"
        yield rect("pause", left, top, max(right - left, 1), bottom - top, tooltip=tooltip)


# ---- boxes


def _labels(chart: Timeline, axis: _Axis) -> Labels:
    """Return the labels of boxes by stream and by position of the span.

    1. A name that fits into its box is there; a long one is shortened.
    2. Else it is to the right of the box, if nothing else is there until its end.
    3. Else it is vertical in the box, if the box is wide enough for that.
    """
    by_stream: dict[Stream, list[tuple[int, Span]]] = {}
    for i, span in enumerate(chart.spans):
        for stream in span.streams:
            by_stream.setdefault(stream, []).append((i, span))
    labels: dict[Stream, dict[int, _Label]] = {}
    for stream, spans in by_stream.items():
        spans.sort(key=lambda item: item[1].start)
        mine = labels.setdefault(stream, {})
        limits = [*(axis.x(span.start) for _, span in spans[1:]), axis.right]
        for (i, span), limit in zip(spans, limits, strict=True):
            right = axis.x(span.end)
            width = right - axis.x(span.start)
            if name := shorten(span.name, width - 3, LABEL):
                mine[i] = _Label(name, "inside")
            elif width >= THIN and right + text_width(span.name, LABEL) + 8 <= limit:
                mine[i] = _Label(span.name, "right")
            elif width >= NARROW and (name := shorten(span.name, TALL - 4, LABEL)):
                mine[i] = _Label(name, "vertical")
    return labels


def _boxes(
    chart: Timeline, rows: Rows, axis: _Axis, labels: Labels, phases: Phases
) -> Iterator[str]:
    """Draw each span in the rows of its streams, over the arrows, the critical path last."""
    critical = {(span.run, span.instruction) for span in chart.critical_path()}
    filled = dict.fromkeys(rows, -1.0)  # the right end of the filled part of each row
    outlined = []
    for i, span in enumerate(chart.spans):
        left = axis.x(span.start)
        right = axis.x(span.end)
        look = (f" {phase}" if (phase := _phase(span, phases)) else "") + " odd" * (span.run % 2)
        for stream in span.streams:
            if right - filled[stream] < CLOSE:
                continue
            filled[stream] = right
            label = labels[stream].get(i)
            if (span.run, span.instruction) in critical:
                box = _box(span, left, right, rows[stream], f"{look} critical", label)
                outlined.append(box)
            else:
                yield _box(span, left, right, rows[stream], look, label)
    yield from outlined


def _box(span: Span, left: float, right: float, row: _Row, look: str, label: _Label | None) -> str:
    kind = "task" if span.kind == "run" else "copy"
    width = right - left
    cls = kind + look + " thin" * (width < THIN)
    streams = " and ".join(map(str, span.streams))
    times = f"start {duration(span.start)}, takes {duration(span.seconds)}"
    of_run = f" of run {span.run}" if span.run else ""
    tooltip = f"{kind} {span.name}{of_run}\n{streams}\n{times}"
    on_box = f"on-{kind}" if span.run % 2 == 0 else "ink"
    rx = 2 if width >= THIN else 0
    box = rect(cls, left, row.y, max(width, CLOSE), row.height, rx, tooltip)
    if label is None:
        return box
    middle = left + width / 2
    match label.place:
        case "inside":
            return box + text(f"{on_box} middle label", middle, row.middle + 4, label.text)
        case "vertical":
            place = middle + 3.6, row.middle
            return box + text(f"{on_box} middle label", *place, label.text, rotated=True)
        case "right":
            return box + text("ink halo label", right + 4, row.middle + 4, label.text)


def _arrows(chart: Timeline, rows: Rows, axis: _Axis) -> Iterator[str]:
    """Draw each wait from the end of one span to the start of another, by nearest rows."""
    yield f'<g opacity="{number(min(max(100 / max(len(chart.arrows), 1), 0.25), 0.7))}">'
    for a, b in chart.arrows:
        before = chart.spans[a]
        after = chart.spans[b]
        pairs = ((rows[s], rows[t]) for s in before.streams for t in after.streams)
        first, second = min(pairs, key=lambda pair: abs(pair[0].y - pair[1].y))
        x1 = axis.x(before.end)
        x2 = axis.x(after.start)
        down = (second.y > first.y) - (second.y < first.y)
        y1 = first.middle + down * first.height / 2
        y2 = second.middle - down * second.height / 2
        bend = max(abs(y2 - y1) / 2, 6) * down
        yield path("line wait", "M", x1, y1, "C", x1, y1 + bend, x2, y2 - bend, x2, y2)
    yield "</g>"
