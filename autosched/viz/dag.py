"""Draw a graph as SVG, with boxes in a column per device, or in the DOT language of Graphviz.

Time runs downwards, but the drawing knows no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autosched.graph.graph import Graph
from autosched.viz.diagram import KINDS, NOWHERE, Box, Diagram, Edge, Kind, diagram, is_host, parts
from autosched.viz.format import legal, natural, shorten, shorten_path, text_width
from autosched.viz.layered_layout import Route, layout
from autosched.viz.svg import (
    LABEL,
    PHASES,
    TITLE,
    document,
    legend,
    legend_width,
    number,
    path,
    rect,
    text,
)

BOX = 28.0  # the height of a node
PITCH = 62.0  # from one rank to the next
DENSE = 42.0  # the same where a drawing would be too high otherwise
PAGE_PITCH = 50.0  # the same in a page
MARGIN = 20.0
HEADER = 40.0  # above the first rank, for the names of devices
NODE = (48.0, 150.0)  # how narrow and how wide nodes may be
TITLED = 700.0  # how wide a title makes the drawing, at most
WIDER = 280.0  # the most for nodes that represent several
TALL = 2500.0  # how high a drawing is, at most, unless the caller says what to fold
MOST = 200.0  # boxes, unless the caller says how many
_LEGEND = {
    "input": ("pill", "input", "input"),
    "task": ("box", "task", "task"),
    "forward": ("box", "task", "forward"),
    **{phase: ("box", f"task {phase}", phase) for phase in PHASES},
    "view": ("box", "view", "view"),
    "several": ("stack", "task", "several"),
    "data": ("line", "line data", "data"),
    "faint": ("line", "line faint", "data from afar"),
    "move": ("line", "line move", "data copied"),
    "anti": ("line", "line anti", "write after read"),
    "order": ("line", "line order", "order only"),
}


def graph_svg(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    depth: int | None = None,
    most: float | None = None,
) -> str:
    """Draw a graph as SVG: a column per device with the host in the middle, copies thick.

    ``device`` has the device of each task, by name, as ``Placement.device`` does; without it the
    constraints count. The title is the name of the graph unless given. In a graph of more than
    ``most`` inputs and tasks, a module is one box, at the deepest level that gives no more boxes;
    with ``depth``, at that level. Where modules do not tell tasks apart, those of a device at about
    the same depth of the graph are one. Without both, at most 200 boxes are drawn, and fewer if the
    picture were higher than 2,500 pixels otherwise. What makes an output has its name after an
    arrow. Tasks of a backward pass and of optimizers have colours of their own.

    Order and anti-dependencies are dashed and dotted; those that other dependencies imply are left
    out.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> "<title>matmul" in graph_svg(graph, {"matmul": "cuda:0"})
    True
    """
    is_bounded = depth is None and most is None
    limit = MOST if most is None else most
    while True:
        found = diagram(graph, device, depth=depth, most=limit)
        drawing = _Drawing(found)
        ranks = max(drawing.layout.rank, default=0) + 1
        drawing.pitch = min(TALL / ranks, PITCH) if is_bounded else PITCH
        if drawing.pitch >= DENSE or limit <= 1:
            name = graph.name if title is None else title
            body, width, height = drawing.svg(name)
            return document(width, height, name or f"graph {graph.name}", body)
        limit = min(limit, len(found.boxes)) * 3 // 4


def graph_parts(graph: Graph, device: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the drawings of a graph in a page: the whole, and each box of several tasks opened.

    Each has its name, which box of which drawing it opens, the positions of the tasks in each box,
    what boxes of several are called, and the boxes where each arrow begins and ends. Each box is a
    group of the drawing.
    """
    for part in parts(graph, device):
        drawing = _Drawing(part.diagram, PAGE_PITCH)
        body, width, height = drawing.svg(in_page=True)
        yield {
            "name": part.name,
            "opens": part.opens,
            "members": part.members,
            "text": [_text(box) if box.amount else "" for box in part.diagram.boxes],
            "size": [round(width), round(height)],
            "svg": "".join(body),
            "arrows": [ends for ends, _, _ in drawing.arrows],
        }


def _devices(found: Diagram) -> list[str]:
    """Return the devices from left to right: hosts in the middle, others around them by name."""
    devices = {box.place for box in found.boxes}
    ordered = sorted(devices, key=lambda device: (device == NOWHERE, natural(device)))
    hosts = [device for device in ordered if is_host(device)]
    others = [device for device in ordered if not is_host(device)]
    half = (len(others) + 1) // 2
    return [*others[:half], *hosts, *others[half:]]


