"""Draw a graph as SVG, with boxes in a column per device, or in the DOT language of Graphviz.

Time runs downwards, but the drawing knows no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autosched.graph.graph import Graph
from autosched.viz.diagram import KINDS, NOWHERE, Arrow, Box, Diagram, Edge, diagram, is_host, parts
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
    and what boxes of several are called. The drawing is SVG, with a group for each box, but for its
    arrows: those are so many that the page has their classes, with how many are of each, and the
    boxes and places where they begin and end and the place where they pass others, to draw them.
    """
    for part in parts(graph, device):
        drawing = _Drawing(part.diagram, PAGE_PITCH)
        frame, width, height = drawing.frame()
        boxes = part.diagram.boxes
        looks = [drawing.look(arrow) for _, arrow, _ in drawing.arrows]
        yield {
            "name": part.name,
            "opens": part.opens,
            "members": part.members,
            "text": [_text(box) if box.amount else "" for box in boxes],
            "size": [round(width), round(height)],
            "svg": [
                "".join(frame),
                "".join(f"<g>{drawing.node(i, '')}</g>" for i in range(len(boxes))),
            ],
            "y": [round(drawing.y(rank)) for rank in drawing.layout.rank],
            "looks": [[look, len([*mine])] for look, mine in groupby(looks)],
            "arrows": [[*ends, *_places(route)] for ends, _, route in drawing.arrows],
        }


def _places(route: Route) -> Iterator[int]:
    """Yield where an arrow leaves, and how far from there it enters and passes, in whole pixels."""
    yield round(route.leaves)
    yield round(route.enters - route.leaves)
    if route.passes is not None:
        yield round(route.passes - route.leaves)


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
        self.has_columns = self.devices not in ([], [NOWHERE])
        phases = {box.phase for box in self.diagram.boxes if box.kind == "task"}
        self.phases = {phase if phase in PHASES else "" for phase in phases}
        self.top = MARGIN  # of the drawing; later the middle of the first rank

    def svg(self, title: str) -> tuple[list[str], float, float]:
        """Return the elements of the drawing with its title, columns and legend, and its size."""
        frame, width, height = self.frame(title)
        nodes = (self.node(i, box.facts) for i, box in enumerate(self.diagram.boxes))
        return [*frame, *map(self._arrow, self.arrows), *nodes, "</g>"], width, height

    def frame(self, title: str = "") -> tuple[list[str], float, float]:
        """Return what is around boxes and arrows, which it finds a place for; and the size.

        The last element begins the group of arrows and boxes.
        """
        layout, note = self.layout, self.diagram.note
        entries = list(self._entries())
        named = min(max(text_width(title, TITLE), text_width(note)), TITLED) + 1
        width = max(layout.width, max(legend_width(entries), named) + 2 * MARGIN)
        body = []
        if title:
            shown = shorten(title, width - 2 * MARGIN, TITLE)
            body.append(text("ink title", MARGIN, self.top + 16, shown))
            self.top += 28
        if note:
            body.append(text("muted", MARGIN, self.top + 10, note))
            self.top += 24
        start = self.top + 4
        self.top += HEADER * self.has_columns + BOX / 2
        bottom = self.y(max(layout.rank, default=0)) + BOX / 2 + 16
        body += self._columns(start, bottom, (width - layout.width) / 2)
        body += legend(MARGIN, bottom + 24, entries)
        body.append(f'<g transform="translate({number((width - layout.width) / 2)} 0)">')
        return body, width, bottom + 24 + MARGIN

    def y(self, rank: int) -> float:
        """Return the middle of the boxes of a rank."""
        return self.top + rank * self.pitch

    def _columns(self, top: float, bottom: float, shift: float) -> Iterator[str]:
        if not self.has_columns:
            return
        for device, (left, right) in zip(self.devices, self.layout.columns, strict=True):
            yield rect("track column", left + shift, top, right - left, bottom - top, 6)
            name = shorten(device or "anywhere", right - left)
            yield text("ink strong middle", (left + right) / 2 + shift, top + 22, name)

    def node(self, i: int, facts: str) -> str:
        """Return a box with its text; ``facts`` are its tooltip."""
        box = self.diagram.boxes[i]
        width = self.widths[i]
        left = self.layout.x[i] - width / 2
        y = self.y(self.layout.rank[i])
        rx = BOX / 2 if box.kind == "input" else 4
        has_phase = len(self.phases) > 1 and box.kind == "task" and box.phase in PHASES
        cls = f"task {box.phase}" if has_phase else box.kind
        drawn = rect(cls, left + 4, y - BOX / 2 + 4, width, BOX, rx) if box.amount else ""
        drawn += rect(cls, left, y - BOX / 2, width, BOX, rx, facts)
        ink = "on-task" if box.kind == "task" else "ink"
        x = self.layout.x[i]
        if not box.amount:
            return drawn + text(f"{ink} middle", x, y + 4, _text(box, width - 12))
        drawn += text(f"{ink} middle", x, y - 2, _text(box, width - 12))
        return drawn + text(f"{ink} middle label", x, y + 10, _below(box, width - 12))

    @property
    def arrows(self) -> list[tuple[Edge, Arrow, Route]]:
        """Return all arrows with their ends and routes, the most important ones last."""
        arrows = self.diagram.arrows
        return sorted(
            zip(arrows, arrows.values(), self.layout.routes, strict=True),
            key=lambda item: (not item[1].faint, -KINDS.index(item[1].kind)),
        )

    def _arrow(self, item: tuple[Edge, Arrow, Route]) -> str:
        (a, b), arrow, route = item
        y1 = self.y(self.layout.rank[a]) + BOX / 2
        y2 = self.y(self.layout.rank[b]) - BOX / 2
        gap = self.pitch - BOX
        if self.layout.rank[a] == self.layout.rank[b]:
            y1 = y2 = y1 if route.leaves < route.enters else y2
            gap = gap if route.leaves < route.enters else -gap
        return path(self.look(arrow), *_curve(route, y1, y2, gap))

    def look(self, arrow: Arrow) -> str:
        """Return the classes of an arrow."""
        return f"line {arrow.kind}" + " faint" * arrow.faint

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        """Return the legend of what occurs in the picture."""
        boxes = self.diagram.boxes
        arrows = self.diagram.arrows.values()
        kinds = {box.kind for box in boxes} | {arrow.kind for arrow in arrows}
        phased = len(self.phases) > 1
        shown = (
            ("input" in kinds, "pill", "input", "input"),
            ("task" in kinds and not phased, "box", "task", "task"),
            (phased and "" in self.phases, "box", "task", "forward"),
            *((phased and name in self.phases, "box", f"task {name}", name) for name in PHASES),
            ("view" in kinds, "box", "view", "view"),
            (any(box.amount for box in boxes), "stack", "task", "several"),
            ("data" in kinds, "line", "line data", "data"),
            (any(arrow.faint for arrow in arrows), "line", "line data faint", "data from afar"),
            ("move" in kinds, "line", "line move", "data copied"),
            ("anti" in kinds, "line", "line anti", "write after read"),
            ("order" in kinds, "line", "line order", "order only"),
        )
        return ((symbol, cls, name) for there, symbol, cls, name in shown if there)


