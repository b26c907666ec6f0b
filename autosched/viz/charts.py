"""Draw lines and bars with error bars, as SVG.

Series differ by colour, by markers, and by dashes or hollow bars, so that they can be distinguished
without colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

from autosched.errors import ChartError, shown
from autosched.viz.figure import INK, LINES, MUTED, PAPER, axis_label, chart, finite, line, prefixed
from autosched.viz.format import shorten
from autosched.viz.svg import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Bar", "Line", "bars_svg", "lines_svg"]

Style = Literal["solid", "dashed", "points"]
STYLES: Sequence[Style] = ("solid", "dashed", "points")
TRUNCATED = "The vertical axis does not start at 0."
MOST_TICKS = 8  # at the points of a line chart; else at round numbers
ROW = 25.0  # from one bar to the next
GROUP = 0.4  # more to the next group, in rows
_MARKERS = "os^Dv"

_Point = tuple[float, ...]  # (x, y, low, high)


@dataclass(frozen=True)
class Line:
    """A named series of points ``(x, y)``, or ``(x, y, low, high)`` with an error bar.

    ``style``: ``"solid"``, a line with markers; ``"dashed"``, a line without; ``"points"``, markers
    alone.
    """

    name: str
    points: Sequence[tuple[float, ...]]
    style: Style = "solid"


@dataclass(frozen=True)
class Bar:
    """A named value, with the two ends of an error bar if they are given.

    Consecutive bars of the same name are grouped, and distinguished by ``series``.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    series: str = ""


