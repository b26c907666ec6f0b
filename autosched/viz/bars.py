"""Draw named bars with values and error bars as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import NamedTuple

from autosched.errors import ChartError
from autosched.viz.axes import (
    MARGIN,
    WIDTH,
    Axis,
    axis_name,
    box,
    columns,
    facts,
    head,
    label,
    tone,
)
from autosched.viz.paint import document, number, shorten, text_width
from autosched.viz.scale import Scale, decimal

__all__ = ["Bar", "bars_svg"]

BOX = 20.0  # the height of a bar
ROW = 25.0  # from one bar to the next
GROUP = 10.0  # more, to one of another name
NAME = 220.0  # the width of names, at most
CAP = 3.5  # half the width of the ends of error bars
ZERO = Decimal(0)


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


class _Ends(NamedTuple):
    """A bar's value and the ends of its error bar, which has length 0 if there is none."""

    value: Decimal
    low: Decimal
    high: Decimal


def bars_svg(bars: Iterable[Bar], *, title: str = "", x: str = "", unit: str = "") -> str:
    """Draw bars from 0, one below the other, each with its value.

    ``x`` is the label of the values, ``unit`` their unit. Units get prefixes where these are usual
    (s, B, FLOP/s). Raises ChartError for numbers that are not finite, and for an error bar with one
    end.

    >>> svg = bars_svg([Bar("one GPU", 3.75), Bar("two GPUs", 2.43, low=2.41, high=2.46)], x="time", unit="s")
    >>> "3.75 s" in svg, "2.43 s" in svg
    (True, True)
    """
    bars = list(bars)
    values = [_ends(bar) for bar in bars]
    series = list(dict.fromkeys(bar.series for bar in bars))
    body, top = head(title, [(name, "box") for name in series])
    left = MARGIN + min(max((text_width(bar.name) for bar in bars), default=0.0), NAME) + 12
    axis = _axis(
        Scale.over([ZERO, *(value for ends in values for value in ends)], unit), values, left
    )
    tops = _tops(bars, top)
    bottom = max(tops, default=top) + ROW + 4
    body += columns(axis, top - 4, bottom)
    for bar, ends, y in zip(bars, values, tops, strict=True):
        body += _bar(bar, ends, series.index(bar.series), axis, y)
    body += [
        f'<path class="axis" d="M{number(axis.at(ZERO))} {number(top - 4)}V{number(bottom)}"/>'
    ]
    body += _names(bars, tops, left)
    bottom += 20
    if name := axis_name(x, axis.scale):
        bottom += 24
        body.append(label("muted middle", (left + WIDTH - MARGIN) / 2, bottom, name))
    return document(WIDTH, bottom + MARGIN, title or "chart", body)


def _ends(bar: Bar) -> _Ends:
    what = f"bar {bar.name!r}"
    value = decimal(bar.value, what)
    if bar.low is None and bar.high is None:
        return _Ends(value, value, value)
    if bar.low is None or bar.high is None:
        raise ChartError(f"{what} has an error bar with one end; give low= and high=, or neither")
    return _Ends(value, *(decimal(end, what) for end in (bar.low, bar.high)))


def _axis(scale: Scale, values: Sequence[_Ends], left: float) -> Axis:
    """Leave room for the values, which are written after the ends of bars, away from 0."""
    room = {True: 0.0, False: 0.0}
    for ends in values:
        room[ends.value < 0] = max(room[ends.value < 0], text_width(scale.short(ends.value)) + 10)
    return Axis(scale, left + room[True], WIDTH - MARGIN - room[False])


def _tops(bars: Sequence[Bar], y: float) -> list[float]:
    tops = []
    for i, bar in enumerate(bars):
        y += GROUP if i and bar.name != bars[i - 1].name else 0
        tops.append(y)
        y += ROW
    return tops


def _names(bars: Sequence[Bar], tops: Sequence[float], left: float) -> Iterator[str]:
    """Write each name once, beside the middle of its bars."""
    for name, group in groupby(range(len(bars)), key=lambda i: bars[i].name):
        first, *_, last = [tops[i] for i in group] * 2
        yield label("ink", MARGIN, (first + last + BOX) / 2 + 4, shorten(name, NAME))


def _bar(bar: Bar, ends: _Ends, i: int, axis: Axis, y: float) -> Iterator[str]:
    """Draw a bar, its error bar, and its value after both."""
    start, end = sorted([axis.at(ZERO), axis.at(ends.value)])
    low, high = sorted([axis.at(ends.low), axis.at(ends.high)])
    told = "\n".join(filter(None, (bar.name, bar.series, facts(axis.scale, *ends))))
    yield f'<g class="{tone(i)}">{box(i, start, y, end - start, BOX, told)}</g>'
    if low != high:
        yield _whisker(low, high, y + BOX / 2)
    text = axis.scale.short(ends.value)
    if ends.value < 0:
        yield label("ink end", min(start, low) - 8, y + BOX / 2 + 4, text)
    else:
        yield label("ink", max(end, high) + 8, y + BOX / 2 + 4, text)


def _whisker(low: float, high: float, y: float) -> str:
    caps = "".join(f"M{number(x)} {number(y - CAP)}v{number(2 * CAP)}" for x in (low, high))
    return f'<path class="error" d="M{number(low)} {number(y)}H{number(high)}{caps}"/>'
