"""Convert SVG drawings to PNG (resvg) or PDF (svg2pdf), in light colours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from autosched.errors import ChartError, shown

__all__ = ["picture"]


def picture(svg: str, kind: Literal["png", "pdf"] = "png") -> bytes:
    """Return an SVG drawing as PNG, with two dots per pixel, or as PDF, with text as text.

    Raises ChartError for other formats, and where the converter is not installed.

    >>> from autosched.graph.graph import Graph
    >>> from autosched.viz import graph_svg
    >>> picture(graph_svg(Graph()), "pdf")[:5]
    b'%PDF-'
    """
    if kind not in ("png", "pdf"):
        raise ChartError(f"a picture can be 'png' or 'pdf', got {shown(kind)}")
    try:
        if kind == "png":
            from resvg_py import svg_to_bytes

            fonts = list(_fonts())
            return svg_to_bytes(svg, zoom=2, dpi=96, skip_system_fonts=True, font_files=fonts)
        from svg2pdf_py import svg_to_pdf

        made: bytes = svg_to_pdf(svg, _font_database())
        return made
    except ImportError:
        message = 'PNG and PDF need converters: pip install "autosched[viz]"'
        raise ChartError(message) from None


@cache
def _fonts() -> tuple[str, ...]:
    """Return the files of DejaVu Sans, which matplotlib contains."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return tuple(str(folder / f"DejaVuSans{style}.ttf") for style in ("", "-Bold"))


@cache
def _font_database() -> Any:
    from svg2pdf_py import FontDatabase

    database = FontDatabase()
    for file in _fonts():
        database.load_font_file(file)
    return database
