"""Write a graph in the DOT language of Graphviz.

Knows no coordinates and no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autosched.graph.graph import Graph
from autosched.viz.diagram import Arrow, Box, Frame, diagram, framed
from autosched.viz.format import legal

__all__ = ["graph_dot"]

_BOXES = {
    "input": 'style="rounded,filled", fillcolor="#ffffff", color="#59636e"',
    "task": 'style=filled, fillcolor="#0072b2", fontcolor="#ffffff", color="#0072b2"',
    "view": 'style=filled, fillcolor="#ffffff", color="#0072b2"',
}
_ARROWS = {
    "data": 'color="#59636e"',
    "move": 'color="#e69f00", penwidth=2.4, tooltip="data copied"',
    "anti": 'color="#59636e", style=dotted, tooltip="write after read"',
    "order": 'color="#59636e", style=dashed, tooltip="order only"',
}


def graph_dot(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    group: str = "device",
    depth: int | None = None,
    most: float = 200,
    critical: Iterable[str] = (),
) -> str:
    """Write a graph in the DOT language; parameters and appearance are those of ``graph_svg``.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> print(graph_dot(graph).splitlines()[-2])
      n1 -> n2 [color="#59636e"];
    """
    found = diagram(graph, device, depth=depth, most=most, critical=critical)
    found, frames = framed(found, group)
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        f"  label={_quoted((graph.name if title is None else title) or found.note)};",
        "  labelloc=t;",
    ]
    lines += ['  node [shape=box, fontname="Helvetica,Arial,sans-serif", fontsize=12];']
    lines += ['  graph [fontname="Helvetica,Arial,sans-serif", fontsize=12, color="#d9dee4"];']
    for frame in frames:
        lines += _subgraph(frame, found.boxes)
    lines += [f"  n{a} -> n{b} [{_arrow(arrow)}];" for (a, b), arrow in found.arrows.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _subgraph(frame: Frame, boxes: Sequence[Box]) -> Iterator[str]:
    inner = [f"  n{i} [{_box(boxes[i])}];" for i in frame.boxes]
    if not frame.name:
        yield from inner
        return
    where = "" if frame.place in ("", frame.name) else f" on {frame.place}"
    yield f"  subgraph cluster{frame.boxes[0]} {{"
    yield f"    label={_quoted(frame.name + where)};"
    yield from ("  " + line for line in inner)
    yield "  }"


def _box(box: Box) -> str:
    label = "\n".join(filter(None, (box.label, box.amount, box.result and f"→ {box.result}")))
    more = ", peripheries=2" * bool(box.amount) + ', penwidth=3, color="#1f2328"' * box.critical
    return f"label={_quoted(label)}, tooltip={_quoted(box.facts)}, {_BOXES[box.kind]}{more}"


def _arrow(arrow: Arrow) -> str:
    more = ', color="#a8afb8"' * arrow.faint + ', penwidth=4.5, color="#1f2328"' * arrow.critical
    return _ARROWS[arrow.kind] + more


def _quoted(text: str) -> str:
    r"""Return text as a string of DOT that displays that text.

    >>> _quoted('a "b" \\ &')
    '"a \\"b\\" \\\\ &amp;"'
    """
    table: dict[str, str | int | None] = {
        "&": "&amp;",
        "\\": "\\\\",
        '"': '\\"',
        "\r": " ",
        "\n": "\\n",
    }
    return f'"{legal(text.translate(str.maketrans(table)))}"'