# ---- lines


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

    Units get prefixes where these are usual (s, B, FLOP/s). The y axis starts at 0 unless that
    would hide differences; then the chart says so. Lines that coincide with earlier ones are dashed
    so that both are visible, and the legend names lines that are equal. Raises ChartError for
    numbers that are not finite, for other styles, for an x of 0 or less where ``log_x``, and where
    matplotlib is not installed.

    >>> measured = Line("measured", [(1, 0.02, 0.019, 0.022), (2, 0.013, 0.012, 0.015)], "points")
    >>> predicted = Line("predicted", [(1, 0.02), (2, 0.012)], "dashed")
    >>> "time (ms)" in lines_svg([measured, predicted], y="time", y_unit="s")
    True
    """
    lines = list(series)
    points = [_points(line, log_x) for line in lines]
    every = [point for mine in points for point in mine]
    x_scale, x_unit = prefixed((point[0] for point in every), x_unit)
    y_scale, y_unit = prefixed((value for point in every for value in point[1:]), y_unit)
    points = [[(p[0] / x_scale, *(v / y_scale for v in p[1:])) for p in mine] for mine in points]

    def draw(figure: Figure) -> Mapping[str, Any]:
        axes = figure.add_subplot()
        axes.ticklabel_format(useOffset=False)
        legend: dict[str, Any] = {}
        drawn: set[Any] = set()
        labels = _labels(lines, points)
        for i, (one, label, mine) in enumerate(zip(lines, labels, points, strict=True)):
            segments = set(pairwise(_visible(mine))) if one.style != "points" else set()
            is_overlapping = one.style == "solid" and segments & drawn
            drawn |= segments
            artist = _draw_line(axes, mine, i, "overlapping" if is_overlapping else one.style)
            legend.setdefault(label, artist)
        _set_x_axis(axes, sorted({point[0] for mine in points for point in mine}), log_x)
        _set_y_axis(axes, [value for mine in points for point in mine for value in point[1:]])
        axes.set_xlabel(axis_label(x, x_unit))
        axes.set_ylabel(axis_label(y, y_unit))
        return legend

    return chart(draw, 350, title, "chart")


def _points(line: Line, log_x: bool) -> list[_Point]:
    what = f"a point of line {line.name!r}"
    if line.style not in STYLES:
        styles = f"{', '.join(map(repr, STYLES))}, got {shown(line.style)}"
        raise ChartError(f"the style of line {line.name!r} must be one of {styles}")
    made = []
    for point in line.points:
        if len(point) not in (2, 4):
            raise ChartError(f"{what} must be (x, y) or (x, y, low, high), got {shown(point)}")
        x, y, *ends = [finite(item, what) for item in point]
        if log_x and x <= 0:
            got = shown(point[0])
            raise ChartError(f"x of {what} must be more than 0 on a logarithmic axis, got {got}")
        made.append((x, y, *(ends or (y, y))))
    return made


def _visible(points: Iterable[_Point]) -> tuple[tuple[float, str], ...]:
    """Return (x, y) of points, with as many digits of y as can be seen."""
    return tuple((point[0], f"{point[1]:.3g}") for point in points)


def _labels(lines: Iterable[Line], points: Iterable[Sequence[_Point]]) -> Iterable[str]:
    """Return the label of each line, which names the first line with the same points."""
    first: dict[object, str] = {}
    for one, mine in zip(lines, points, strict=True):
        equal = first.setdefault(_visible(mine), one.name)
        is_named = one.name and equal and mine and equal != one.name
        yield f"{one.name} (as {equal})" if is_named else one.name


def _draw_line(axes: Axes, points: Sequence[_Point], i: int, style: str) -> Any:
    tone = SERIES[i % len(SERIES)][0]
    marker = _MARKERS[i % len(_MARKERS)] if style != "dashed" or len(points) == 1 else ""
    xs = [point[0] for point in points]
    ys = [point[1] for point in points]
    if errors := [point for point in points if point[2] != point[3]]:
        middles = [(low + high) / 2 for *_, low, high in errors]
        lengths = [abs(high - low) / 2 for *_, low, high in errors]
        at = [point[0] for point in errors]
        axes.errorbar(at, middles, yerr=lengths, fmt="none", ecolor=tone, elinewidth=1.1)
    dashes = LINES.get(style, "none")
    return axes.plot(xs, ys, color=tone, marker=marker, mec=PAPER, linestyle=dashes)[0]


def _set_x_axis(axes: Axes, xs: Sequence[float], log: bool) -> None:
    """Put ticks at the points if these are few and not too close to each other."""
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    gaps = [b - a for a, b in pairwise([math.log(x) for x in xs] if log else xs)]
    if 0 < len(xs) <= MOST_TICKS and min(gaps, default=1.0) >= 0.07 * sum(gaps):
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.minorticks_off()


def _set_y_axis(axes: Axes, values: Sequence[float]) -> None:
    """Start at 0, unless values would fill less than half of the axis; mark the axis then."""
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if low < high and (0 < high < 2 * low or 2 * high < low < 0):
        axes.text(0.0, 1.02, TRUNCATED, transform=axes.transAxes, color=MUTED)
        mark: Any = {"marker": [(-1.0, -0.5), (1.0, 0.5)], "mec": INK, "ls": "none"}
        axes.plot([0, 0], [0, 0.02], transform=axes.transAxes, clip_on=False, **mark)
    elif low >= 0:
        axes.set_ylim(bottom=0)
    elif high <= 0:
        axes.set_ylim(top=0)


# ---- bars


def bars_svg(bars: Iterable[Bar], *, title: str = "", x: str = "", unit: str = "") -> str:
    """Draw bars from 0, one below the other, each with its value.

    ``x`` is the label of the values, ``unit`` their unit. Units get prefixes where these are usual
    (s, B, FLOP/s). Raises ChartError for numbers that are not finite, for an error bar with one
    end, and where matplotlib is not installed.

    >>> bars = [Bar("one GPU", 3.75), Bar("two GPUs", 2.43, low=2.41, high=2.46)]
    >>> svg = bars_svg(bars, title="a step", x="time", unit="s")
    >>> "3.75 s" in svg, "2.43 s" in svg
    (True, True)
    """
    bars = list(bars)
    values = [_ends(bar) for bar in bars]
    series = list(dict.fromkeys(bar.series for bar in bars))
    scale, unit = prefixed((value for ends in values for value in ends), unit)
    runs = [(name, len(list(same))) for name, same in groupby(bar.name for bar in bars)]
    groups = [group for group, (_, count) in enumerate(runs) for _ in range(count)]
    places = [i + GROUP * group for i, group in enumerate(groups)]
    middles = [[places[i] for i, mine in enumerate(groups) if mine == g] for g in range(len(runs))]

    def draw(figure: Figure) -> Mapping[str, Any]:
        axes = figure.add_subplot()
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=MUTED, linewidth=0.8)
        legend: dict[str, Any] = {}
        for place, bar, ends in zip(places, bars, values, strict=True):
            i = series.index(bar.series)
            artist = _draw_bar(axes, place, [value / scale for value in ends], unit, i)
            legend.setdefault(bar.series, artist)
        names = [line(shorten(name, 220)) for name, _ in runs]
        axes.set_yticks([sum(mine) / len(mine) for mine in middles], names)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(max(places, default=0) + 0.7, -0.7)
        axes.margins(x=0.12)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.set_xlabel(axis_label(x, unit))
        return legend

    return chart(draw, max(places, default=0) * ROW + 100, title, "chart")


def _ends(bar: Bar) -> list[float]:
    """Return the value of a bar and the two ends of its error bar, if it has one."""
    what = f"bar {bar.name!r}"
    ends = [end for end in (bar.low, bar.high) if end is not None]
    if len(ends) == 1:
        raise ChartError(f"{what} has an error bar with one end; give low= and high=, or neither")
    return [finite(value, what) for value in (bar.value, *ends)]


def _draw_bar(axes: Axes, place: float, ends: Sequence[float], unit: str, i: int) -> Any:
    """Draw a bar, hollow for every other series, its error bar, and its value after both."""
    value, *error = ends
    tone = SERIES[i % len(SERIES)][0]
    look: Any = {"facecolor": PAPER if i % 2 else tone, "edgecolor": tone, "linewidth": 1.2}
    artist = axes.barh(place, value, height=0.8, **look)
    if error:
        middle = sum(error) / 2
        length = abs(error[1] - error[0]) / 2
        axes.errorbar(middle, place, xerr=length, fmt="none", ecolor=INK, elinewidth=1.1)
    sign = -1 if value < 0 else 1
    end = max(ends, key=lambda number: sign * number), place
    look = {"textcoords": "offset points", "va": "center", "ha": "right" if sign < 0 else "left"}
    axes.annotate(f"{value:.3g} {unit}".strip(), end, (sign * 5, 0), **look)
    return artist
