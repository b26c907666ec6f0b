"""Draw the memory of devices over time as SVG.

Each device has a row with a scale of its own, so that a small one can be read beside a large one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autosched._lib.text import amount
from autosched.viz.figure import PAPER, axis_label, chart, finite, line, prefixed
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


def memory_svg(
    memory: Mapping[str, Steps], *, title: str = "", limits: Mapping[str, float] | None = None
) -> str:
    """Draw the bytes that devices hold over time: a row per device, with its peak marked.

    The data are those of ``memory_over_time``. ``limits`` are the bytes of memory of devices, drawn
    as a line where the peak is close. Raises ChartError for numbers that are not finite, and where
    matplotlib is not installed.

    >>> steps = {"cuda:0": [(0, 1e9), (0.002, 3e9), (0.003, 1e9)]}
    >>> "peak 3 GB, 75% of 4 GB" in memory_svg(steps, limits={"cuda:0": 4e9})
    True
    """
    rows = {
        name: _checked(memory[name], f"memory of {name!r}") for name in sorted(memory, key=natural)
    }
    end = max((time for steps in rows.values() for time, _ in steps), default=0.0)
    scale, seconds = prefixed([end], "s")

    def draw(figure: Figure) -> Mapping[str, Any]:
        legend: dict[str, Any] = {}
        plots = figure.subplots(max(len(rows), 1), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, steps) in zip(plots, rows.items(), strict=False):
            limit = (limits or {}).get(name, math.inf)
            peak = max((held for _, held in steps), default=0.0)
            axes.set_title(_heading(name, peak, limit), fontsize=9)
            if steps:
                legend.setdefault("memory", _draw_curve(axes, steps, scale, end))
            if peak <= limit <= NEAR * peak:
                drawn = axes.axhline(limit, color=SERIES[1][0], ls="-.", lw=1.2)
                legend.setdefault(LIMIT, drawn)
            axes.set_ylim(0, None if peak else 1)
            axes.locator_params(axis="y", nbins=3)
            axes.yaxis.set_major_formatter(lambda v, _: amount(v, "B"))
        plots[-1].set_xlabel(axis_label("time", seconds))
        plots[-1].set_xlim(0, end / scale or 1)
        return legend

    return chart(draw, max(len(rows), 1) * ROW + 50, title, "memory")


def _checked(steps: Steps, what: str) -> Steps:
    return [(finite(time, f"a time in {what}"), finite(held, what)) for time, held in steps]


def _heading(name: str, peak: float, limit: float) -> str:
    text = f"{shorten(name, 250)}: peak {amount(peak, 'B')}"
    if 0 < limit < math.inf:
        share = f"{peak / limit:.0%}" if peak >= limit / 100 else "under 1%"
        text += f", {share} of {amount(limit, 'B')}"
    return line(text)


def _draw_curve(axes: Axes, steps: Steps, scale: float, end: float) -> Any:
    """Draw a curve with its area and its peak."""
    tone = SERIES[0][0]
    shown = [*thinned(steps, MOST_STEPS), (end, steps[-1][1])]
    times = [time / scale for time, _ in shown]
    amounts = [held for _, held in shown]
    time, peak = max(steps, key=lambda step: step[1])
    axes.fill_between(times, amounts, step="post", color=tone, alpha=0.22, linewidth=0)
    if peak:
        axes.plot(time / scale, peak, "o", color=tone, mec=PAPER, clip_on=False, zorder=3)
    return axes.step(times, amounts, where="post", color=tone, lw=1.2)[0]
