"""Draw the memory of devices over time as SVG.

Each device has a row with a scale of its own, so that a small one can be read beside a large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosched._lib.text import amount
from autosched.viz.figure import LINES, PAPER, axis_label, chart, finite, line, prefixed
from autosched.viz.format import Steps, natural, shorten, thinned
from autosched.viz.svg import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["memory_svg"]

ROW = 84.0  # the height of a device
NEAR = 3.0  # a limit is drawn if it is at most this multiple of the peak
MOST_STEPS = 2000  # of a curve
LIMIT = "memory that the device has"


@dataclass(frozen=True)
class _Row:
    """A title, one or two curves (predicted and measured), and a limit."""

    title: str
    curves: Sequence[Steps]
    limit: float


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
        heading = line(f"{shorten(name, 250)}: {', '.join(notes)}")
        rows.append(_Row(heading, curves, limit if is_near else math.inf))
    return _chart(rows, title)


def _checked(steps: Steps, what: str) -> Steps:
    return [(finite(time, f"a time in {what}"), finite(held, what)) for time, held in steps]


def _peak(steps: Steps) -> float:
    return max((held for _, held in steps), default=0.0)


# ---- drawing


def _chart(rows: Sequence[_Row], title: str) -> str:
    """Draw rows one below the other, on one time axis."""
    end = max((time for row in rows for steps in row.curves for time, _ in steps), default=0.0)
    scale, seconds = prefixed([end], "s")
    both = any(len(row.curves) > 1 for row in rows)
    labels = ["memory, predicted", "memory, measured"] if both else ["memory"]

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
            axes.locator_params(axis="y", nbins=3)
            axes.yaxis.set_major_formatter(lambda v, _: amount(v, "B"))
        plots[-1].set_xlabel(axis_label("time", seconds))
        plots[-1].set_xlim(0, end / scale or 1)
        return legend

    return chart(draw, max(len(rows), 1) * ROW + 50, title, "memory")


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
