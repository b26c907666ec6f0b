"""Convert SVG drawings to PNG or PDF with matplotlib.

SVG is the only format that drawings are written in. PNG and PDF are made by reading the SVG, so
they cannot differ from it, and every new drawing has them. Matplotlib is imported when it is
needed. Knows shapes, no schedules.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any, Literal

from autosched.errors import ChartError, shown
from autosched.viz.shapes import Shape, Words, shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["picture"]

POINT = 0.75  # of a pixel
FONT = "DejaVu Sans"  # bundled with matplotlib


def picture(svg: str, kind: Literal["png", "pdf"] = "png") -> bytes:
    """Return an SVG drawing of this package as PNG or PDF, in light colours.

    PNG has two dots per pixel. Raises ChartError for other formats, and where matplotlib is not
    installed.

    >>> from autosched.viz import Bar, bars_svg
    >>> picture(bars_svg([Bar("one GPU", 3.75)]), "pdf")[:5]
    b'%PDF-'
    """
    if kind not in ("png", "pdf"):
        raise ChartError(f"a picture can be 'png' or 'pdf', got {shown(kind)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ChartError("PNG and PDF need matplotlib: pip install 'autosched[viz]'") from None
    width, height, items = shapes(svg)
    figure = Figure(figsize=(width / 96, height / 96), dpi=192)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for z, item in enumerate(items):
        _draw(axes, item, z)
    made = io.BytesIO()
    # No dates, so that a drawing always gives the same bytes; text as text, which publishers
    # require.
    with warnings.catch_warnings(), matplotlib.rc_context({"pdf.fonttype": 42}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        dateless: dict[str, Any] = {"CreationDate": None} if kind == "pdf" else {"Software": None}
        figure.savefig(made, format=kind, metadata=dateless)
    return made.getvalue()


def _draw(axes: Axes, item: Shape | Words, z: int) -> None:
    from matplotlib.patches import Rectangle

    drawn = _patch(item, z) if isinstance(item, Shape) else None
    if drawn is not None:
        axes.add_artist(drawn)
        artists = [drawn]
    else:
        assert isinstance(item, Words)
        artists = _texts(axes, item, z)
    if item.clip is not None:
        left, top, width, height = item.clip
        for artist in artists:
            artist.set_clip_path(Rectangle((left, top), width, height, transform=axes.transData))


def _patch(shape: Shape, z: int) -> Any:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    codes: dict[str, list[Any]] = {
        "begin": [Path.MOVETO],
        "line": [Path.LINETO],
        "curve": [Path.CURVE4] * 3,
    }
    points: list[tuple[float, float]] = []
    kinds: list[Any] = []
    for kind, mine in shape.path:
        points += mine or [points[-1]]
        kinds += codes.get(kind, [Path.CLOSEPOLY])
    fill = (
        "none" if shape.fill == "none" else to_rgba(shape.fill, shape.opacity * shape.fill_opacity)
    )
    stroke = "none" if shape.stroke == "none" else to_rgba(shape.stroke, shape.opacity)
    dashes = tuple(length / shape.width for length in shape.dashes)  # in widths of the line
    ends: dict[str, Any] = (
        {"capstyle": "round", "joinstyle": "round"} if shape.round else {"joinstyle": "miter"}
    )
    return PathPatch(
        Path(points, kinds), facecolor=fill, edgecolor=stroke, linewidth=shape.width * POINT,
        linestyle=(0, dashes) if dashes else "solid", zorder=z, **ends,
    )  # fmt: skip


def _texts(axes: Axes, words: Words, z: int) -> list[Any]:
    """Draw the runs of a line one after another."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.patheffects import withStroke
    from matplotlib.textpath import text_to_path

    x = words.x
    drawn = []
    for run in words.runs:
        font = FontProperties(
            family=[FONT], weight="bold" if run.bold else "normal", size=run.size * POINT
        )
        text = axes.text(
            x, words.y, run.text, color=run.fill, fontproperties=font, parse_math=False, zorder=z,
            ha={"start": "left", "middle": "center", "end": "right"}[words.anchor], va="baseline",
        )  # fmt: skip
        if run.halo:
            text.set_path_effects([withStroke(linewidth=3 * POINT, foreground=run.halo)])
        drawn.append(text)
        if len(words.runs) > 1:
            x += text_to_path.get_text_width_height_descent(run.text, font, ismath=False)[0] / POINT
    return drawn
