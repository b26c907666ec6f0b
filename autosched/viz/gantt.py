"""Draw a predicted or measured timeline as a Gantt chart: as SVG, and as text for a terminal.

Knows spans and streams, no graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from autosched._lib.allowed import is_number
from autosched._lib.text import duration, natural, time_unit
from autosched.errors import ChartError, shown
from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.svg import (
    FONT_SIZE,
    LABEL,
    PHASES,
    TITLE,
    columns,
    document,
    escape,
    legend,
    number,
    path,
    rect,
    shorten,
    text,
    text_width,
)

WIDTH = 1000.0
LEAST_WIDTH = 300.0
MARGIN = 20.0
IDLE = 50.0  # to the right of rows, for the share of idle time
BOX = 22.0  # the height of a box, if no label in its row is vertical
TALL = 64.0  # the greatest height of a box
GAP = 9.0  # between rows, and twice as much between devices
HOST = 24.0  # above the first row of a host, for its name
HIGH = 1200.0  # of all rows of a chart; more rows than fit are lower, down to
LOW = 5.0  # pixels from one to the next
NAMED = 13.0  # pixels from one row to the next: lower rows have no names
TICKS = 8  # the most steps of the time axis
CLOSE = 0.4  # pixels: a box that adds less than this to its row is left out
THIN = 4.0  # pixels: narrower boxes have no edge
NARROW = 12.0  # pixels: narrower boxes have no vertical label

_START = attrgetter("start")
Phases = Mapping[str, str]
Key = tuple[int, int]  # of a span: its run and its instruction
Label = tuple[str, Literal["inside", "vertical", "right"]]  # in its box, or to the right of it


class Row(NamedTuple):
    """A row of a chart, and its spans by timeline, each in the order of time."""

    device: str
    name: str
    host: str
    spans: Sequence[Sequence[Span]]


def gantt_rows(*timelines: Timeline, copies: bool = True) -> list[Row]:
    """Return the rows of a chart of timelines of one program, by host and device.

    A stream has a row. Streams for one copy each, as without contention, share as few rows as their
    copies overlap. Without ``copies``, streams of copies have none.
    """
    hosts = {name: host for timeline in timelines for name, host in timeline.hosts.items()}
    placed: dict[tuple[Key, Stream], list[tuple[int, Span]]] = {}
    for at, timeline in enumerate(timelines):
        for span in sorted(timeline.spans, key=_START):
            for stream in span.streams:
                placed.setdefault((span_key(span), stream), []).append((at, span))
    rows: dict[tuple[str, str, int], list[list[Span]]] = {}
    ends: dict[tuple[str, int, int], float] = {}  # of copies, by device, row and timeline
    for (_, stream), mine in placed.items():
        device, name, lane = stream.device, stream.name, 0
        if name.startswith("copy") and not copies:
            continue
        if re.fullmatch(r"copy-\d+", name):  # is for one copy, as where there is no contention
            name = "copies"
            while any(ends.get((device, lane, at), 0.0) > span.start for at, span in mine):
                lane += 1
            ends |= {(device, lane, at): span.end for at, span in mine}
        row = rows.setdefault((device, name, lane), [[] for _ in timelines])
        for at, span in mine:
            row[at].append(span)

    def place(row: tuple[str, str, int]) -> tuple[Any, ...]:
        device, name, lane = row
        where = natural(hosts.get(device, "")), natural(device), device
        return *where, not name.startswith("compute"), name, lane

    return [
        Row(
            device,
            "" if lane else name,
            hosts.get(device, ""),
            [sorted(spans, key=_START) for spans in rows[device, name, lane]],
        )
        for device, name, lane in sorted(rows, key=place)
    ]


def span_key(span: Span) -> Key:
    """Return the run and the instruction of a span."""
    return span.run, span.instruction


def _idle(timeline: Timeline, spans: Sequence[Span]) -> float:
    """Return the share of the makespan in which a row is idle."""
    return max(1 - sum(span.seconds for span in spans) / (timeline.makespan or 1.0), 0.0)


# ---- both kinds of charts


def ticks(end: float, most: int) -> list[tuple[float, str]]:
    """Return at most ``most`` steps of round times from 0 to ``end`` seconds, each with its text.

    >>> ticks(0.0021, 5)
    [(0.0, '0'), (0.0005, '0.5 ms'), (0.001, '1 ms'), (0.0015, '1.5 ms'), (0.002, '2 ms')]
    """
    if end < 1e-12:
        return [(0.0, "0")]
    least = end / max(most, 1)
    power = math.floor(math.log10(least))
    step = next(s for s in (float(f"{digit}e{power}") for digit in (1, 2, 5, 10)) if s >= least)
    scale, unit = time_unit(end)
    times = (float(f"{i * step:.12g}") for i in range(math.floor(end / step + 1e-9) + 1))
    return [(time, f"{time / scale:g} {unit}" if time else "0") for time in times]


def summary(timeline: Timeline) -> str:
    """Return a line with makespan, share of hidden copy time, and doubt.

    >>> summary(Timeline(())), summary(Timeline((), doubt=1e-5))
    ('makespan 0 us', 'makespan 0 us, clocks agree within 10 us')
    """
    text = f"makespan {duration(timeline.makespan)}"
    if timeline.run_count > 1:
        text = f"{timeline.run_count} runs in {duration(timeline.makespan)}"
    if timeline.period is not None:
        text += f", period {duration(timeline.period)}"
    if any(span.kind == "copy" for span in timeline.spans):
        text += f", {timeline.overlap().copies_hidden:.0%} of copy time hidden behind compute"
    if timeline.doubt:
        text += f", clocks agree within {duration(timeline.doubt)}"
    return f"{text}, with {timeline.guess}" if timeline.guess else text


# ---- SVG


@dataclass
class _Track:
    """A row of one chart: its spans, their labels, and the upper edge and height of their boxes."""

    row: Row
    spans: Sequence[Span]
    labels: Mapping[Key, Label]
    y: float = 0.0
    height: float = BOX

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def gantt_svg(
    timeline: Timeline,
    *,
    title: str = "",
    measured: Timeline | None = None,
    phases: Phases | None = None,
    copies: bool = True,
    width: float = WIDTH,
    font_size: float = FONT_SIZE,
) -> str:
    """Draw a timeline as SVG: a row per stream, copies hatched, waits as arrows.

    The critical path is outlined. The end of each row shows the share of the makespan in which it
    is idle. Of several runs, every second one is paler, and the last period is marked. With
    ``measured``, its rows are below those of ``timeline``, on the same time axis. ``phases`` has the
    phases of tasks by name: ``"backward"`` and ``"optimizer"`` have colours of their own. Without
    ``copies``, only rows of tasks are drawn. ``width`` and ``font_size`` are in pixels. Raises
    ChartError for those that are too small.

    >>> timeline = Timeline((Span("run", "h", (Stream("cuda:0", "compute"),), 0.0, 0.002, 0),))
    >>> svg = gantt_svg(timeline, title="one task")
    >>> svg.startswith("<svg"), "makespan 2 ms" in svg
    (True, True)
    """
    are_sizes = is_number(width) and is_number(font_size) and font_size > 0
    if not are_sizes or width * FONT_SIZE / font_size < LEAST_WIDTH:
        least = f"{LEAST_WIDTH / FONT_SIZE:g} times font_size"
        got = f"width={shown(width)} and font_size={shown(font_size)}"
        raise ChartError(f"a chart must be at least {least} wide, got {got}")
    charts = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    rows = gantt_rows(*charts.values(), copies=copies)
    zoom = font_size / FONT_SIZE
    end = max(chart.makespan for chart in charts.values())
    drawings = [
        _Chart(chart, name, rows, at, phases or {}, width / zoom, end)
        for at, (name, chart) in enumerate(charts.items())
    ]
    body = []
    y = MARGIN
    if title:
        y += 28
        room = width / zoom - 2 * MARGIN
        body.append(text("ink title", MARGIN, y - 12, shorten(title, room, TITLE)))
    for drawing in drawings:
        bottom = drawing.arrange(y)
        body += drawing.svg(y, bottom)
        y = bottom + 20
    for time, label in ticks(end, TICKS):
        body.append(text("muted middle", drawings[0].x(time), bottom + 14, label))
    body += legend(MARGIN, bottom + 44, entries(list(charts.values()), phases or {}, copies))
    return document(width / zoom, bottom + 44 + MARGIN, title or "schedule", body, zoom)


def entries(
    charts: Sequence[Timeline], phases: Phases, copies: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the legend of what occurs in charts."""
    seen = {_phase(span, phases) for chart in charts for span in chart.spans if span.kind == "run"}
    if seen & {*PHASES}:
        shown = [phase for phase in ("", *PHASES) if phase in seen]
        yield from (("box", f"task {phase}".rstrip(), phase or "forward") for phase in shown)
    else:
        yield "box", "task", "task"
    if any(chart.run_count > 1 for chart in charts):
        yield "box", "task odd", "every second run"
    if copies:
        yield "box", "copy", "copy"
    yield "line", "line wait", "waits for"
    yield "box", "track critical", "critical path"
    yield "box", "track", "idle"


