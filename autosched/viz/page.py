"""Write a schedule as one interactive HTML page.

The page has a chart, the graph and texts that are linked with each other, and opens from the file
system in any browser. Its template, style sheet and scripts are in ``web/`` and are embedded whole.
The page loads nothing from elsewhere; its content security policy forbids that.

The page holds columns of numbers instead of objects, compressed (see ``page_data``). Its scripts
compute nothing that Python knows, such as the critical path or the dependencies of a task. They do
draw and lay out the graph, since that depends on the selection.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from string import Template

from autosched.graph.graph import Graph
from autosched.program.program import Program
from autosched.timeline.timeline import Timeline
from autosched.viz.format import Steps, summary
from autosched.viz.page_data import page_data
from autosched.viz.svg import escape

__all__ = ["page_html"]

LINES = 6000  # of each text
SCRIPTS = ("model.js", "gantt.js", "layers.js", "graph.js", "panel.js", "main.js")


def page_html(
    graph: Graph,
    program: Program,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    title: str = "",
    explanation: str = "",
    code: str = "",
    memory: Mapping[str, Steps] | None = None,
    limits: Mapping[str, float] | None = None,
) -> str:
    """Return a page that shows a schedule: zoom, pan, search, select, follow waits.

    ``measured`` is a timeline of the same program; ``explanation`` and ``code`` are texts with a
    panel each, omitted where empty; ``memory`` has steps (seconds, bytes) for each device,
    ``limits`` the bytes of memory of devices.

    >>> from autosched.program.program import Stream
    >>> from autosched.timeline.timeline import Span
    >>> graph, program = Graph("one sum"), Program.parse("cpu/compute run add")
    >>> y = graph.input("x") + 1
    >>> timeline = Timeline((Span("run", "add", (Stream("cpu", "compute"),), 0.0, 0.002, 0),))
    >>> "makespan 2 ms" in page_html(graph, program, timeline)
    True
    """
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    data = page_data(graph, program, timelines, memory or {}, limits or {})
    texts = {"explanation": explanation, "program": str(program), "code": code}
    data["texts"] = {name: _cut(text, name) for name, text in texts.items() if text}
    folder = files("autosched.viz") / "web"
    summaries = (f"{name} {summary(timeline)}" for name, timeline in timelines.items())
    parts = {
        "title": escape(title or graph.name),
        "summary": escape("; ".join(summaries)),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": _packed(data),
    }
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(parts)


def _cut(text: str, name: str) -> str:
    """Return the beginning of a text: nobody reads all lines of ten thousand tasks in a page."""
    lines = text.split("\n")
    rest = len(lines) - LINES
    if rest <= 0:
        return text
    return "\n".join([*lines[:LINES], f"... and {rest:,} more lines of the {name}"])


def _packed(data: object) -> str:
    """Return compressed JSON in characters that end no element; browsers can decompress it."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
