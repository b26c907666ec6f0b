"""Draw curves with error bars on common axes as SVG.

Used to draw measured beside predicted numbers. Knows numbers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Literal, NamedTuple

from autosched.errors import ChartError, shown
from autosched.viz.axes import (
    MARGIN,
    WIDTH,
    Axis,
    axis_name,
    columns,
    facts,
    head,
    label,
    marker,
    rows,
    tone,
)
from autosched.viz.paint import document, number, text_width
from autosched.viz.scale import Scale, decimal

__all__ = ["Line", "lines_svg"]

PLOT = 300.0  # the height of the area that lines are drawn in
INSET = 16.0  # between its sides and the first and last points
STEPS = 6  # of the vertical axis, about
CAP = 3.5  # half the width of the ends of error bars

CUT = ", axis cut: it does not begin at 0"

_Place = tuple[int, int]
_Stretch = tuple[_Place, _Place]
Style = Literal["solid", "dashed", "points"]
STYLES: Sequence[Style] = ("solid", "dashed", "points")


@dataclass(frozen=True)
class Line:
    """A named series of points ``(x, y)``, or ``(x, y, low, high)`` with an error bar.

    ``style``: ``"solid"``, a line with markers; ``"dashed"``, a line without; ``"points"``, markers
    alone.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    style: Style = "solid"


class _Point(NamedTuple):
    x: Decimal
    y: Decimal
    low: Decimal
    high: Decimal


def lines_svg(
    series: Iterable[Line],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    x_unit: str = "",
    y_unit: str = "",
    log_x: bool = False,
) -> str:
    """Draw series on common axes, named ``x`` and ``y``.

    Units get prefixes where these are usual (s, B, FLOP/s). The y axis begins at 0 unless that
    would hide differences; then the axis is marked as broken. Lines that coincide with earlier ones
    are dashed so that both are visible, and the legend names lines that are equal. Raises
    ChartError for numbers that are not finite, for other styles, and for an x of 0 or less where
    ``log_x``.

    >>> measured = Line("measured", [(1, 0.02, 0.019, 0.022), (2, 0.013, 0.012, 0.015)], "points")
    >>> svg = lines_svg([measured, Line("predicted", [(1, 0.02), (2, 0.012)], "dashed")], y="time", y_unit="s")
    >>> "time (ms)" in svg
    True
    """
    lines = list(series)
    points = [_points(line, log_x) for line in lines]
    every = [point for mine in points for point in mine]
    heights = Scale.over(
        _from_zero([value for point in every for value in point[1:]]), y_unit
    ).rounded(STEPS)
    named = [
        (_with_twin(line.name, twin), line.style)
        for line, twin in zip(lines, _twins(lines, points), strict=True)
    ]
    cut = not heights.low <= 0 <= heights.high
    body, top = head(title, named, f"{axis_name(y, heights)}{CUT * cut}".strip(", "))
    bottom = top + PLOT
    ticks = heights.marked(heights.ticks(STEPS))
    left = MARGIN + max(map(text_width, ticks.values())) + 10
    across = Axis(
        Scale.over([point.x for point in every], x_unit, log_x),
        left + INSET,
        WIDTH - MARGIN - INSET,
    )
    up = Axis(heights, bottom, top)
    body += [
        *columns(across, bottom, bottom + 5, sorted({point.x for point in every})),
        *rows(up, ticks, left),
    ]
    body.append(
        f'<path class="axis" d="M{number(left)} {number(bottom)}H{number(WIDTH - MARGIN)}"/>'
    )
    if cut:
        body.append(_break(left, bottom))
    drawn = set[_Stretch]()
    for i, (line, mine) in enumerate(zip(lines, points, strict=True)):
        places = _places(mine, across, up)
        stretches = set(pairwise(places)) if line.style != "points" else set()
        body += _curve(line, mine, i, across, up, not stretches.isdisjoint(drawn))
        drawn |= stretches
    bottom += 25
    if name := axis_name(x, across.scale):
        bottom += 24
        body.append(label("muted middle", (left + WIDTH - MARGIN) / 2, bottom, name))
    return document(WIDTH, bottom + MARGIN, title or "chart", body)


