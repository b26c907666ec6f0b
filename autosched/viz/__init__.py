"""Draw timelines, graphs and numbers as text or SVG.

Drawings are pure functions: they write no file and decide nothing.

To add a drawing, write a module with one pure function ``(data, *, options) -> str``, whose data is
a ``Timeline``, a ``Graph``, a ``Program`` or plain numbers. Take colours, text sizes and the format
of times from ``paint``, and export the function here.

=========  ============================================  ==========
module     draws                                         as
=========  ============================================  ==========
gantt      what ran when, on which stream, and why then  SVG
dag        what depends on what, and on which device     SVG
dot        the same                                      Graphviz DOT
mermaid    the same                                      Mermaid
text       what ran when                                 plain text
courses    memory of devices, use of links, over time    SVG
perfetto   what ran when, for Perfetto                   trace JSON
lines      numbers against numbers, with error bars      SVG
bars       named numbers, with error bars                SVG
picture    any of these that are SVG                     PNG, PDF
page       a whole schedule, interactively               HTML
=========  ============================================  ==========
"""

from autosched.viz import drawing as drawing  # registers how graphs and timelines are displayed
from autosched.viz.bars import Bar, bars_svg
from autosched.viz.courses import links_svg, memory_svg
from autosched.viz.dag import graph_svg
from autosched.viz.dot import graph_dot
from autosched.viz.gantt import gantt_svg
from autosched.viz.lines import Line, lines_svg
from autosched.viz.mermaid import graph_mermaid
from autosched.viz.page import page_html
from autosched.viz.perfetto import perfetto_json
from autosched.viz.picture import picture
from autosched.viz.text import gantt_text

__all__ = [
    "Bar",
    "Line",
    "bars_svg",
    "gantt_svg",
    "gantt_text",
    "graph_dot",
    "graph_mermaid",
    "graph_svg",
    "lines_svg",
    "links_svg",
    "memory_svg",
    "page_html",
    "perfetto_json",
    "picture",
]