@dataclass
class _Drawing:
    """A diagram with its layout, drawn with ``pitch`` pixels from one rank to the next."""

    diagram: Diagram
    pitch: float = PITCH

    def __post_init__(self) -> None:
        boxes, arrows = self.diagram.boxes, self.diagram.arrows
        self.devices = _devices(self.diagram)
        self.widths = [_width(box) for box in boxes]
        column = [self.devices.index(box.place) for box in boxes]
        floating = {i for i, box in enumerate(boxes) if box.kind != "task"}
        self.layout = layout(column, self.widths, list(arrows), floating, self.diagram.rank)
        phases = {box.phase if box.phase in PHASES else "" for box in boxes if box.kind == "task"}
        self.phases = phases if len(phases) > 1 else set()  # that have colours of their own
        # With their ends and routes, the most important arrows last, above the others.
        self.arrows: list[tuple[Edge, Kind, Route]] = sorted(
            zip(arrows, arrows.values(), self.layout.routes, strict=True),
            key=lambda item: -KINDS.index(item[1]),
        )

    def svg(self, title: str = "", in_page: bool = False) -> tuple[list[str], float, float]:
        """Return the elements, with title, columns and legend, and the size of the drawing.

        In a page, boxes are groups, and have no tooltips.
        """
        layout, note = self.layout, self.diagram.note
        entries = self._legend()
        named = min(max(text_width(title, TITLE), text_width(note)), TITLED) + 1
        width = max(layout.width, max(legend_width(entries), named) + 2 * MARGIN)
        shift = (width - layout.width) / 2
        body = []
        top = MARGIN
        if title:
            shown = shorten(title, width - 2 * MARGIN, TITLE)
            body.append(text("ink title", MARGIN, top + 16, shown))
            top += 28
        if note:
            body.append(text("muted", MARGIN, top + 10, note))
            top += 24
        has_columns = self.devices not in ([], [NOWHERE])
        self.top = top + HEADER * has_columns + BOX / 2  # the middle of the first rank
        bottom = self.y(max(layout.rank, default=0)) + BOX / 2 + 16
        columns = zip(self.devices, layout.columns, strict=True)
        for device, (left, right) in columns if has_columns else ():
            x, y = left + shift, top + 4
            body.append(rect("track column", x, y, right - left, bottom - y, 6))
            name = shorten(device or "anywhere", right - left)
            body.append(text("ink strong middle", x + (right - left) / 2, top + 26, name))
        body += legend(MARGIN, bottom + 24, entries)
        body.append(f'<g transform="translate({number(shift)} 0)">')
        body += [self._arrow(*arrow) for arrow in self.arrows]
        nodes = [self._node(i, in_page) for i in range(len(self.widths))]
        return [*body, *nodes, "</g>"], width, bottom + 24 + MARGIN

    def y(self, rank: int) -> float:
        """Return the middle of the boxes of a rank."""
        return self.top + rank * self.pitch

    def _node(self, i: int, in_page: bool) -> str:
        """Return a box with its text."""
        box, width, x = self.diagram.boxes[i], self.widths[i], round(self.layout.x[i])
        left, y = x - width / 2, self.y(self.layout.rank[i])
        rx = BOX / 2 if box.kind == "input" else 4
        has_phase = box.kind == "task" and box.phase in self.phases
        cls = f"task {box.phase}".rstrip() if has_phase else box.kind
        drawn = rect(cls, left + 4, y - BOX / 2 + 4, width, BOX, rx) if box.amount else ""
        drawn += rect(cls, left, y - BOX / 2, width, BOX, rx, "" if in_page else box.facts)
        ink = "on-task middle" if box.kind == "task" else "ink middle"
        drawn += text(ink, x, y - 2 if box.amount else y + 4, _text(box, width - 12))
        if box.amount:
            drawn += text(f"{ink} label", x, y + 10, _below(box, width - 12))
        return f"<g>{drawn}</g>" if in_page else drawn

    def _arrow(self, ends: Edge, kind: Kind, route: Route) -> str:
        """Return an arrow, which bends only between ranks, where no nodes are."""
        above, below = (self.layout.rank[end] for end in ends)
        y1, y2 = self.y(above) + BOX / 2, self.y(below) - BOX / 2
        gap = self.pitch - BOX
        leaves, enters = round(route.leaves), round(route.enters)
        turns: list[str | float]
        if above == below:
            is_under = leaves < enters
            y1, bend = (y1, 0.7 * gap) if is_under else (y2, -0.7 * gap)
            turns = ["c", 0, bend, enters - leaves, bend, enters - leaves, 0]
        elif route.passes is None:
            turns = _turn(enters - leaves, y2 - y1)
        else:
            passes = round(route.passes)
            turns = [*_turn(passes - leaves, gap), "V", y2 - gap, *_turn(enters - passes, gap)]
        return path(f"line {kind}", "M", leaves, y1, *turns)

    def _legend(self) -> list[tuple[str, str, str]]:
        """Return the legend of what occurs in the picture."""
        boxes = self.diagram.boxes
        seen: set[str] = {*self.diagram.arrows.values(), *(box.kind for box in boxes)}
        seen |= {"several"} if any(box.amount for box in boxes) else set()
        if self.phases:
            seen = seen - {"task"} | {phase or "forward" for phase in self.phases}
        return [entry for kind, entry in _LEGEND.items() if kind in seen]


