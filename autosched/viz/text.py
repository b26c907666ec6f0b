"""The schedule as a Gantt chart for a terminal: a line per stream, tasks solid, copies shaded."""

from __future__ import annotations

from collections.abc import Iterable

from autosched.program import Stream
from autosched.timeline import Span, Timeline
from autosched.viz.paint import columns, sorted_streams, summary, ticks

__all__ = ["gantt_text"]

LEAST = 16  # columns of the chart itself, however narrow the terminal
TICK = 10  # columns of one step of the time axis, at least
BLOCKS = {"run": ("█", "▌"), "copy": ("░", "▏")}  # what fills a box, and its right edge


def gantt_text(timeline: Timeline, width: int = 80) -> str:
    """Draw a timeline as text of ``width`` columns: a box begins with its name, where that fits, and ends in an edge.

    >>> print(gantt_text(Timeline((Span("run", "mm", (Stream("cpu", "compute"),), 0.0, 0.002, 0),)), width=34))
    cpu  compute  mm█████████████████▌
                  │0        │1 ms
    makespan 2 ms
    """
    streams = sorted_streams(timeline)
    heads = _heads(streams)
    indent = max(map(columns, heads), default=0)
    cells = max(width - indent, LEAST)
    spans: dict[Stream, list[Span]] = {stream: [] for stream in streams}
    for span in timeline.spans:
        for stream in span.streams:
            spans[stream].append(span)
    end = timeline.makespan
    lines = [head + _row(mine, end, cells) for head, mine in zip(heads, spans.values(), strict=True)]
    axis = " " * indent + _axis(end, cells)
    return "\n".join([*(line.rstrip() for line in (*lines, axis)), summary(timeline)])


def _heads(streams: Iterable[Stream]) -> list[str]:
    """Return what stands before each row: the device, once, and the stream."""
    names = [(_plain(stream.device), _plain(stream.name)) for stream in streams]
    widths = [max(map(columns, column)) for column in zip(*names, strict=True)]
    heads, last = [], None
    for device, name in names:
        head = [text + " " * (w - columns(text)) for text, w in zip((device, name), widths, strict=True)]
        heads.append(f"{' ' * widths[0] if device == last else head[0]}  {head[1]}  ")
        last = device
    return heads


def _row(spans: Iterable[Span], end: float, cells: int) -> str:
    """Draw the boxes of one stream, each at least one column wide, but those whose columns are full already."""
    row, filled = "", 0
    for span in spans:
        left = _column(span.start, end, cells)
        right = min(max(_column(span.end, end, cells), left + 1), cells)
        left = max(left, filled)
        if left < right:
            row += " " * (left - filled) + _box(span, right - left)
            filled = right
    return row


def _box(span: Span, width: int) -> str:
    fill, edge = BLOCKS[span.kind]
    name = _plain(span.name)
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


def _plain(name: str) -> str:
    """Return a name that takes the columns it seems to take: without line breaks and control characters."""
    return "".join(c if c.isprintable() else "?" for c in name)
