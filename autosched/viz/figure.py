"""Make SVG charts with matplotlib, in the style of all drawings.

Texts stay text, and dark colours apply where the reader prefers them.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from autosched._lib.allowed import is_number
from autosched.errors import ChartError, shown
from autosched.viz.format import legal, shorten, text_width
from autosched.viz.svg import SERIES, TITLE, color, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["INK", "LINES", "MUTED", "PAPER", "axis_label", "chart", "finite", "line", "prefixed"]

WIDTH = 720.0  # in pixels
INK, MUTED, PAPER, GRID = (color(name) for name in ("ink", "muted", "paper", "grid"))
LINES: dict[str, Any] = {"solid": "-", "dashed": (0, (2.7, 2.3)), "overlapping": (0, (5, 5))}
_RC = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "legend.labelcolor"), MUTED),
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "axes.axisbelow": True},
    **{"axes.titlelocation": "left", "font.size": 9.0, "text.color": INK},
    **{"errorbar.capsize": 2.6, "lines.linewidth": 1.65, "legend.handlelength": 2.8},
    **{"figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.1},
    **{"svg.fonttype": "none", "svg.hashsalt": "autosched", "text.parse_math": False},
}


def chart(draw: Callable[[Figure], Mapping[str, Any]], height: float, title: str, name: str) -> str:
    """Return a chart as SVG, with a title above and a legend below.

    ``draw`` draws into a figure and returns the legend: artists by label. ``height`` is without
    title and legend; ``name`` is for screen readers where there is no title.
    """
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
        legend = {label: artist for label, artist in draw(figure).items() if label}
        # Matplotlib leaves out labels that begin with an underscore.
        labels = [" " * label.startswith("_") + line(label) for label in legend]
        columns = int((WIDTH - 30) / (max(map(text_width, labels), default=0.0) + 56))
        columns = max(1, min(columns, len(labels)))
        if labels:
            place: Any = {"loc": "outside lower left", "ncols": columns}
            figure.legend(list(legend.values()), labels, **place)
        if title:
            short = line(shorten(title, WIDTH - 60, TITLE))
            figure.suptitle(short, x=0.015, ha="left", size=0.75 * TITLE, weight="bold")
        height += 22 * math.ceil(len(labels) / columns) + 30 * bool(title)
        figure.set_size_inches(WIDTH / 96, height / 96)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(made, format="svg", metadata=metadata)
    opening = f'<svg class="autosched-chart" role="img" aria-label="{escape(title or name)}" '
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


def line(text: str) -> str:
    """Return text on one line, without characters that XML forbids."""
    return legal(" ".join(text.split()))


def axis_label(name: str, unit: str) -> str:
    """Return the label of an axis: its name and its unit."""
    return line(shorten(f"{name} ({unit})" if name and unit else name or unit, WIDTH - 80))


# ---- numbers


_SMALL = range(-9, 1)  # powers of ten that units of time and of amounts have prefixes for
_LARGE = range(16)
_UNITS = {"s": _SMALL, "B": _LARGE, "B/s": _LARGE, "FLOP": _LARGE, "FLOP/s": _LARGE}
_PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}


def finite(item: Any, what: str) -> float:
    """Return a number as a float. Raises ChartError if it is not finite."""
    if not (is_number(item) or (isinstance(item, Real) and is_number(-item))):
        raise ChartError(f"{what} must be a finite number, got {shown(item)}")
    return float(item)


def prefixed(values: Iterable[float], unit: str) -> tuple[float, str]:
    """Return the number by which to divide values, and the unit with the prefix for that.

    >>> prefixed([0.0, 0.0042], "s"), prefixed([5e6], "images")
    ((0.001, 'ms'), (1.0, 'images'))
    """
    largest = max(map(abs, values), default=0.0)
    powers = _UNITS.get(unit)
    if powers is None or not largest:
        return 1.0, unit
    power = min(max(math.floor(math.log10(largest) / 3) * 3, powers[0]), powers[-1])
    return float(f"1e{power}"), _PREFIXES[power] + unit