def _turn(right: float, down: float) -> list[str | float]:
    return ["c", 0, down / 2, right, down / 2, right, down]


def _width(box: Box) -> float:
    wide = max(text_width(_text(box)), text_width(_below(box), LABEL)) + 22
    wide = 2 * round(wide / 2)  # so that the sides are at whole pixels
    return min(max(wide, NODE[0]), WIDER if box.amount or box.result else NODE[1])


def _below(box: Box, width: float = 1e6) -> str:
    """Return the second line of the text of a box of several: their number, and their outputs."""
    words = filter(None, (box.amount, shorten(box.result, 80))) if box.amount else ()
    return shorten(" → ".join(words), width, LABEL)


def _text(box: Box, width: float = 1e6) -> str:
    """Return the text of a box: its name, shortened if necessary, and its output."""
    result = f" → {shorten(box.result, 80)}" if box.result and not box.amount else ""
    width -= text_width(result)
    if " … " not in box.label:
        return shorten_path(box.label, width) + result
    first, last = box.label.split(" … ", 1)
    half = (width - text_width(" … ")) / 2
    most = width - text_width(" … ") - min(text_width(last), half)
    first = shorten_path(first, most)
    return f"{first} … {shorten_path(last, width - text_width(first) - text_width(' … '))}{result}"


# ---- DOT

_BOXES = {
    "input": 'style="rounded,filled", fillcolor="#ffffff", color="#59636e"',
    "task": 'style=filled, fillcolor="#0072b2", fontcolor="#ffffff", color="#0072b2"',
    "view": 'style=filled, fillcolor="#ffffff", color="#0072b2"',
}
_ARROWS = {
    "data": 'color="#59636e"',
    "faint": 'color="#a8afb8"',
    "move": 'color="#e69f00", penwidth=2.4, tooltip="data copied"',
    "anti": 'color="#59636e", style=dotted, tooltip="write after read"',
    "order": 'color="#59636e", style=dashed, tooltip="order only"',
}


def graph_dot(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    depth: int | None = None,
    most: float = MOST,
) -> str:
    """Write a graph in the DOT language; parameters and appearance are those of ``graph_svg``.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> print(graph_dot(graph).splitlines()[-2])
      n1 -> n2 [color="#59636e"];
    """
    found = diagram(graph, device, depth=depth, most=most)
    font = 'fontname="Helvetica,Arial,sans-serif", fontsize=12'
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        f"  label={_quoted((graph.name if title is None else title) or found.note)};",
        "  labelloc=t;",
        f"  node [shape=box, {font}];",
        f'  graph [{font}, color="#d9dee4"];',
    ]
    places: dict[str, list[int]] = {}
    for i, box in enumerate(found.boxes):
        places.setdefault(box.place, []).append(i)
    for place, mine in places.items():
        inner = [f"  n{i} [{_dot_box(found.boxes[i])}];" for i in mine]
        if place != NOWHERE:
            lines += [f"  subgraph cluster{mine[0]} {{", f"    label={_quoted(place)};"]
            inner = [*(f"  {line}" for line in inner), "  }"]
        lines += inner
    lines += [f"  n{a} -> n{b} [{_ARROWS[kind]}];" for (a, b), kind in found.arrows.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_box(box: Box) -> str:
    label = "\n".join(filter(None, (box.label, box.amount, box.result and f"→ {box.result}")))
    more = ", peripheries=2" * bool(box.amount)
    return f"label={_quoted(label)}, tooltip={_quoted(box.facts)}, {_BOXES[box.kind]}{more}"


def _quoted(text: str) -> str:
    r"""Return text as a string of DOT that displays that text.

    >>> _quoted('a "b" \\ &')
    '"a \\"b\\" \\\\ &amp;"'
    """
    pairs = {"&": "&amp;", "\\": "\\\\", '"': '\\"', "\r": " ", "\n": "\\n"}
    return f'"{legal("".join(pairs.get(c, c) for c in text))}"'
