"""Draw memory of devices and use of links over time as SVG.

Each device or link has a row with a scale of its own, so that a small one can be read beside a
large one. Knows times and amounts, no program and no graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from autosched._lib.text import amount
from autosched.timeline.timeline import Span, Timeline
from autosched.viz.figure import LINES, PAPER, axis_label, chart, finite, line, prefixed
from autosched.viz.format import Steps, natural, shorten, thinned
from autosched.viz.svg import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["links_svg", "memory_svg"]

ROW = 84.0  # the height of a device or link
NEAR = 3.0  # a limit is drawn if it is at most this multiple of the peak
MOST_STEPS = 2000  # of a curve
SHORTEST = 1e-12  # seconds of a copy that has a rate
ALL_LINKS = "all links"
LIMIT = "memory that the device has"


@dataclass(frozen=True)
class _Row:
    """A title, one or two curves (predicted and measured), and a limit."""

    title: str
    curves: Sequence[Steps]
    limit: float = math.inf


def memory_svg(
    memory: Mapping[str, Steps],
    *,
    title: str = "",
    limits: Mapping[str, float] | None = None,
    measured: Mapping[str, Steps] | None = None,
) -> str:
    """Draw the bytes that devices hold over time: a row per device, with its peak marked.

    The data are those of ``memory_over_time``. ``limits`` are the bytes of memory of devices, drawn
    as a line where the peak is close. With ``measured``, measured data are dashed lines in the same
    rows. Raises ChartError for numbers that are not finite, and where matplotlib is not installed.

    >>> steps = {"cuda:0": [(0, 1e9), (0.002, 3e9), (0.003, 1e9)]}
    >>> "peak 3 GB, 75% of 4 GB" in memory_svg(steps, limits={"cuda:0": 4e9})
    True
    """
    both = [memory, *([measured] if measured is not None else [])]
    rows = []
    for name in sorted({name for mine in both for name in mine}, key=natural):
        curves = [_checked(mine.get(name, ()), f"memory of {name!r}") for mine in both]
        limit = (limits or {}).get(name, math.inf)
        peaks = list(map(_peak, curves))
        notes = [f"peak {amount(peaks[0], 'B')}"]
        notes += [f"measured {amount(peak, 'B')}" for peak in peaks[1:]]
        if 0 < limit < math.inf:
            share = f"{max(peaks) / limit:.0%}" if max(peaks) >= limit / 100 else "under 1%"
            notes.append(f"{share} of {amount(limit, 'B')}")
        is_near = max(peaks) <= limit <= NEAR * max(peaks)
        rows.append(_Row(_title(name, notes), curves, limit if is_near else math.inf))
    return _chart(rows, title, "memory", "B")


def links_svg(timeline: Timeline, *, title: str = "", measured: Timeline | None = None) -> str:
    """Draw the rate of copies over time: a row per link, in bytes per second.

    Where bytes are unknown, rows show how many copies are in progress. A link is a pair of devices
    where copies occupy streams of both, else the stream of one; with more than one link, the first
    row is their total. With ``measured``, measured data are dashed lines in the same rows. Raises
    ChartError where matplotlib is not installed.

    >>> from autosched.program.program import Stream
    >>> streams = (Stream("cpu", "copy-out"), Stream("cuda:0", "copy-in"))
    >>> svg = links_svg(Timeline((Span("copy", "x", streams, 0.0, 0.5, 0, 6e9),)))
    >>> "cpu → cuda:0" in svg, "busy 100%, 6 GB, at most 12 GB/s" in svg
    (True, True)
    """
    both = [timeline, *([measured] if measured is not None else [])]
    links = [_by_link(mine) for mine in both]
    is_known = any(span.nbytes for mine in links for spans in mine.values() for span in spans)
    names = {name for mine in links for name in mine}
    rows = []
    for name in sorted(names, key=lambda name: (name != ALL_LINKS, natural(name))):
        spans = [mine.get(name, []) for mine in links]
        pairs = zip(spans, both, strict=True)
        shares = [f"{_busy(mine) / whole.makespan:.0%}" for mine, whole in pairs if whole.makespan]
        curves = [_rates(mine, is_known) for mine in spans]
        notes = [f"busy {', measured '.join(shares)}"] * bool(shares)
        if is_known:
            notes.append(amount(sum(span.nbytes for span in spans[0]), "B"))
            notes.append(f"at most {amount(_peak(curves[0]), 'B/s')}")
        rows.append(_Row(_title(name, notes), curves))
    what = "bytes per second" if is_known else "copies in progress"
    return _chart(rows, title, what, "B/s" if is_known else "")


def _title(name: str, notes: Sequence[str]) -> str:
    return line(f"{shorten(name, 250)}: {', '.join(notes)}")


def _by_link(timeline: Timeline) -> dict[str, list[Span]]:
    copies = [span for span in timeline.spans if span.kind == "copy"]
    links: dict[str, list[Span]] = {}
    for span in copies:
        one = len(span.streams) == 1
        name = str(span.streams[0]) if one else " → ".join(s.device for s in span.streams)
        links.setdefault(name, []).append(span)
    return {ALL_LINKS: copies, **links} if len(links) > 1 else links


def _rates(spans: Iterable[Span], is_known: bool) -> Steps:
    """Return the total bytes per second of spans; or their number, where bytes are unknown."""
    changes: list[tuple[float, int, float]] = [(0.0, 0, 0.0)]
    for i, span in enumerate(spans):
        if span.seconds > SHORTEST:
            rate = span.nbytes / span.seconds if is_known else 1.0
            changes += [(span.start, i, rate), (span.end, i, -rate)]
    changes.sort(key=lambda change: change[0])
    steps = []
    active: dict[int, float] = {}
    for time, together in groupby(changes, key=lambda change: change[0]):
        for _, i, rate in together:
            if rate > 0:
                active[i] = rate
            else:
                active.pop(i, None)
        steps.append((time, math.fsum(active.values())))
    return steps


def _busy(spans: Iterable[Span]) -> float:
    """Return for how long at least one span was in progress."""
    total = 0.0
    end = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.end - max(span.start, end), 0.0)
        end = max(end, span.end)
    return total


def _checked(steps: Steps, what: str) -> Steps:
    return [(finite(time, f"a time in {what}"), finite(held, what)) for time, held in steps]


def _peak(steps: Steps) -> float:
    return max((held for _, held in steps), default=0.0)


# ---- drawing


def _chart(rows: Sequence[_Row], title: str, what: str, unit: str) -> str:
    """Draw rows one below the other, on one time axis."""
    end = max((time for row in rows for steps in row.curves for time, _ in steps), default=0.0)
    scale, seconds = prefixed([end], "s")
    both = any(len(row.curves) > 1 for row in rows)
    labels = [f"{what}, predicted", f"{what}, measured"] if both else [what]

    def draw(figure: Figure) -> Mapping[str, Any]:
        legend: dict[str, Any] = {}
        plots = figure.subplots(max(len(rows), 1), 1, sharex=True, squeeze=False)[:, 0]
        for axes, row in zip(plots, rows, strict=False):
            axes.set_title(row.title, fontsize=9)
            for i, steps in enumerate(row.curves):
                if steps:
                    legend.setdefault(labels[i], _draw_curve(axes, steps, i, scale, end))
            if row.limit < math.inf:
                limit = axes.axhline(row.limit, color=SERIES[1][0], ls="-.", lw=1.2)
                legend.setdefault(LIMIT, limit)
            axes.set_ylim(0, None if max(map(_peak, row.curves)) else 1)
            axes.locator_params(axis="y", nbins=3, integer=not unit)
            axes.yaxis.set_major_formatter(lambda v, _: amount(v, unit) if unit else f"{v:g}")
        plots[-1].set_xlabel(axis_label("time", seconds))
        plots[-1].set_xlim(0, end / scale or 1)
        return legend

    return chart(draw, max(len(rows), 1) * ROW + 50, title, what)


def _draw_curve(axes: Axes, steps: Steps, i: int, scale: float, end: float) -> Any:
    """Draw a curve: the first with its area and its peak, the second dashed."""
    tone = SERIES[i][0]
    shown = [*thinned(steps, MOST_STEPS), (end, steps[-1][1])]
    times = [time / scale for time, _ in shown]
    amounts = [held for _, held in shown]
    if i == 0:
        time, peak = max(steps, key=lambda step: step[1])
        axes.fill_between(times, amounts, step="post", color=tone, alpha=0.22, linewidth=0)
        if peak:
            axes.plot(time / scale, peak, "o", color=tone, mec=PAPER, clip_on=False, zorder=3)
    dashes = LINES["dashed" if i else "solid"]
    return axes.step(times, amounts, where="post", color=tone, ls=dashes, lw=1.2)[0]