def _phase(span: Span, phases: Phases) -> str:
    """Return the phase of a task if it has a colour of its own, else ""."""
    phase = phases.get(span.name, "") if span.kind == "run" else ""
    return phase if phase in PHASES else ""


@dataclass
class _Chart:
    """The timeline ``at`` of several, drawn in rows, on an axis that ends at ``end`` seconds."""

    timeline: Timeline
    name: str
    rows: Sequence[Row]
    at: int
    phases: Phases
    width: float
    end: float

    def __post_init__(self) -> None:
        rows = self.rows
        self.indent, more = (
            min(max(map(text_width, names), default=0.0), 140.0) + 14
            for names in ([row.device for row in rows], [row.name for row in rows])
        )
        self.left = MARGIN + self.indent + more
        self.right = self.width - MARGIN - IDLE
        self.critical = {span_key(span) for span in self.timeline.critical_path()}
        # Many rows are lower, so that a chart of a hundred devices is still of one page.
        self.scale = max(min(HIGH / (len(rows) * (BOX + GAP) or 1), 1.0), LOW / (BOX + GAP))
        mine = ((row, row.spans[self.at]) for row in rows)
        self.tracks = [_Track(row, spans, self._labels(spans)) for row, spans in mine]

    def x(self, seconds: float) -> float:
        """Return the place of a time."""
        return self.left + (self.right - self.left) * (seconds / self.end if self.end else 0.0)

    def arrange(self, y: float) -> float:
        """Place the rows, which are as high as their vertical labels are long; return the bottom."""
        y += 24
        last = Row("", "", "", ())
        for track in self.tracks:
            y += GAP * self.scale if track.row.device != last.device and last.device else 0
            y += HOST if track.row.host != last.host else 0
            vertical = (name for name, place in track.labels.values() if place == "vertical")
            longest = max((text_width(name, LABEL) + 8 for name in vertical), default=0.0)
            track.y, track.height = y, max(BOX * self.scale, min(longest, TALL))
            y += track.height + GAP * self.scale
            last = track.row
        return (y if self.tracks else y + BOX) + GAP * (1 - self.scale)

    def svg(self, y: float, bottom: float) -> Iterator[str]:
        """Yield the drawing, whose rows have been arranged from y to the bottom."""
        strong = f'<tspan class="ink strong">{self.name}: </tspan>' if self.name else ""
        place = f'x="{number(MARGIN)}" y="{number(y + 8)}"'
        yield f'<text class="muted" {place}>{strong}{escape(summary(self.timeline))}</text>'
        yield from self._names(y)
        for time, _ in ticks(self.end, TICKS):
            yield path("grid", "M", self.x(time), y + 20, "V", bottom)
        yield from self._period(y + 17)
        yield from self._arrows()
        outlined = []  # the critical path, over all else
        for track in self.tracks:
            filled = -1.0  # the right end of the filled part of the row
            for span in track.spans:
                if self.x(span.end) - filled < CLOSE:
                    continue
                filled = self.x(span.end)
                if span_key(span) in self.critical:
                    outlined.append(self._box(span, track))
                else:
                    yield self._box(span, track)
        yield from outlined

    def _names(self, y: float) -> Iterator[str]:
        """Draw hosts, each device once, and the name, background and idle time of each row."""
        device = host = ""
        share = self.width - MARGIN
        if self.tracks:
            yield text("muted end", share, y + 8, "idle")
        for track in self.tracks:
            row, base = track.row, track.middle + 4
            if row.host != host:
                host = row.host
                name = shorten(host, self.left - MARGIN)
                yield text("ink strong", MARGIN, track.y - 8, name)
                yield path("grid", "M", MARGIN, track.y - HOST, "H", self.right)
            is_first = row.device != device
            device = row.device
            if is_first:
                yield text("ink strong", MARGIN, base, shorten(device, self.indent))
            if is_first or track.height + GAP * self.scale >= NAMED:
                name = shorten(row.name, self.left - MARGIN - self.indent)
                yield text("muted", MARGIN + self.indent, base, name)
                yield text("muted end", share, base, f"{_idle(self.timeline, track.spans):.0%}")
            yield rect("track", self.left, track.y, self.right - self.left, track.height, 2)

    def _period(self, y: float) -> Iterator[str]:
        chart = self.timeline
        if chart.period is not None and chart.run_count > 1:
            right = self.x(chart.makespan)
            left = self.x(max(chart.makespan - chart.period, 0.0))
            yield path("period", "M", left, y + 6, "V", y, "H", right, "V", y + 6)
            yield text("ink end label", left - 5, y + 4, "period")

    def _labels(self, spans: Sequence[Span]) -> dict[Key, Label]:
        """Return the labels of the boxes of a row.

        1. A name that fits into its box is there; a long one is shortened.
        2. Else it is to the right of the box, if nothing else is there until its end.
        3. Else it is vertical in the box, if the box is wide enough for that.
        """
        labels: dict[Key, Label] = {}
        limits = [*(self.x(span.start) for span in spans[1:]), self.right]
        for span, limit in zip(spans, limits, strict=False) if self.scale >= 0.6 else ():
            key, name = span_key(span), span.name
            right = self.x(span.end)
            width = right - self.x(span.start)
            if short := shorten(name, width - 3, LABEL):
                labels[key] = short, "inside"
            elif width >= THIN and right + text_width(name, LABEL) + 8 <= limit:
                labels[key] = name, "right"
            elif width >= NARROW and self.scale == 1 and (short := shorten(name, TALL - 4, LABEL)):
                labels[key] = short, "vertical"
        return labels

    def _box(self, span: Span, track: _Track) -> str:
        left = self.x(span.start)
        width = self.x(span.end) - left
        kind = "task" if span.kind == "run" else "copy"
        cls = " ".join(filter(None, (kind, _phase(span, self.phases), "odd" * (span.run % 2))))
        cls += " critical" * (span_key(span) in self.critical) + " thin" * (width < THIN)
        streams = " and ".join(map(str, span.streams))
        times = f"start {duration(span.start)}, takes {duration(span.seconds)}"
        of_run = f" of run {span.run}" if span.run else ""
        tooltip = f"{kind} {span.name}{of_run}\n{streams}\n{times}"
        rx = 2 if width >= THIN else 0
        box = rect(cls, left, track.y, max(width, CLOSE), track.height, rx, tooltip)
        name, place = track.labels.get(span_key(span), ("", "inside"))
        ink = f"on-{kind}" if span.run % 2 == 0 else "ink"
        if not name:
            return box
        if place == "right":
            return box + text("ink halo label", left + width + 4, track.middle + 4, name)
        right, down = (3.6, 0) if place == "vertical" else (0, 4)
        at = left + width / 2 + right, track.middle + down
        return box + text(f"{ink} middle label", *at, name, rotated=place == "vertical")

    def _arrows(self) -> Iterator[str]:
        """Draw each wait from the end of one span to the start of another, by nearest rows."""
        chart = self.timeline
        tracks: dict[Key, list[_Track]] = {}
        for track in self.tracks:
            for span in track.spans:
                tracks.setdefault(span_key(span), []).append(track)
        yield f'<g opacity="{number(min(max(100 / max(len(chart.arrows), 1), 0.25), 0.7))}">'
        for a, b in chart.arrows:
            before, after = chart.spans[a], chart.spans[b]
            ends = product(tracks.get(span_key(before), ()), tracks.get(span_key(after), ()))
            nearest = min(ends, key=lambda pair: abs(pair[0].y - pair[1].y), default=None)
            if nearest is None:
                continue
            first, second = nearest
            x1, x2 = self.x(before.end), self.x(after.start)
            down = (second.y > first.y) - (second.y < first.y)
            y1 = first.middle + down * first.height / 2
            y2 = second.middle - down * second.height / 2
            bend = max(abs(y2 - y1) / 2, 6) * down
            yield path("line wait", "M", x1, y1, "C", x1, y1 + bend, x2, y2 - bend, x2, y2)
        yield "</g>"


