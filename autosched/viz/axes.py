"""Draw the parts that charts share: axes, legend, markers and boxes.

Knows scales and pixels, and not the data. Series differ by colour, by the shape of markers, and by
dashes or hollow boxes, so they can be distinguished without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

from autosched.viz.paint import SERIES, TITLE, escape, number, shorten, text_width
from autosched.viz.scale import Scale

__all__ = [
    "MARGIN",
    "WIDTH",
    "Axis",
    "axis_name",
    "box",
    "columns",
    "facts",
    "head",
    "label",
    "marker",
    "rows",
    "tone",
]

WIDTH = 720.0
MARGIN = 20.0
GAP = 16.0  # between two numbers of a horizontal axis, at least
SHORT = 6  # characters of a number that has a tick although it is not round, at most
KEY = 28.0  # the width of a sample in the legend
LINE = 22.0  # the height of a line of the legend

_MARKERS = (  # around the origin: circle, square, triangle, diamond, triangle upside down
    "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
    "M-3.8-3.8h7.6v7.6h-7.6z",
    "M0-5.2 5 3.7h-10z",
    "M0-5.6 5.2 0 0 5.6-5.2 0z",
    "M0 5.2 5-3.7h-10z",
)

Symbol = Literal["solid", "dashed", "points", "box"]


class Axis(NamedTuple):
    """A map from numbers to pixels."""

    scale: Scale
    start: float
    end: float

    def at(self, value: Decimal) -> float:
        """Return the pixel of a number."""
        return self.start + (self.end - self.start) * self.scale.at(value)


# ---- text


def label(cls: str, x: float, y: float, text: str) -> str:
    """Write a text."""
    return f'<text class="{cls}" x="{number(x)}" y="{number(y)}">{escape(text)}</text>'


def axis_name(name: str, scale: Scale) -> str:
    """Return the label of an axis: its name and its unit."""
    unit = scale.unit_text
    text = f"{name} ({unit})" if name and unit else name or unit
    return shorten(text, WIDTH - 2 * MARGIN)


def facts(scale: Scale, value: Decimal, low: Decimal, high: Decimal) -> str:
    """Return a value and the ends of its error bar, if any, as text."""
    return scale.short(value) + (
        f" ({scale.short(low)} to {scale.short(high)})" if low != high else ""
    )


# ---- above the chart


def head(
    title: str, entries: Iterable[tuple[str, Symbol]], y_name: str = ""
) -> tuple[list[str], float]:
    """Draw title, legend and the vertical axis label; return them and the top of the chart."""
    drawn = []
    y = MARGIN
    if title:
        drawn.append(label("ink title", MARGIN, y + 14, shorten(title, WIDTH - 2 * MARGIN, TITLE)))
        y += 32
    keys, lines = _legend(entries, y)
    drawn += keys
    y += lines * LINE + 10 * (lines > 0)
    if y_name:
        drawn.append(label("muted", MARGIN, y + 10, y_name))
        y += 24
    return drawn, y + 4


def _legend(entries: Iterable[tuple[str, Symbol]], y: float) -> tuple[list[str], int]:
    """Draw a sample and the name of each named series.

    Return the drawing and the number of lines.
    """
    drawn: list[str] = []
    x = WIDTH
    lines = 0
    for i, (name, symbol) in enumerate(entries):
        if not name:
            continue
        text = shorten(name, WIDTH - 2 * MARGIN - KEY - 8)
        width = KEY + 8 + text_width(text)
        if x + width > WIDTH - MARGIN:
            x = MARGIN
            lines = lines + 1
        middle = y + (lines - 1) * LINE + 8
        drawn += [*_sample(i, symbol, x, middle), label("muted", x + KEY + 8, middle + 4, text)]
        x += width + 24
    return drawn, lines


def _sample(i: int, symbol: Symbol, x: float, y: float) -> Iterator[str]:
    yield f'<g class="{tone(i)}">'
    if symbol == "box":
        yield box(i, x, y - 6, KEY, 12)
    if symbol in ("solid", "dashed"):
        yield f'<path class="curve {symbol}" d="M{number(x)} {number(y)}h{number(KEY)}"/>'
    if symbol in ("solid", "points"):
        yield marker(i, x + KEY / 2, y)
    yield "</g>"


# ---- axes


def rows(axis: Axis, ticks: Mapping[Decimal, str], left: float) -> Iterator[str]:
    """Draw a horizontal line and a number for each tick of a vertical axis."""
    for tick, text in ticks.items():
        y = axis.at(tick)
        yield f'<path class="grid" d="M{number(left)} {number(y)}H{number(WIDTH - MARGIN)}"/>'
        yield label("muted end", left - 10, y + 4, text)


def columns(axis: Axis, top: float, bottom: float, own: Sequence[Decimal] = ()) -> Iterator[str]:
    """Draw a vertical line and a number for each tick of a horizontal axis.

    The ticks are at ``own`` numbers, if there is room.
    """
    for tick, text in _ticks(axis, own).items():
        x = axis.at(tick)
        yield f'<path class="grid" d="M{number(x)} {number(top)}V{number(bottom)}"/>'
        yield label("muted middle", x, bottom + 20, text)


def _ticks(axis: Axis, own: Sequence[Decimal]) -> Mapping[Decimal, str]:
    """Return as many ticks as there is room for."""
    mine = axis.scale.marked(own)
    if mine and all(len(text) <= SHORT for text in mine.values()) and _fit(axis, mine):
        return mine
    choices = (axis.scale.marked(axis.scale.ticks(most)) for most in (8, 6, 5, 4, 3, 2, 1))
    return next((ticks for ticks in choices if _fit(axis, ticks)), {})


def _fit(axis: Axis, ticks: Mapping[Decimal, str]) -> bool:
    """Whether these numbers neither overlap nor leave the picture."""
    right = -GAP
    for tick, text in ticks.items():
        half = text_width(text) / 2
        if axis.at(tick) - half < right + GAP:
            return False
        right = axis.at(tick) + half
    return right <= WIDTH


# ---- the marks of a series


def tone(i: int) -> str:
    """Return the class that applies the colour of a series."""
    return f"series{i % SERIES}"


def marker(i: int, x: float, y: float, told: str = "") -> str:
    """Draw a point; ``told`` is its tooltip."""
    shape = _MARKERS[i % len(_MARKERS)]
    return f'<path class="dot" transform="translate({number(x)} {number(y)})" d="{shape}">{_title(told)}</path>'


def box(i: int, x: float, y: float, width: float, height: float, told: str = "") -> str:
    """Draw a box, hollow for every other series."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect class="bar{" hollow" * (i % 2)}" {place} rx="2">{_title(told)}</rect>'


def _title(told: str) -> str:
    return f"<title>{escape(told)}</title>" if told else ""