def _points(line: Line, log_x: bool) -> list[_Point]:
    """Return the points of a line as decimals, each with an error bar, perhaps of length 0."""
    what = f"a point of line {line.name!r}"
    if line.style not in STYLES:
        known = ", ".join(map(repr, STYLES))
        raise ChartError(
            f"the style of line {line.name!r} must be one of {known}, got {shown(line.style)}"
        )
    made = []
    for point in line.points:
        if len(point) not in (2, 4):
            raise ChartError(f"{what} must be (x, y) or (x, y, low, high), got {shown(point)}")
        x, y, *ends = [decimal(item, what) for item in point]
        if log_x and x <= 0:
            raise ChartError(
                f"x of {what} must be more than 0 on a logarithmic axis, got {shown(point[0])}"
            )
        made.append(_Point(x, y, *(ends or (y, y))))
    return made


def _from_zero(values: Sequence[Decimal]) -> Sequence[Decimal]:
    """Add 0, unless values would fill less than half of the axis then."""
    low = min(values, default=Decimal(0))
    high = max(values, default=Decimal(0))
    apart = low < high and (0 < high < 2 * low or 2 * high < low < 0)
    return values if apart else [*values, Decimal(0)]


def _places(points: Sequence[_Point], across: Axis, up: Axis) -> list[_Place]:
    """Return the positions of points, rounded to a pixel."""
    return [(round(across.at(point.x)), round(up.at(point.y))) for point in points]


def _twins(lines: Sequence[Line], points: Sequence[Sequence[_Point]]) -> list[str]:
    """Return for each line the first one before it with the same points, or ""."""
    first: dict[tuple[tuple[Decimal, str], ...], str] = {}
    keys = [tuple((point.x, f"{point.y:.3g}") for point in mine) for mine in points]
    return [
        "" if (name := first.setdefault(key, line.name)) == line.name or not key else name
        for line, key in zip(lines, keys, strict=True)
    ]


def _with_twin(name: str, twin: str) -> str:
    return f"{name} (as {twin})" if name and twin else name


def _break(x: float, y: float) -> str:
    """Draw the sign of an axis that does not begin at 0."""
    steps = "".join(f"l{dx:g} {dy:g}" for dx, dy in ((5, -3), (-10, -5), (10, -5), (-5, -3)))
    return f'<path class="error" d="M{number(x)} {number(y)}{steps}"/>'


def _curve(
    line: Line, points: Sequence[_Point], i: int, across: Axis, up: Axis, is_above: bool
) -> Iterator[str]:
    """Draw a line, its error bars and its markers; with gaps if it ``is_above`` another one."""
    places = [(across.at(point.x), up.at(point.y)) for point in points]
    yield f'<g class="{tone(i)}">'
    if line.style != "points" and len(points) > 1:
        course = "L".join(f"{number(x)} {number(y)}" for x, y in places)
        gaps = " apart" if is_above and line.style == "solid" else ""
        yield f'<path class="curve {line.style}{gaps}" d="M{course}"/>'
    for point, (x, _) in zip(points, places, strict=True):
        if point.low != point.high:
            yield _whisker(x, up.at(point.low), up.at(point.high))
    if line.style != "dashed" or len(points) == 1:
        for point, (x, y) in zip(points, places, strict=True):
            yield marker(
                i,
                x,
                y,
                f"{line.name}\n{across.scale.short(point.x)}: {facts(up.scale, *point[1:])}",
            )
    yield "</g>"


def _whisker(x: float, low: float, high: float) -> str:
    caps = "".join(f"M{number(x - CAP)} {number(y)}h{number(2 * CAP)}" for y in (low, high))
    return f'<path class="whisker" d="M{number(x)} {number(low)}V{number(high)}{caps}"/>'
