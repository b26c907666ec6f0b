"""Draw a graph as SVG, with boxes in a column per device, or in the DOT language of Graphviz.

Time runs downwards, but the drawing knows no times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autosched.graph.graph import Graph
from autosched.viz.diagram import (
    KINDS,
    NOWHERE,
    Arrow,
    Box,
    Diagram,
    Frame,
    diagram,
    framed,
    is_host,
    parts,
)
from autosched.viz.format import legal, natural, shorten, shorten_path, text_width
from autosched.viz.layered_layout import Layout, Route, layout
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

__all__ = ["graph_dot", "graph_parts", "graph_svg"]

BOX = 28.0  # the height of a node
PITCH = 62.0  # from one rank to the next
DENSE = 42.0  # the same where a drawing would be too high otherwise
MARGIN = 20.0
HEADER = 40.0  # above the first rank, for the names of devices
FRAME = (21.0, 7.0)  # above and below the boxes of a frame
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
    group: str = "device",
    depth: int | None = None,
    most: float | None = None,
    critical: Iterable[str] = (),
) -> str:
    """Draw a graph as SVG: a column per device with the host in the middle, copies thick.

    ``device`` has the device of each task, by name, as ``Placement.device`` does; without it the
    constraints count. The title is the name of the graph unless given. With ``group="module"``, the
    boxes of a module have a frame around them. In a graph of more than ``most`` inputs and tasks, a
    module is one box, at the deepest level that gives no more boxes; with ``depth``, at that level.
    Where modules do not tell tasks apart, those of a device at about the same depth of the graph
    are one. Without both, at most 200 boxes are drawn, and fewer if the picture were higher than
    2,500 pixels otherwise. What makes an output has its name after an arrow. Tasks of a backward
    pass and of optimizers have colours of their own.

    ``critical`` are the names of tasks or copies along a path, to be marked. Order and
    anti-dependencies are dashed and dotted; those that other dependencies imply are left out.
    Raises ChartError for unknown names.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> "<title>matmul" in graph_svg(graph, {"matmul": "cuda:0"})
    True
    """
    critical = list(critical)
    is_bounded = depth is None and most is None
    limit = MOST if most is None else most
    while True:
        found = diagram(graph, device, depth=depth, most=limit, critical=critical)
        found, frames = framed(found, group)
        frames = frames if group == "module" and found.rank is None else []
        places = _layout(found, frames)
        pitch = min(TALL / (max(places.rank, default=0) + 1), PITCH) if is_bounded else PITCH
        if pitch >= (BOX + sum(FRAME) + 2 if frames else DENSE) or limit <= 1:
            drawing = _Drawing(found, frames, places, pitch)
            name = graph.name if title is None else title
            body, width, height = drawing.svg(name, found.note)
            return document(width, height, name or f"graph {graph.name}", body)
        limit = min(limit, len(found.boxes)) * 3 // 4


def graph_parts(graph: Graph, device: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the drawings of a graph in a page: the whole, and each box of several tasks opened.

    Each has its name, which box of which drawing it opens, the positions of the tasks in each box,
    the ends of its arrows in the order in which they are drawn, and the size and text of its SVG.
    """
    for part in parts(graph, device):
        drawing = _Drawing(part.diagram, [], _layout(part.diagram, []), DENSE + 8)
        body, width, height = drawing.svg("", "")
        yield {
            "name": part.name,
            "opens": part.opens,
            "members": part.members,
            "arrows": [edge for _, edge, _ in drawing.arrows],
            "size": [round(width), round(height)],
            "svg": re.sub("<title>.*?</title>", "", "".join(body), flags=re.DOTALL),
        }


