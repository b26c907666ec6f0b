"""Draw timelines, graphs and numbers as text or SVG.

Drawings are pure functions: they write no file and decide nothing.

``layered_layout`` places the boxes of a graph. Styles, elements and texts are in ``svg``.

=========  =============================================  =============
module     draws                                         as
=========  =============================================  =============
gantt      what ran when, on which stream, and why then  SVG, text
dag        what depends on what, and on which device     SVG, DOT
charts     numbers                                       SVG
perfetto   what ran when, for Perfetto                   trace JSON
drawing    any of these that are SVG                     PNG, PDF
page       a whole schedule, interactively               HTML
=========  =============================================  =============
"""

from autosched.viz.dag import graph_dot, graph_svg
from autosched.viz.drawing import picture  # which registers how graphs and timelines are displayed
from autosched.viz.gantt import gantt_svg, gantt_text
from autosched.viz.page import page_html
from autosched.viz.perfetto import perfetto_json

__all__ = [
    "gantt_svg",
    "gantt_text",
    "graph_dot",
    "graph_svg",
    "page_html",
    "perfetto_json",
    "picture",
]
