"""Draw memory of devices and use of links over time as SVG.

Each device or link has a row with a scale of its own, so that a small one can be read beside a
large one. Knows times and amounts, no program and no graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autosched.program.program import Stream
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.axes import label, marker
from autosched.viz.paint import TITLE, document, legend, natural, number, shorten, text_width, ticks
from autosched.viz.scale import Scale, decimal

__all__ = ["Course", "links_svg", "memory_svg"]

WIDTH = 1000.0
MARGIN = 20.0
ROW = 62.0  # the height of what is drawn of a device or a link
PITCH = 84.0  # from one to the next
NAME = 170.0  # the width of names, at most
TICKS = 8
SHORTEST = 1e-12  # seconds of a copy that has a rate
NEAR = 3.0  # a limit is drawn if it is at most this multiple of the peak

Course = Sequence[
    tuple[float, float]
]  # (seconds, amount): from then on it is so much; in the order of time


@dataclass(frozen=True)
class _Row:
    """A name, one or two courses (predicted and measured), notes, and a limit."""

    name: str
    courses: Sequence[Course]
    notes: Sequence[str]
    limit: float = math.inf

    @property
    def peak(self) -> float:
        return max((amount for course in self.courses for _, amount in course), default=0.0)

    @property
    def top(self) -> float:
        return self.limit if self.peak <= self.limit <= NEAR * self.peak else self.peak or 1.0


def memory_svg(
    courses: Mapping[str, Course],
    *,
    title: str = "",
    limits: Mapping[str, float] | None = None,
    measured: Mapping[str, Course] | None = None,
) -> str:
    """Draw the bytes that devices hold over time: a row per device, with its peak marked.

    The data are those of ``memory_over_time``. ``limits`` are the bytes of memory of devices, drawn
    as a line where the peak is close. With ``measured``, measured data are dashed lines in the same
    rows. Raises ChartError for numbers that are not finite.

    >>> svg = memory_svg({"cuda:0": [(0, 1e9), (0.002, 3e9), (0.003, 1e9)]}, limits={"cuda:0": 4e9})
    >>> "peak 3 GB" in svg, "75% of 4 GB" in svg
    (True, True)
    """
    both = [courses, *([measured] if measured is not None else [])]
    rows = []
    for name in sorted(dict.fromkeys(name for mine in both for name in mine), key=natural):
        mine = [_checked(given.get(name, ()), f"memory of {name!r}") for given in both]
        limit = (limits or {}).get(name, math.inf)
        peaks = [_Row(name, [course], ()).peak for course in mine]
        notes = [
            f"peak {_amount(peaks[0], 'B')}",
            *(f"measured {_amount(peak, 'B')}" for peak in peaks[1:]),
        ]
        if 0 < limit < math.inf:
            share = f"{max(peaks) / limit:.0%}" if max(peaks) >= limit / 100 else "under 1%"
            notes.append(f"{share} of {_amount(limit, 'B')}")
        rows.append(_Row(name, mine, notes, limit))
    return _chart(rows, title, "memory", "memory that the device has")


def links_svg(timeline: Timeline, *, title: str = "", measured: Timeline | None = None) -> str:
    """Draw the rate of copies over time: a row per link, in bytes per second.

    Where bytes are unknown, rows show whether a link is in use. A link is a pair of devices where
    copies occupy streams of both, else the stream of one; with more than one link, the first row is
    their total. With ``measured``, measured data are dashed lines in the same rows.

    >>> copy = Span("copy", "x", (Stream("cpu", "copy-out"), Stream("cuda:0", "copy-in")), 0.0, 0.5, 0, 6e9)
    >>> svg = links_svg(Timeline((copy,)))
    >>> "cpu → cuda:0" in svg, "at most 12 GB/s" in svg, "busy 100%" in svg
    (True, True, True)
    """
    both = [timeline, *([measured] if measured is not None else [])]
    links = [_by_link(mine) for mine in both]
    known = any(span.nbytes for mine in links for spans in mine.values() for span in spans)
    rows = []
    for name in sorted(
        dict.fromkeys(name for mine in links for name in mine), key=lambda n: (n != ALL, natural(n))
    ):
        spans = [mine.get(name, []) for mine in links]
        courses = [_rates(found, known) for found in spans]
        shares = [
            f"{_busy(found) / mine.makespan:.0%}"
            for found, mine in zip(spans, both, strict=True)
            if mine.makespan
        ]
        notes = [f"busy {', measured '.join(shares)}"] * bool(shares)
        peak = _Row(name, courses, ()).peak
        if known:
            moved = sum(span.nbytes for span in spans[0])
            notes += [f"{_amount(moved, 'B')}, at most {_amount(peak, 'B/s')}"]
        rows.append(_Row(name, courses, notes))
    return _chart(rows, title, "bytes per second" if known else "in use", "")


ALL = "all links"


def _by_link(timeline: Timeline) -> dict[str, list[Span]]:
    copies = [span for span in timeline.spans if span.kind == "copy"]
    links: dict[str, list[Span]] = {}
    for span in copies:
        links.setdefault(_link(span.streams), []).append(span)
    return {ALL: copies, **links} if len(links) > 1 else links


def _link(streams: Sequence[Stream]) -> str:
    return " → ".join(stream.device for stream in streams) if len(streams) > 1 else str(streams[0])


def _rates(spans: Iterable[Span], known: bool) -> Course:
    """Return the total bytes per second of spans; or their number, where bytes are unknown."""
    changes: list[tuple[float, int, float]] = [(0.0, 0, 0.0)]
    for i, span in enumerate(spans):
        if span.seconds > SHORTEST:
            rate = span.nbytes / span.seconds if known else 1.0
            changes += [(span.start, i, rate), (span.end, i, -rate)]
    course = []
    going = dict[int, float]()
    for time, together in groupby(
        sorted(changes, key=lambda change: change[0]), key=lambda change: change[0]
    ):
        for _, i, rate in together:
            if rate > 0:
                going[i] = rate
            elif rate < 0:
                del going[i]
        course.append((time, math.fsum(going.values())))
    return course


def _busy(spans: Iterable[Span]) -> float:
    """Return for how long at least one span was in progress."""
    total = 0.0
    end = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    return total


def _checked(course: Course, what: str) -> Course:
    return [
        (float(decimal(time, f"a time in {what}")), float(decimal(amount, what)))
        for time, amount in course
    ]


def _amount(value: float, unit: str) -> str:
    """Format an amount with a suitable unit."""
    exact = decimal(value, "an amount")
    return Scale.over([exact, decimal(0, "zero")], unit).short(exact)


# ---- drawing


def _chart(rows: Sequence[_Row], title: str, what: str, limit: str) -> str:
    """Draw rows one below the other, on one time axis."""
    end = max((time for row in rows for course in row.courses for time, _ in course), default=0.0)
    names = [text for row in rows for text in (row.name, *row.notes)]
    left = MARGIN + min(max(map(text_width, names), default=0.0), NAME) + 14
    body = []
    y = MARGIN
    if title:
        body.append(label("ink title", MARGIN, y + 16, shorten(title, WIDTH - 2 * MARGIN, TITLE)))
        y += 36
    bottom = y + max(len(rows), 1) * PITCH - (PITCH - ROW)

    def x(time: float) -> float:
        return left + (WIDTH - MARGIN - left) * (time / end if end else 0.0)

    for time, text in ticks(end, TICKS):
        body.append(f'<path class="grid" d="M{number(x(time))} {number(y)}V{number(bottom)}"/>')
        body.append(label("muted middle", x(time), bottom + 18, text))
    for i, row in enumerate(rows):
        top = y + i * PITCH
        body += [*_names(row, top), *_courses(row, [x(0.0), x(end)], top, end)]
    body += legend(MARGIN, bottom + 48, _entries(rows, what, limit))
    return document(WIDTH, bottom + 48 + MARGIN, title or what, body)


def _names(row: _Row, y: float) -> Iterator[str]:
    yield label("ink strong", MARGIN, y + 14, shorten(row.name, NAME))
    for i, note in enumerate(row.notes):
        yield label("muted", MARGIN, y + 32 + 17 * i, note)


def _courses(row: _Row, ends: Sequence[float], y: float, end: float) -> Iterator[str]:
    """Draw a row: the first course with its area, the others dashed, the peak as a point."""
    left, right = ends

    def place(time: float, amount: float) -> tuple[float, float]:
        return left + (right - left) * (time / end if end else 0.0), y + ROW * (
            1 - amount / row.top
        )

    box = (
        f'x="{number(left)}" y="{number(y)}" width="{number(right - left)}" height="{number(ROW)}"'
    )
    yield f'<rect class="track" {box}/>'
    if row.top == row.limit:
        yield f'<path class="limit" d="M{number(left)} {number(y)}H{number(right)}"/>'
    for i, course in enumerate(row.courses):
        steps = _steps([place(*point) for point in course], right)
        if not steps:
            continue
        yield f'<g class="series{i}">'
        if i == 0:
            yield f'<path class="area" d="{steps}V{number(y + ROW)}H{number(left)}z"/>'
        yield f'<path class="curve course{" dashed" * (i > 0)}" d="{steps}"/>'
        yield "</g>"
    if row.peak and row.courses[0]:
        time, amount = max(row.courses[0], key=lambda point: point[1])
        yield f'<g class="series0">{marker(0, *place(time, amount), f"{row.name}: {row.notes[0]}")}</g>'


def _steps(points: Sequence[tuple[float, float]], right: float) -> str:
    """Return a step line, reduced to the maximum and minimum in each half pixel."""
    if not points:
        return ""
    path = [f"M{number(points[0][0])} {number(points[0][1])}"]
    last = points[0][1]
    for _, group in groupby(points, key=lambda point: round(2 * point[0])):
        here = list(group)
        heights = [height for _, height in here]
        marks = (
            dict.fromkeys((min(heights), max(heights), heights[-1])) if len(here) > 2 else heights
        )
        path.append(f"H{number(here[0][0])}")
        path += [f"V{number(height)}" for height in marks]
        last = heights[-1]
    if len(points) > 2 and path[-1] != f"V{number(last)}":
        path.append(f"V{number(last)}")
    return "".join([*path, f"H{number(right)}"])


def _entries(rows: Sequence[_Row], what: str, limit: str) -> Iterator[tuple[str, str, str]]:
    two = any(len(row.courses) > 1 for row in rows)
    yield ("line", "curve course series0", f"{what}, predicted" if two else what)
    if two:
        yield ("line", "curve course dashed series1", f"{what}, measured")
    if limit and any(row.top == row.limit for row in rows):
        yield ("line", "limit", limit)