def _width(box: Box) -> float:
    wide = max(text_width(_text(box)), text_width(_below(box), LABEL)) + 22
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


def _curve(route: Route, y1: float, y2: float, gap: float) -> Iterator[str | float]:
    """Return the curve of a route, which bends only between ranks, where no nodes are."""
    yield from ("M", route.leaves, y1)
    if y1 == y2:
        y = y1 + 0.7 * gap
        yield from ("C", route.leaves, y, route.enters, y, route.enters, y2)
    elif route.passes is None:
        yield from _turn(route.leaves, y1, route.enters, y2)
    else:
        yield from _turn(route.leaves, y1, route.passes, y1 + gap)
        yield from ("V", y2 - gap, *_turn(route.passes, y2 - gap, route.enters, y2))


def _turn(x1: float, y1: float, x2: float, y2: float) -> Sequence[str | float]:
    middle = (y1 + y2) / 2
    return "C", x1, middle, x2, middle, x2, y2


# ---- DOT

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
    lines += [f"  n{a} -> n{b} [{_dot_arrow(arrow)}];" for (a, b), arrow in found.arrows.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _dot_box(box: Box) -> str:
    label = "\n".join(filter(None, (box.label, box.amount, box.result and f"→ {box.result}")))
    more = ", peripheries=2" * bool(box.amount)
    return f"label={_quoted(label)}, tooltip={_quoted(box.facts)}, {_BOXES[box.kind]}{more}"


def _dot_arrow(arrow: Arrow) -> str:
    return _ARROWS[arrow.kind] + ', color="#a8afb8"' * arrow.faint


def _quoted(text: str) -> str:
    r"""Return text as a string of DOT that displays that text.

    >>> _quoted('a "b" \\ &')
    '"a \\"b\\" \\\\ &amp;"'
    """
    pairs = {"&": "&amp;", "\\": "\\\\", '"': '\\"', "\r": " ", "\n": "\\n"}
    return f'"{legal("".join(pairs.get(c, c) for c in text))}"'
