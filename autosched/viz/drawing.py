"""Write pictures to files by suffix, as SVG, PNG (resvg) or PDF (svg2pdf); show them in notebooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from autosched._lib.display import register
from autosched._lib.files import write
from autosched.errors import ChartError, shown
from autosched.graph.graph import Graph
from autosched.timeline.timeline import Timeline
from autosched.viz.dag import graph_dot, graph_svg
from autosched.viz.gantt import gantt_svg, gantt_text, summary
from autosched.viz.svg import escape


def draw_graph(
    graph: Graph,
    path: str | os.PathLike[str],
    device: Mapping[str, str] | None,
    depth: int | None,
    title: str | None,
) -> None:
    """Write a graph as .svg, .png, .pdf or .dot."""
    svg, dot = (partial(draw, depth=depth, title=title) for draw in (graph_svg, graph_dot))
    save_picture(path, svg=lambda: svg(graph, device), dot=lambda: dot(graph, device))


def phases(graph: Graph | None) -> dict[str, str]:
    """Return the phase of each task: forward, backward or optimizer."""
    return {} if graph is None else {task.name: task.origin.phase for task in graph.tasks}


def save_picture(path: str | os.PathLike[str], **writers: Callable[[], str]) -> None:
    """Write what one of the functions returns, chosen by suffix: ``svg`` also as .png and .pdf."""
    suffix = Path(path).suffix.removeprefix(".")
    kinds: Mapping[str, Literal["png", "pdf"]] = {"png": "png", "pdf": "pdf"}
    if suffix in kinds:
        write(path, picture(writers["svg"](), kinds[suffix]))
    elif suffix in writers:
        write(path, writers[suffix]())
    else:
        known = ", ".join(f".{name}" for name in dict.fromkeys(["svg", "png", "pdf", *writers]))
        got = shown(os.fspath(path))
        raise ChartError(f"the name of a picture must end in one of {known}, got {got}")


# ---- PNG and PDF


def picture(svg: str, kind: Literal["png", "pdf"] = "png") -> bytes:
    """Return an SVG drawing in light colours: as PNG, or as PDF with text as text.

    Raises ChartError for other formats, and where the converter is not installed.

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


# ---- notebooks


def show_graph(graph: Graph) -> dict[str, str]:
    """Return the notebook output for a graph, by media type: a picture and a line of text."""
    return _mime_bundle(graph_svg(graph), repr(graph), repr(graph))


def show_timeline(
    timeline: Timeline, title: str = "", about: str = "", graph: Graph | None = None
) -> dict[str, str]:
    """Return the notebook output for a timeline: a Gantt chart, as a picture and as text."""
    chart = "\n".join(filter(None, (about, gantt_text(timeline))))
    svg = gantt_svg(timeline, title=title, phases=phases(graph))
    return _mime_bundle(svg, chart, about or summary(timeline))


def _mime_bundle(svg: str, text: str, about: str) -> dict[str, str]:
    html = f"<div>{svg}<p>{escape(about)}</p></div>"
    return {"text/plain": text, "image/svg+xml": svg, "text/html": html}


register(Graph, draw=draw_graph, show=show_graph)
register(Timeline, show=show_timeline)
