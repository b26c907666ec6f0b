"""Draw a timeline as a Gantt chart for a terminal.

Each stream is a line; tasks are solid, copies are shaded, and idle time is printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.format import columns, idle_shares, sorted_streams, summary, ticks

__all__ = ["gantt_text"]

LEAST = 16  # columns of the chart itself, however narrow the terminal
TICK = 10  # columns of one step of the time axis, at least
IDLE = 6  # columns at the right, for the share of time in which a stream is idle
COLOURS = {"run": "34", "copy": "33"}  # blue and yellow, as terminals number them
BLOCKS = {"run": ("█", "▌"), "copy": ("░", "▏")}  # the fill of a box, and its right edge
ODD = {"run": ("▓", "▌"), "copy": ("▒", "▏")}  # the same of every second run


def gantt_text(timeline: Timeline, width: int = 80, *, colour: bool = False) -> str:
    """Draw a timeline as text of ``width`` columns.

    A box begins with its name, where that fits, and ends in an edge. The last column is the share
    of the makespan in which a stream is idle. With ``colour`` the text is for a colour terminal:
    tasks are blue, copies yellow, and the critical path is bold. Every second run is shaded, and
    the last period is marked under the axis.

    >>> span = Span("run", "mm", (Stream("cpu", "compute"),), 0.0, 0.002, 0)
    >>> print(gantt_text(Timeline((span,)), width=40))
    cpu  compute  mm█████████████████▌    0%
                  │0        │1 ms       idle
    makespan 2 ms
    """
    streams = sorted_streams(timeline)
    names = _row_names(streams)
    indent = max(map(columns, names), default=0)
    cells = max(width - indent - IDLE, LEAST)
    spans: dict[Stream, list[Span]] = {stream: [] for stream in streams}
    for span in timeline.spans:
        for stream in span.streams:
            spans[stream].append(span)
    end = timeline.makespan
    idle = idle_shares(timeline)
    path = timeline.critical_path() if colour else ()
    bold = {(span.run, span.instruction) for span in path} if colour else None
    lines = []
    host = ""
    for name, (stream, mine) in zip(names, spans.items(), strict=True):
        if (found := timeline.hosts.get(stream.device, "")) != host:
            host = found
            lines.append(_printable(host))
        lines.append(name + _row(mine, end, cells, bold) + f"{idle[stream]:>{IDLE}.0%}")
    axis = " " * indent + _axis(end, cells).ljust(cells)
    lines.append(axis + f"{'idle':>{IDLE}}" * bool(streams))
    if timeline.run_count > 1:
        lines.append(" " * indent + _period(timeline, cells))
    return "\n".join([*(line.rstrip() for line in lines), summary(timeline)])


def _row_names(streams: Iterable[Stream]) -> list[str]:
    """Return the labels of rows: the device, once, and the stream."""
    names = [(_printable(stream.device), _printable(stream.name)) for stream in streams]
    widths = [max(map(columns, column)) for column in zip(*names, strict=True)]
    labels = []
    last = None
    for device, name in names:
        shown = "" if device == last else device
        pairs = zip((shown, name), widths, strict=True)
        labels.append("".join(text + " " * (width + 2 - columns(text)) for text, width in pairs))
        last = device
    return labels


def _period(timeline: Timeline, cells: int) -> str:
    """Return the legend of runs, and a line under the last period, if there is room."""
    legend = f"runs: {BLOCKS['run'][0]} {ODD['run'][0]} in turn"
    if timeline.period is None:
        return legend
    left = _column(max(timeline.makespan - timeline.period, 0.0), timeline.makespan, cells)
    mark = f"└{'period':─^{max(cells - left - 2, 0)}}┘"
    return legend.ljust(left) + mark if len(legend) < left and cells - left >= 8 else legend


def _row(
    spans: Iterable[Span], end: float, cells: int, bold: Collection[tuple[int, int]] | None
) -> str:
    """Draw the boxes of one stream, each at least one column wide, unless its columns are full.

    In colour, unless ``bold`` is None; otherwise it has the bold ones.
    """
    row = ""
    filled = 0
    for span in spans:
        left = _column(span.start, end, cells)
        right = min(max(_column(span.end, end, cells), left + 1), cells)
        left = max(left, filled)
        if left < right:
            box = _box(span, right - left)
            if bold is not None:
                box = f"\x1b[{'1;' * ((span.run, span.instruction) in bold)}{COLOURS[span.kind]}m{box}\x1b[0m"
            row += " " * (left - filled) + box
            filled = right
    return row + " " * (cells - filled)


def _box(span: Span, width: int) -> str:
    fill, edge = (ODD if span.run % 2 else BLOCKS)[span.kind]
    name = _printable(span.name)
    if columns(name) >= width:
        name = ""
    return name + fill * (width - 1 - columns(name)) + edge


def _axis(end: float, cells: int) -> str:
    line = ""
    for time, text in ticks(end, cells // TICK):
        at = _column(time, end, cells)
        if at + 1 + len(text) <= cells:
            line += " " * (at - len(line)) + "│" + text
    return line


def _column(time: float, end: float, cells: int) -> int:
    return round(time / end * cells) if end else 0


def _printable(name: str) -> str:
    """Return a name without line breaks and control characters, so that its width is known."""
    return "".join(c if c.isprintable() else "?" for c in name)
