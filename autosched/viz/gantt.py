"""Draw a predicted or measured timeline as an SVG Gantt chart.

Knows spans and streams, no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.paint import (
    LABEL,
    PHASES,
    TITLE,
    document,
    duration,
    escape,
    idle_shares,
    legend,
    number,
    shorten,
    sorted_streams,
    summary,
    text_width,
    ticks,
)

__all__ = ["gantt_svg"]

WIDTH = 1000.0
MARGIN = 20.0
IDLE = 50.0  # to the right of rows, for the share of idle time
BOX = 22.0  # the height of a box
ROW = 31.0  # from one stream to the next
GROUP = 9.0  # more, from one device to the next
TICKS = 8  # the most steps of the time axis
CLOSE = 0.4  # pixels: a box that adds less than this to its row is left out
THIN = 4.0  # pixels: narrower boxes have no edge

Rows = Mapping[Stream, float]  # the upper edge of each stream's boxes


@dataclass(frozen=True)
class _Axis:
    """A map from seconds to pixels."""

    left: float
    end: float

    def x(self, seconds: float) -> float:
        return self.left + (self.right - self.left) * (seconds / self.end if self.end else 0.0)

    @property
    def right(self) -> float:
        return WIDTH - MARGIN - IDLE


def gantt_svg(
    timeline: Timeline,
    *,
    title: str = "",
    measured: Timeline | None = None,
    phases: Mapping[str, str] | None = None,
) -> str:
    """Draw a timeline as SVG: a row per stream, copies hatched, waits as arrows.

    The critical path is outlined. The end of each row shows the share of the makespan in which it
    is idle. Pauses of the garbage collector are bands over all rows. With ``measured``, its rows
    are below those of ``timeline``, on the same time axis. ``phases`` has the phases of tasks by
    name: ``"backward"`` and ``"optimizer"`` have colours of their own.

    >>> timeline = Timeline((Span("run", "h", (Stream("cuda:0", "compute"),), 0.0, 0.002, 0),))
    >>> svg = gantt_svg(timeline, title="one task")
    >>> svg.startswith("<svg"), "makespan 2 ms" in svg
    (True, True)
    """
    charts = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    streams = sorted_streams(
        Timeline(tuple(span for chart in charts.values() for span in chart.spans))
    )
    names = _widest(stream.device for stream in streams), _widest(stream.name for stream in streams)
    axis = _Axis(MARGIN + sum(names), max(chart.makespan for chart in charts.values()))
    body = []
    y = MARGIN
    if title:
        y += 28
        text = escape(shorten(title, WIDTH - 2 * MARGIN, TITLE))
        body.append(
            f'<text class="ink title" x="{number(MARGIN)}" y="{number(y - 12)}">{text}</text>'
        )
    for name, chart in charts.items():
        body.append(_heading(name, chart, y))
        rows = _rows(streams, y + 24)
        bottom = max(rows.values(), default=y) + ROW
        body += [*_labels(rows, names[0], axis), *_idle(chart, rows), *_grid(axis, y + 20, bottom)]
        body += _boxes(chart, rows, axis, phases or {})
        body += [*_arrows(chart, rows, axis), *_pauses(chart, y + 20, bottom, axis)]
        y = bottom + 20
    runs = [span for chart in charts.values() for span in chart.spans if span.kind == "run"]
    pauses = any(chart.pauses for chart in charts.values())
    entries = _tasks({_phase(span, phases or {}) for span in runs}) + _ENTRIES + _PAUSE * pauses
    body += [*_scale(axis, bottom + 14), *legend(MARGIN, bottom + 44, entries)]
    return document(WIDTH, bottom + 44 + MARGIN, title or "schedule", body)


_ENTRIES = (
    ("box", "copy", "copy"),
    ("line", "line wait", "waits for"),
    ("box", "track critical", "critical path"),
    ("box", "track", "idle"),
)
_PAUSE = (("band", "pause", "garbage collection"),)


def _tasks(seen: set[str]) -> tuple[tuple[str, str, str], ...]:
    """Return the legend entries for tasks of these phases."""
    if not seen & {*PHASES}:
        return (("box", "task", "task"),)
    entries = (("", "task", "forward"), *((phase, f"task {phase}", phase) for phase in PHASES))
    return tuple(("box", cls, text) for phase, cls, text in entries if phase in seen)


def _phase(span: Span, phases: Mapping[str, str]) -> str:
    """Return the phase of a task if it has a colour of its own, else ""."""
    phase = phases.get(span.name, "") if span.kind == "run" else ""
    return phase if phase in PHASES else ""


def _heading(name: str, chart: Timeline, y: float) -> str:
    strong = f'<tspan class="ink strong">{name}: </tspan>' if name else ""
    return f'<text class="muted" x="{number(MARGIN)}" y="{number(y + 8)}">{strong}{summary(chart)}</text>'


def _widest(names: Iterator[str]) -> float:
    return min(max(map(text_width, names), default=0.0), 140.0) + 14


def _rows(streams: Sequence[Stream], y: float) -> Rows:
    rows = {}
    for i, stream in enumerate(streams):
        y += GROUP if i and stream.device != streams[i - 1].device else 0
        rows[stream] = y
        y += ROW
    return rows


def _labels(rows: Rows, indent: float, axis: _Axis) -> Iterator[str]:
    """Draw the name of each device once, and the name of each stream."""
    for device, streams in groupby(rows, key=lambda stream: stream.device):
        for i, stream in enumerate(streams):
            y = rows[stream]
            text_y = number(y + BOX / 2 + 4)
            if i == 0:
                text = escape(shorten(device, indent))
                yield f'<text class="ink strong" x="{number(MARGIN)}" y="{text_y}">{text}</text>'
            text = escape(shorten(stream.name, axis.left - MARGIN - indent))
            yield f'<text class="muted" x="{number(MARGIN + indent)}" y="{text_y}">{text}</text>'
            box = (
                f'x="{number(axis.left)}" y="{number(y)}" width="{number(axis.right - axis.left)}"'
            )
            yield f'<rect class="track" {box} height="{number(BOX)}" rx="2"/>'


def _idle(chart: Timeline, rows: Rows) -> Iterator[str]:
    """Draw the share of the makespan in which each stream is idle."""
    if rows:
        yield f'<text class="muted end" x="{number(WIDTH - MARGIN)}" y="{number(min(rows.values()) - 16)}">idle</text>'
    idle = idle_shares(chart)
    for stream, y in rows.items():
        text = f"{idle.get(stream, 1.0):.0%}"
        yield f'<text class="muted end" x="{number(WIDTH - MARGIN)}" y="{number(y + BOX / 2 + 4)}">{text}</text>'


def _pauses(chart: Timeline, top: float, bottom: float, axis: _Axis) -> Iterator[str]:
    """Draw a band over all rows for each pause of the garbage collector."""
    for start, end in chart.pauses:
        left, right = (axis.x(min(max(time, 0.0), axis.end)) for time in (start, end))
        box = f'x="{number(left)}" y="{number(top)}" width="{number(max(right - left, 1))}"'
        told = f"garbage collection\nstart {duration(start)}, takes {duration(end - start)}"
        yield f'<rect class="pause" {box} height="{number(bottom - top)}"><title>{told}</title></rect>'


def _grid(axis: _Axis, top: float, bottom: float) -> Iterator[str]:
    for time, _ in ticks(axis.end, TICKS):
        yield f'<path class="grid" d="M{number(axis.x(time))} {number(top)}V{number(bottom)}"/>'


def _scale(axis: _Axis, y: float) -> Iterator[str]:
    for time, text in ticks(axis.end, TICKS):
        yield f'<text class="muted middle" x="{number(axis.x(time))}" y="{number(y)}">{text}</text>'


def _boxes(chart: Timeline, rows: Rows, axis: _Axis, phases: Mapping[str, str]) -> Iterator[str]:
    """Draw each span in the rows of its streams, the critical path last and on top."""
    critical = {span.instruction for span in chart.critical_path()}
    drawn = dict.fromkeys(rows, -1.0)  # the right end of the filled part of each row
    outlined = []
    for span in chart.spans:
        left = axis.x(span.start)
        right = axis.x(span.end)
        look = f" {phase}" if (phase := _phase(span, phases)) else ""
        for stream in span.streams:
            if right - drawn[stream] < CLOSE:
                continue
            drawn[stream] = right
            if span.instruction in critical:
                outlined.append(_box(span, left, rows[stream], right - left, f"{look} critical"))
            else:
                yield _box(span, left, rows[stream], right - left, look)
    yield from outlined


def _box(span: Span, x: float, y: float, width: float, look: str) -> str:
    kind = "task" if span.kind == "run" else "copy"
    cls = kind + look + " thin" * (width < THIN)
    where = " and ".join(map(str, span.streams))
    facts = (
        f"{kind} {span.name}\n{where}\nstart {duration(span.start)}, takes {duration(span.seconds)}"
    )
    box = f'x="{number(x)}" y="{number(y)}" width="{number(max(width, CLOSE))}" height="{number(BOX)}"'
    drawn = f'<rect class="{cls}" {box} rx="{2 if width >= THIN else 0}"><title>{escape(facts)}</title></rect>'
    text = shorten(span.name, width - 4, LABEL)
    if not text:
        return drawn
    # An inner <svg> clips text that is wider than expected because of the font.
    label = f'<text class="on-{kind} middle label" x="50%" y="{number(BOX / 2 + 4)}">{escape(text)}</text>'
    return f"{drawn}<svg {box}>{label}</svg>"


def _arrows(chart: Timeline, rows: Rows, axis: _Axis) -> Iterator[str]:
    """Draw each wait from the end of one span to the start of another, by nearest rows."""
    yield f'<g opacity="{number(min(max(100 / max(len(chart.arrows), 1), 0.25), 0.7))}">'
    for a, b in chart.arrows:
        before = chart.spans[a]
        after = chart.spans[b]
        pairs = ((rows[s], rows[t]) for s in before.streams for t in after.streams)
        y1, y2 = min(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        x1 = axis.x(before.end)
        x2 = axis.x(after.start)
        down = (y2 > y1) - (y2 < y1)
        y1, y2 = (y + BOX / 2 + side * down * BOX / 2 for y, side in ((y1, 1), (y2, -1)))
        bend = max(abs(y2 - y1) / 2, 6) * down
        points = f"{number(x1)} {number(y1 + bend)} {number(x2)} {number(y2 - bend)} {number(x2)} {number(y2)}"
        yield f'<path class="line wait" d="M{number(x1)} {number(y1)}C{points}"/>'
    yield "</g>"
