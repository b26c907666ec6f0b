"""Draw numbers as SVG with matplotlib: lines, histories and bars.

Texts stay text, and dark colours apply where the reader prefers them. The functions are for the
package's own reports; a user's numbers are best drawn by matplotlib itself.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from autosched._lib.text import amount, duration
from autosched.errors import ChartError
from autosched.viz.svg import SERIES, TITLE, color, escape, legal, shorten, text_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

WIDTH = 720.0  # in pixels
BAR = 25.0  # from one bar to the next
MOST_TICKS = 8  # at the points of a line; else at round numbers
TRUNCATED = "The vertical axis does not start at 0."
_MARKERS = "os^Dv"
INK, MUTED, PAPER, GRID = (color(name) for name in ("ink", "muted", "paper", "grid"))
_RC = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "legend.labelcolor"), MUTED),
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.fonttype": "none",
    "svg.hashsalt": "autosched",
}


def lines(
    series: Mapping[str, Points], *, title: str, x: str, y: str, unit: str = "", log_x: bool = False
) -> str:
    """Draw named series of points on common axes; ``unit`` is that of y.

    Every second line is dashed, so that one below remains visible. The y axis starts at 0 unless that
    would hide differences; then the chart says so. Raises ChartError without matplotlib.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=_line(x), ylabel=_line(y))
        axes.yaxis.set_major_formatter(lambda value, _: _amount(value, unit))
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for i, (name, points) in enumerate(series.items()):
            tone = SERIES[i % len(SERIES)][0]
            look: Any = {"color": tone, "mec": PAPER, "marker": _MARKERS[i % len(_MARKERS)]}
            look |= {"lw": max(2.6 - 0.4 * i, 1.2), "ls": (0, (3, 3)) if i % 2 else "-"}
            axes.plot(*zip(*points, strict=True), label=_label(name), **look)
        xs = sorted({point[0] for points in series.values() for point in points})
        if len(xs) <= MOST_TICKS:
            axes.set_xticks(xs, [f"{value:g}" for value in xs])
            axes.minorticks_off()
        ys = [point[1] for points in series.values() for point in points]
        if min(ys) < max(ys) < 2 * min(ys):
            axes.text(0.0, 1.02, TRUNCATED, transform=axes.transAxes, color=MUTED)
        else:
            axes.set_ylim(bottom=min(0.0, *ys))

    return _chart(draw, 350, title)


def histories(
    steps: Mapping[str, Points],
    limits: Mapping[str, float],
    marks: Mapping[str, Points],
    *,
    title: str,
    unit: str,
) -> str:
    """Draw values over seconds that change in steps, with their limits, and named points on them.

    Raises ChartError without matplotlib.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel="seconds")
        axes.xaxis.set_major_formatter(lambda value, _: duration(value))
        axes.yaxis.set_major_formatter(lambda value, _: _amount(value, unit))
        for i, (name, points) in enumerate(steps.items()):
            tone = SERIES[i % len(SERIES)][0]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=tone, drawstyle="steps-post", label=_label(name))
            if name in limits:
                limit = f"limit of {_line(name)}"
                axes.axhline(limits[name], color=tone, ls=(0, (3, 3)), lw=0.9, label=limit)
        for (name, points), marker in zip(marks.items(), _MARKERS, strict=False):
            look: Any = {"color": INK, "mfc": PAPER, "ls": "", "marker": marker}
            axes.plot(*zip(*points, strict=True), label=_label(name), **look)
        axes.set_ylim(bottom=0)

    return _chart(draw, 350, title)


def bars(values: Iterable[tuple[str, str, float]], *, title: str, x: str, unit: str = "") -> str:
    """Draw bars (name, series, value) from 0, one below the other, each with its value.

    Consecutive bars of one name are a group; every other series is hollow. Raises ChartError
    without matplotlib.
    """
    groups = [(name, list(mine)) for name, mine in groupby(values, key=lambda bar: bar[0])]
    series = list(dict.fromkeys(bar[1] for _, mine in groups for bar in mine))
    height = sum(0.4 + len(mine) for _, mine in groups)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(xlabel=_line(x))
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=MUTED, linewidth=0.8)
        middles = []
        place = 0.0
        for _, mine in groups:
            middles.append(place + (len(mine) - 1) / 2)
            for _, name, value in mine:
                i = series.index(name)
                tone = SERIES[i % len(SERIES)][0]
                look: Any = {"facecolor": PAPER if i % 2 else tone, "edgecolor": tone}
                drawn = axes.barh(place, value, height=0.8, label=_label(name), **look)
                axes.bar_label(drawn, [_amount(value, unit)], padding=5)
                place += 1
            place += 0.4
        axes.set_yticks(middles, [_line(shorten(name, 220)) for name, _ in groups])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(max(place - 0.7, 0.7), -0.7)
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: _amount(value, unit))

    return _chart(draw, height * BAR + 75, title)


# ---- all charts


def _chart(draw: Callable[[Figure], None], height: float, title: str) -> str:
    """Return a chart as SVG, with a title above and a legend of what has a label below."""
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError:
        raise ChartError('charts need matplotlib: pip install "autosched[viz]"') from None
    made = io.StringIO()
    # Matplotlib's defaults, not the user's; no date, so that equal data give equal bytes.
    with matplotlib.style.context(["default", _RC]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(layout="constrained")
        draw(figure)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))  # bars of a series have one entry
        columns = int((WIDTH - 30) / (max(map(text_width, named), default=0.0) + 56))
        columns = max(1, min(columns, len(named)))
        if named:
            figure.legend(named.values(), named, loc="outside lower left", ncols=columns)
        short = _line(shorten(title, WIDTH - 60, TITLE))
        figure.suptitle(short, x=0.015, ha="left", size=0.75 * TITLE, weight="bold")
        height += 22 * math.ceil(len(named) / columns) + 30
        figure.set_size_inches(WIDTH / 96, height / 96)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(made, format="svg", metadata=metadata)
    opening = f'<svg class="autosched-chart" role="img" aria-label="{escape(title)}" '
    svg = made.getvalue().partition("<svg ")[2]
    return opening + svg.replace(">", f">\n{_dark_style()}", 1)


def _dark_style() -> str:
    """Return a style sheet that replaces the light colours where readers prefer dark ones."""
    pairs = [(color(name), color(name, dark=True)) for name in ("paper", "ink", "muted", "grid")]
    rules = (
        f'.autosched-chart [style*="{key}: {light}"]{{{key}:{dark}!important}}'
        for light, dark in [*pairs, *SERIES]
        for key in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"


def _label(name: str) -> str:
    """Return a name in the legend, where matplotlib leaves out those that begin with "_"."""
    return " " * name.startswith("_") + _line(name)


def _line(text: str) -> str:
    """Return text on one line, without characters that XML forbids."""
    return legal(" ".join(text.split()))


def _amount(value: float, unit: str) -> str:
    """Return a value with its unit, with a prefix where that is usual."""
    if unit == "s":
        return duration(value)
    return amount(value, unit) if unit.startswith("B") else f"{value:.4g}{unit}"