# ---- text

LEAST = 16  # columns of the chart itself, however narrow the terminal
TICK = 10  # columns of one step of the time axis, at least
SHARE = 6  # columns at the right, for the share of time in which a row is idle
COLOURS = {"run": "34", "copy": "33"}  # blue and yellow, as terminals number them
BLOCKS = {"run": ("█", "▌"), "copy": ("░", "▏")}  # the fill of a box, and its right edge
ODD = {"run": ("▓", "▌"), "copy": ("▒", "▏")}  # the same of every second run


def gantt_text(
    timeline: Timeline, width: int = 80, *, colour: bool = False, copies: bool = True
) -> str:
    """Draw a timeline as text of ``width`` columns.

    A box begins with its name, where that fits, and ends in an edge. The last column is the share
    of the makespan in which a row is idle. With ``colour`` the text is for a colour terminal:
    tasks are blue, copies yellow, and the critical path is bold. Every second run is shaded, and
    the last period is marked under the axis. Without ``copies``, only rows of tasks are drawn.

    >>> span = Span("run", "mm", (Stream("cpu", "compute"),), 0.0, 0.002, 0)
    >>> print(gantt_text(Timeline((span,)), width=40))
    cpu  compute  mm█████████████████▌    0%
                  │0        │1 ms       idle
    makespan 2 ms
    """
    rows = gantt_rows(timeline, copies=copies)
    names = [(_printable(row.device), _printable(row.name)) for row in rows]
    widths = [max(map(columns, column)) for column in zip(*names, strict=True)]
    indent = sum(wide + 2 for wide in widths)
    cells = max(width - indent - SHARE, LEAST)
    end = timeline.makespan
    path = timeline.critical_path() if colour else ()
    bold = {span_key(span) for span in path} if colour else None
    lines = []
    last = None
    for row, name in zip(rows, names, strict=True):
        if row.host != (last.host if last else ""):
            lines.append(_printable(row.host))
        is_first = last is None or row.device != last.device
        cell = zip((name[0] if is_first else "", name[1]), widths, strict=True)
        label = "".join(part + " " * (wide + 2 - columns(part)) for part, wide in cell)
        boxes = _text_row(row.spans[0], end, cells, bold)
        lines.append(f"{label}{boxes}{_idle(timeline, row.spans[0]):>{SHARE}.0%}")
        last = row
    axis = " " * indent + _text_axis(end, cells).ljust(cells)
    lines.append(axis + f"{'idle':>{SHARE}}" * bool(rows))
    if timeline.run_count > 1:
        lines.append(" " * indent + _text_period(timeline, cells))
    return "\n".join([*(line.rstrip() for line in lines), summary(timeline)])


