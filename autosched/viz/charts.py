"""Draw numbers as SVG with matplotlib: lines, bars, memory of devices and use of links over time.

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
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.format import Steps, legal, natural, shorten, text_width, thinned
from autosched.viz.svg import SERIES, TITLE, color, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
Artists = Mapping[str, Any]  # a legend: artists by label

WIDTH = 720.0  # in pixels
ROW = 84.0  # the height of a device or link over time
BAR = 25.0  # from one bar to the next
NEAR = 3.0  # a limit is drawn if it is at most this multiple of the peak
MOST_STEPS = 2000  # of a curve
MOST_TICKS = 8  # at the points of a line; else at round numbers
SHORTEST = 1e-12  # seconds of a copy that has a rate
ALL_LINKS = "all links"
LIMIT = "memory that the device has"
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

    def draw(figure: Figure) -> Artists:
        axes = figure.add_subplot(xlabel=_line(x), ylabel=_line(y))
        axes.yaxis.set_major_formatter(lambda value, _: _amount(value, unit))
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        artists = {}
        for i, (name, points) in enumerate(series.items()):
            tone = SERIES[i % len(SERIES)][0]
            look: Any = {"color": tone, "mec": PAPER, "marker": _MARKERS[i % len(_MARKERS)]}
            look |= {"lw": max(2.6 - 0.4 * i, 1.2), "ls": (0, (3, 3)) if i % 2 else "-"}
            artists[name] = axes.plot(*zip(*points, strict=True), **look)[0]
        xs = sorted({point[0] for points in series.values() for point in points})
        if len(xs) <= MOST_TICKS:
            axes.set_xticks(xs, [f"{value:g}" for value in xs])
            axes.minorticks_off()
        ys = [point[1] for points in series.values() for point in points]
        if min(ys) < max(ys) < 2 * min(ys):
            axes.text(0.0, 1.02, TRUNCATED, transform=axes.transAxes, color=MUTED)
        else:
            axes.set_ylim(bottom=min(0.0, *ys))
        return artists

    return _chart(draw, 350, title)


def bars(values: Iterable[tuple[str, str, float]], *, title: str, x: str, unit: str = "") -> str:
    """Draw bars (name, series, value) from 0, one below the other, each with its value.

    Consecutive bars of one name are a group; every other series is hollow. Raises ChartError
    without matplotlib.
    """
    groups = [(name, list(mine)) for name, mine in groupby(values, key=lambda bar: bar[0])]
    series = list(dict.fromkeys(bar[1] for _, mine in groups for bar in mine))
    height = sum(0.4 + len(mine) for _, mine in groups)

    def draw(figure: Figure) -> Artists:
        axes = figure.add_subplot(xlabel=_line(x))
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=MUTED, linewidth=0.8)
        artists: dict[str, Any] = {}
        middles = []
        place = 0.0
        for _, mine in groups:
            middles.append(place + (len(mine) - 1) / 2)
            for _, name, value in mine:
                i = series.index(name)
                tone = SERIES[i % len(SERIES)][0]
                look: Any = {"facecolor": PAPER if i % 2 else tone, "edgecolor": tone}
                drawn = axes.barh(place, value, height=0.8, **look)
                axes.bar_label(drawn, [_amount(value, unit)], padding=5)
                artists.setdefault(name, drawn)
                place += 1
            place += 0.4
        axes.set_yticks(middles, [_line(shorten(name, 220)) for name, _ in groups])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(max(place - 0.7, 0.7), -0.7)
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter(lambda value, _: _amount(value, unit))
        return artists

    return _chart(draw, height * BAR + 75, title)


# ---- over time


def memory(courses: Mapping[str, Steps], *, title: str, limits: Mapping[str, float]) -> str:
    """Draw the bytes that devices hold over time: a row per device, with its peak marked.

    The data are those of ``memory_over_time``. ``limits`` are the bytes of memory of devices, drawn
    as a line where the peak is close. Raises ChartError without matplotlib.
    """
    rows = []
    for name in sorted(courses, key=natural):
        peak = max((held for _, held in courses[name]), default=0.0)
        limit = limits.get(name, math.inf)
        note = f"peak {amount(peak, 'B')}"
        if 0 < limit < math.inf:
            share = f"{peak / limit:.0%}" if peak >= limit / 100 else "under 1%"
            note += f", {share} of {amount(limit, 'B')}"
        is_near = peak <= limit <= NEAR * peak
        rows.append((f"{shorten(name, 250)}: {note}", courses[name], limit if is_near else None))
    return _over_time(rows, title, "memory", "B")


def links(timeline: Timeline, *, title: str) -> str:
    """Draw the rate of copies over time: a row per link, in bytes per second.

    Where bytes are unknown, rows show how many copies are in progress. A link is a pair of devices
    where copies occupy streams of both, else the stream of one; with more than one link, the first
    row is their total. Raises ChartError without matplotlib.
    """
    copies = [span for span in timeline.spans if span.kind == "copy"]
    is_known = any(span.nbytes for span in copies)
    by_link: dict[str, list[Span]] = {}
    for span in copies:
        one = len(span.streams) == 1
        name = str(span.streams[0]) if one else " → ".join(s.device for s in span.streams)
        by_link.setdefault(name, []).append(span)
    names = sorted(by_link, key=natural)
    found = {ALL_LINKS: copies} if len(names) > 1 else {}
    rows = []
    for name, spans in (found | {name: by_link[name] for name in names}).items():
        rates, busy = _rates(spans, is_known)
        note = f"busy {busy / (timeline.makespan or 1.0):.0%}"
        if is_known:
            most = amount(max(rate for _, rate in rates), "B/s")
            note += f", {amount(sum(span.nbytes for span in spans), 'B')}, at most {most}"
        rows.append((f"{shorten(name, 250)}: {note}", rates, None))
    what = "bytes per second" if is_known else "copies in progress"
    return _over_time(rows, title, what, "B/s" if is_known else "")


def _rates(spans: Iterable[Span], is_known: bool) -> tuple[Steps, float]:
    """Return the total bytes per second of spans, or their number, and for how long there are any.

    Their number counts where bytes are unknown.
    """
    ends: list[tuple[float, int, float]] = [(0.0, -1, -1.0)]  # begins with nothing
    for i, span in enumerate(spans):
        if span.seconds > SHORTEST:
            rate = span.nbytes / span.seconds if is_known else 1.0
            ends += [(span.start, i, rate), (span.end, i, -1.0)]
    steps: list[tuple[float, float]] = []
    active: dict[int, float] = {}
    busy = 0.0
    for time, together in groupby(sorted(ends), key=lambda end: end[0]):
        busy += time - steps[-1][0] if active else 0.0
        for _, i, rate in together:
            if rate >= 0:
                active[i] = rate
            else:
                active.pop(i, None)
        steps.append((time, math.fsum(active.values())))
    return steps, busy


def _over_time(
    rows: Sequence[tuple[str, Steps, float | None]], title: str, what: str, unit: str
) -> str:
    """Draw rows (title, curve, limit) one below the other, on one time axis."""
    end = max((time for _, steps, _ in rows for time, _ in steps), default=0.0) or 1.0
    tone = SERIES[0][0]

    def draw(figure: Figure) -> Artists:
        artists: dict[str, Any] = {}
        plots = figure.subplots(max(len(rows), 1), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, steps, limit) in zip(plots, rows, strict=False):
            axes.set_title(_line(name), fontsize=9)
            if steps:
                shown = [*thinned(steps, MOST_STEPS), (end, steps[-1][1])]
                curve = list(zip(*shown, strict=True))
                axes.fill_between(*curve, step="post", color=tone, alpha=0.22, linewidth=0)
                artists[what] = axes.step(*curve, where="post", color=tone, lw=1.2)[0]
                top = max(steps, key=lambda step: step[1])
                axes.plot(*top, "o", color=tone, mec=PAPER, clip_on=False, zorder=3)
            if limit is not None:
                artists[LIMIT] = axes.axhline(limit, color=SERIES[1][0], ls="-.", lw=1.2)
            axes.set_ylim(0, None if any(held for _, held in steps) else 1)
            axes.locator_params(axis="y", nbins=3, integer=not unit)
            axes.yaxis.set_major_formatter(lambda value, _: _amount(value, unit))
        plots[-1].set_xlim(0, end)
        plots[-1].xaxis.set_major_formatter(lambda value, _: _amount(value, "s"))
        return artists

    return _chart(draw, max(len(rows), 1) * ROW + 50, title)


# ---- all charts


def _chart(draw: Callable[[Figure], Artists], height: float, title: str) -> str:
    """Return a chart as SVG, with a title above and the legend that ``draw`` returns below."""
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
        artists = {name: artist for name, artist in draw(figure).items() if name}
        # Matplotlib leaves out labels that begin with an underscore.
        labels = [" " * name.startswith("_") + _line(name) for name in artists]
        columns = int((WIDTH - 30) / (max(map(text_width, labels), default=0.0) + 56))
        columns = max(1, min(columns, len(labels)))
        if labels:
            place: Any = {"loc": "outside lower left", "ncols": columns}
            figure.legend(list(artists.values()), labels, **place)
        short = _line(shorten(title, WIDTH - 60, TITLE))
        figure.suptitle(short, x=0.015, ha="left", size=0.75 * TITLE, weight="bold")
        height += 22 * math.ceil(len(labels) / columns) + 30
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


def _line(text: str) -> str:
    """Return text on one line, without characters that XML forbids."""
    return legal(" ".join(text.split()))


def _amount(value: float, unit: str) -> str:
    """Return a value with its unit, with a prefix where that is usual."""
    if unit == "s":
        return duration(value)
    return amount(value, unit) if unit.startswith("B") else f"{value:.4g}{unit}"
