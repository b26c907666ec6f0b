"""Drawings: functions from a timeline or a graph to text or SVG. They write no file and decide nothing.

To add a drawing, write a module with one pure function ``(data, *, options) -> str``, whose data is a ``Timeline``, a
``Graph`` or a ``Program``; take colours, text sizes and times from ``paint``; name the function here.

=========  ============================================  ==========
module     draws                                         as
=========  ============================================  ==========
gantt      what ran when, on which stream, and why then  SVG
dag        what depends on what, and where it is         SVG
text       what ran when                                 plain text
=========  ============================================  ==========
"""

from autosched.viz.dag import graph_svg
from autosched.viz.gantt import gantt_svg
from autosched.viz.text import gantt_text

__all__ = ["gantt_svg", "gantt_text", "graph_svg"]