def _layout(found: Diagram, frames: Sequence[Frame]) -> Layout:
    devices = _devices(found)
    floating = {i for i, box in enumerate(found.boxes) if box.kind != "task"}
    bands = [band for band, frame in enumerate(frames) for _ in frame.boxes]
    column = [devices.index(box.place) for box in found.boxes]
    widths = [_width(box) for box in found.boxes]
    return layout(column, widths, list(found.arrows), floating, bands, found.rank)


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
    """A diagram, its layout, and the pixels from one rank to the next."""

    diagram: Diagram
    frames: Sequence[Frame]
    layout: Layout
    pitch: float

    def __post_init__(self) -> None:
        self.devices = _devices(self.diagram)
        self.has_columns = self.devices not in ([], [NOWHERE])
        phases = {box.phase for box in self.diagram.boxes if box.kind == "task"}
        self.phases = {phase if phase in PHASES else "" for phase in phases}
        self.top = MARGIN  # of the drawing; later the middle of the first rank

    def svg(self, title: str, note: str) -> tuple[list[str], float, float]:
        """Return the elements of the drawing with its title, columns and legend, and its size."""
        layout = self.layout
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
        self.top += HEADER * self.has_columns + FRAME[0] * bool(self.frames) + BOX / 2
        bottom = self._y(max(layout.rank, default=0)) + BOX / 2 + 16
        body.append(f'<g transform="translate({number((width - layout.width) / 2)} 0)">')
        body += [*self._columns(start, bottom), *self._frames()]
        body += [line for *_, line in self.arrows]
        body += map(self._node, range(len(self.diagram.boxes)))
        body += ["</g>", *legend(MARGIN, bottom + 24, entries)]
        return body, width, bottom + 24 + MARGIN

    def _y(self, rank: int) -> float:
        return self.top + rank * self.pitch

    def _columns(self, top: float, bottom: float) -> Iterator[str]:
        if not self.has_columns:
            return
        for device, (left, right) in zip(self.devices, self.layout.columns, strict=True):
            yield rect("track column", left, top, right - left, bottom - top, 6)
            name = shorten(device or "anywhere", right - left)
            yield text("ink strong middle", (left + right) / 2, top + 22, name)

    def _frames(self) -> Iterator[str]:
        """Draw a frame around the boxes of each module, with its name in a corner."""
        boxes, layout = self.diagram.boxes, self.layout
        for frame in self.frames:
            if not frame.name:
                continue
            ranks = [layout.rank[i] for i in frame.boxes]
            left = min(layout.x[i] - _width(boxes[i]) / 2 for i in frame.boxes) - 9
            right = max(layout.x[i] + _width(boxes[i]) / 2 for i in frame.boxes) + 9
            right = max(right, left + min(text_width(frame.name) + 16, 180))
            y = self._y(min(ranks)) - BOX / 2 - FRAME[0]
            height = (max(ranks) - min(ranks)) * self.pitch + BOX + sum(FRAME)
            yield rect("frame", left, y, right - left, height, 5)
            name = shorten(frame.name, right - left - 12)
            yield text("muted halo", left + 8, y + 14, name)

    def _node(self, i: int) -> str:
        box = self.diagram.boxes[i]
        width = _width(box)
        left = self.layout.x[i] - width / 2
        y = self._y(self.layout.rank[i])
        rx = BOX / 2 if box.kind == "input" else 4
        cls = self._class(box)
        drawn = rect(cls, left + 4, y - BOX / 2 + 4, width, BOX, rx) if box.amount else ""
        cls += " critical" * box.critical
        drawn += rect(cls, left, y - BOX / 2, width, BOX, rx, box.facts)
        ink = "on-task" if box.kind == "task" else "ink"
        x = self.layout.x[i]
        if not box.amount:
            return drawn + text(f"{ink} middle", x, y + 4, _text(box, width - 12))
        drawn += text(f"{ink} middle", x, y - 2, _text(box, width - 12))
        return drawn + text(
            f"{ink} middle label", x, y + 10, shorten(_below(box), width - 12, LABEL)
        )

    def _class(self, box: Box) -> str:
        """Return the class of a box: its kind, and its phase if tasks have several."""
        has_phase = len(self.phases) > 1 and box.kind == "task" and box.phase in PHASES
        return f"task {box.phase}" if has_phase else box.kind

    @cached_property
    def arrows(self) -> list[tuple[tuple[bool, bool, int], tuple[int, int], str]]:
        """Draw all arrows, the most important ones last, each after its weight and its ends."""
        drawn = []
        arrows = self.diagram.arrows.items()
        for ((a, b), arrow), route in zip(arrows, self.layout.routes, strict=True):
            y1 = self._y(self.layout.rank[a]) + BOX / 2
            y2 = self._y(self.layout.rank[b]) - BOX / 2
            gap = self.pitch - BOX
            if self.layout.rank[a] == self.layout.rank[b]:
                y1 = y2 = y1 if route.leaves < route.enters else y2
                gap = gap if route.leaves < route.enters else -gap
            cls = f"line {arrow.kind}" + " faint" * arrow.faint + " along" * arrow.critical
            weight = arrow.critical, not arrow.faint, -KINDS.index(arrow.kind)
            drawn.append((weight, (a, b), path(cls, *_curve(route, y1, y2, gap))))
        return sorted(drawn, key=lambda item: item[0])

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
            (any(box.critical for box in boxes), "box", "track critical", "critical path"),
        )
        return ((symbol, cls, name) for there, symbol, cls, name in shown if there)


def _width(box: Box) -> float:
    wide = max(text_width(_text(box)), text_width(_below(box), LABEL)) + 22
    return min(max(wide, NODE[0]), WIDER if box.amount or box.result else NODE[1])


def _below(box: Box) -> str:
    """Return the second line of the text of a box of several: their number, and their outputs."""
    return " → ".join(filter(None, (box.amount, shorten(box.result, 80)))) if box.amount else ""


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
    """Return the curve from (leaves, y1) to (enters, y2), which bends only between ranks.

    There are no nodes between ranks. An edge within a rank bends below it, or above it.
    """
    yield from ("M", route.leaves, y1)
    if y1 == y2:
        yield from (
            "C",
            route.leaves,
            y1 + 0.7 * gap,
            route.enters,
            y2 + 0.7 * gap,
            route.enters,
            y2,
        )
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
    lines += [f"  n{a} -> n{b} [{_dot_arrow(arrow)}];" for (a, b), arrow in found.arrows.items()]
    return "\n".join([*lines, "}"]) + "\n"


def _subgraph(frame: Frame, boxes: Sequence[Box]) -> Iterator[str]:
    inner = [f"  n{i} [{_dot_box(boxes[i])}];" for i in frame.boxes]
    if not frame.name:
        yield from inner
        return
    where = "" if frame.place in ("", frame.name) else f" on {frame.place}"
    yield f"  subgraph cluster{frame.boxes[0]} {{"
    yield f"    label={_quoted(frame.name + where)};"
    yield from ("  " + line for line in inner)
    yield "  }"


def _dot_box(box: Box) -> str:
    label = "\n".join(filter(None, (box.label, box.amount, box.result and f"→ {box.result}")))
    more = ", peripheries=2" * bool(box.amount) + ', penwidth=3, color="#1f2328"' * box.critical
    return f"label={_quoted(label)}, tooltip={_quoted(box.facts)}, {_BOXES[box.kind]}{more}"


def _dot_arrow(arrow: Arrow) -> str:
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