def _text_period(timeline: Timeline, cells: int) -> str:
    """Return the legend of runs, and a line under the last period, if there is room."""
    legend = f"runs: {BLOCKS['run'][0]} {ODD['run'][0]} in turn"
    if timeline.period is None:
        return legend
    left = _column(max(timeline.makespan - timeline.period, 0.0), timeline.makespan, cells)
    mark = f"└{'period':─^{max(cells - left - 2, 0)}}┘"
    return legend.ljust(left) + mark if len(legend) < left and cells - left >= 8 else legend


def _text_row(spans: Sequence[Span], end: float, cells: int, bold: Collection[Key] | None) -> str:
    """Draw the boxes of a row, each at least a column wide; in colour unless bold is None."""
    row = ""
    filled = 0
    for span in spans:
        left = _column(span.start, end, cells)
        right = min(max(_column(span.end, end, cells), left + 1), cells)
        left = max(left, filled)
        if left < right:
            box = _text_box(span, right - left)
            if bold is not None:
                weight = "1;" * (span_key(span) in bold)
                box = f"\x1b[{weight}{COLOURS[span.kind]}m{box}\x1b[0m"
            row += " " * (left - filled) + box
            filled = right
    return row + " " * (cells - filled)


def _text_box(span: Span, width: int) -> str:
    fill, edge = (ODD if span.run % 2 else BLOCKS)[span.kind]
    name = _printable(span.name)
    if columns(name) >= width:
        name = ""
    return name + fill * (width - 1 - columns(name)) + edge


def _text_axis(end: float, cells: int) -> str:
    line = ""
    for time, label in ticks(end, cells // TICK):
        at = _column(time, end, cells)
        if at + 1 + len(label) <= cells:
            line += " " * (at - len(line)) + "│" + label
    return line


def _column(time: float, end: float, cells: int) -> int:
    return round(time / end * cells) if end else 0


def _printable(name: str) -> str:
    """Return a name without line breaks and control characters, so that its width is known."""
    return "".join(c if c.isprintable() else "?" for c in name)
