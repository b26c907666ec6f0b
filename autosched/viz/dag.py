"""Draw a graph as SVG, with boxes in a column per device, or in the DOT language of Graphviz.

Time runs downwards, but the drawing knows no times. A graph of few nodes is shown whole. A large
one is folded, by one rule for all pictures:

1. The tasks of a module, a device and a phase are one box, at the deepest level of modules that
   gives few enough boxes; without modules, a chain of tasks is one.
2. Where that gives too many, the tasks of a device in a band of successive levels are one box.

In the first case the boxes form a DAG: where sharing a box would create a cycle, the later task
begins another. In the second, boxes of one band may depend on each other both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from autosched._lib.allowed import is_cpu
from autosched._lib.text import common_prefix, natural
from autosched._lib.text import count as plural
from autosched.errors import ChartError, shown
from autosched.graph.graph import Graph
from autosched.viz.layered_layout import Route, layout
from autosched.viz.svg import (
    LABEL,
    PHASES,
    TITLE,
    document,
    legal,
    legend,
    legend_width,
    number,
    path,
    rect,
    shorten,
    shorten_path,
    text,
    text_width,
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
NOWHERE = ""  # the device of unplaced tasks
MOST_NAMES = 12  # in the tooltip of a box
MOST_BANDS = 24
MOST_PLACES = 12  # devices that a graph is folded by
WHOLE = 90  # tasks of a graph that is not folded in a page
OPENED = 250  # the same for a part of it
PARTS = (70, 100)  # of a page's graph: at most the first, or the second if they are large
MOST_OUTER = 60  # arrows to and from boxes around a part; of more, the first and last are shown
BUDGET = 30_000  # boxes in all parts of a page
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

Edge = tuple[int, int]
Keys = Sequence[Hashable]
Path = tuple[str, ...]
# Data, copied to another device or not, or only order. Of several dependencies between two boxes
# the first of these counts. In a simplified graph, data that also arrive by other boxes are faint.
Kind = Literal["move", "data", "anti", "order", "faint"]
KINDS: Sequence[Kind] = ("move", "data", "anti", "order", "faint")


@dataclass(frozen=True)
class Box:
    """A source or a task, or several on one device, with their label and ``names``.

    ``phase`` is their common phase if that is not the forward pass; ``outputs`` are the outputs of
    the graph that they are or make.
    """

    kind: Literal["input", "task", "view"]
    label: str
    place: str
    names: tuple[str, ...]
    phase: str = ""
    outputs: tuple[str, ...] = ()

    @property
    def amount(self) -> str:
        """The number of its members, in words; "" for one."""
        return f"{len(self.names):,} {self.kind}s" if len(self.names) > 1 else ""

    @property
    def result(self) -> str:
        """Its outputs, in words."""
        if len(self.outputs) > 1:
            return f"{len(self.outputs):,} outputs"
        return self.outputs[0] if self.outputs else ""

    @property
    def facts(self) -> str:
        """The text of its tooltip, in some lines."""
        where = f" on {self.place}" if self.place else ""
        lines = [self.label, f"{self.amount or self.kind}{where}"]
        if self.amount:
            rest = len(self.names) - MOST_NAMES
            lines += [*self.names[:MOST_NAMES], *[f"and {rest:,} more"] * (rest > 0)]
        if self.outputs:
            lines.append(f"output {', '.join(self.outputs[:MOST_NAMES])}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Diagram:
    """Boxes in topological order, and arrows by positions; a note on its extent if simplified.

    With ``rank``, boxes are in bands, and arrows may lead from one to another of the same band.
    """

    boxes: Sequence[Box]
    arrows: Mapping[Edge, Kind]
    note: str = ""
    rank: Sequence[int] | None = None


# ---- SVG


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
    """Yield the drawings of a graph in a page: the whole, folded if need be, and each part, opened.

    Each has its name, which box of which drawing it opens, the positions of the tasks in each box,
    what boxes of several are called, and the boxes where each arrow begins and ends. Each box is a
    group of the drawing. A part is shown with the boxes around it. Sources are left out.
    """
    nodes = _Nodes(graph, device)
    first = nodes.sources
    users: dict[int, list[int]] = {}
    for i, others in enumerate(nodes.predecessors):
        for other in others:
            users.setdefault(other, []).append(i)
    waiting: list[tuple[str, Edge, Sequence[int], list[list[int]]]] = [
        (graph.name, (-1, -1), range(first, len(nodes.names)), [])
    ]
    drawn = 0
    for part, (name, opens, within, around) in enumerate(waiting):
        groups = [[i] for i in within]
        rank = None
        if len(within) > (OPENED if part else WHOLE):
            most = min(max(PARTS[0], len(within) // 200), PARTS[1])
            groups, rank = nodes.folded(within, None, most)
        inside = set(within)
        before = {i for node in within for i in nodes.predecessors[node]} - inside
        after = {i for node in within for i in users.get(node, ())} - inside
        above = [group for group in around if not before.isdisjoint(group)]
        below = [group for group in around if not after.isdisjoint(group)]
        if rank is not None:
            rank = [-1] * len(above) + rank + [max(rank) + 1] * len(below)
        everything = [*above, *groups, *below]
        found = nodes.diagram(everything, rank, len(above), len(above) + len(groups), after)
        drawing = _Drawing(found, PAGE_PITCH)
        body, width, height = drawing.svg(in_page=True)
        yield {
            "name": name,
            "opens": opens,
            "members": [[i - first for i in group] for group in everything],
            "text": [_text(box) if box.amount else "" for box in found.boxes],
            "size": [round(width), round(height)],
            "svg": "".join(body),
            "arrows": [ends for ends, _, _ in drawing.arrows],
        }
        drawn += len(everything)
        for at, group in enumerate(groups, len(above)):
            if len(group) > 1 and drawn + len(group) < BUDGET:
                drawn += len(group)
                beside = [other for other in (*around, *groups) if other is not group]
                box = found.boxes[at]
                where = f" on {box.place}" if box.place else ""
                waiting.append((f"{box.label}{where}", (part, at), group, beside))


def _devices(found: Diagram) -> list[str]:
    """Return the devices from left to right: hosts in the middle, others around them by name."""
    devices = {box.place for box in found.boxes}
    ordered = sorted(devices, key=lambda device: (device == NOWHERE, natural(device)))
    hosts = [device for device in ordered if is_cpu(device)]
    others = [device for device in ordered if not is_cpu(device)]
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


# ---- boxes and arrows


def diagram(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    depth: int | None = None,
    most: float = 200,
) -> Diagram:
    """Return the diagram of a graph; the parameters are those of ``graph_svg``."""
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        expected = "a number of levels of modules, 0 or more, or None"
        raise ChartError(f"depth must be {expected}, got {shown(depth)}")
    nodes = _Nodes(graph, device or {})
    groups = [[i] for i in range(len(nodes.names))]
    rank = None
    if depth is not None or len(groups) > most:
        groups, rank = nodes.with_sources(depth, most)
        if depth is None and len(groups) > most:  # sources have boxes, too
            groups, rank = nodes.with_sources(depth, max(2 * most - len(groups), 1))
    found = nodes.diagram(groups, rank)
    inputs = plural(nodes.sources, "input")
    note = f"{len(graph.tasks):,} tasks and {inputs} in {len(groups):,} boxes"
    return replace(found, note=note if len(groups) < len(nodes.names) else "")


# ---- nodes


@dataclass
class _Nodes:
    """The sources and then the tasks of a graph, with columns of facts about them."""

    graph: Graph
    device: Mapping[str, str]
    predecessors: list[dict[int, Kind]] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        first = self.sources = len(graph.sources)
        self.names = [source.name for source in graph.sources]
        self.names += [task.name for task in graph.tasks]
        self.kinds: list[Literal["input", "task", "view"]] = ["input"] * first
        self.kinds += ["view" if task.view else "task" for task in graph.tasks]
        modules = [task.origin.module for task in graph.tasks]
        self.paths: list[Path] = [()] * first
        self.paths += [tuple(module.split(".")) if module else () for module in modules]
        self.phases = [""] * first
        phases = [task.origin.phase for task in graph.tasks]
        self.phases += ["" if phase == "forward" else phase for phase in phases]
        self.places = _places(graph, self.device)
        self.predecessors = _predecessors(graph, self.places)
        self._boxes: dict[tuple[int, ...], Box] = {}
        makers = {value.index: i for i, value in enumerate(graph.sources)}
        for task in graph.tasks:
            written = [use.value for use in (*task.outputs, *task.changes)]
            makers |= dict.fromkeys(written, first + task.index)
        self.outputs: dict[int, list[str]] = {}
        for label, value in graph.outputs.items():
            self.outputs.setdefault(makers[value], []).append(label)

    def folded(
        self, within: Sequence[int], depth: int | None, most: float
    ) -> tuple[list[list[int]], list[int] | None]:
        """Return groups of these nodes, in topological order, and their bands if there are any."""
        number = {node: i for i, node in enumerate(within)}
        before = [[number[i] for i in self.predecessors[node] if i in number] for node in within]
        several = len({self.places[node] for node in within}) > MOST_PLACES
        keys = [("" if several else self.places[i], self.phases[i]) for i in within]
        part, rank = fold(before, keys, [self.paths[i] for i in within], depth, most)
        groups: list[list[int]] = [[] for _ in range(max(part, default=-1) + 1)]
        for i, box in enumerate(part):
            groups[box].append(within[i])
        return groups, rank

    def with_sources(
        self, depth: int | None, most: float
    ) -> tuple[list[list[int]], list[int] | None]:
        """Fold tasks, and sources by their devices and the box of their first reader."""
        tasks = range(self.sources, len(self.names))
        groups, rank = self.folded(tasks, depth, most)
        box = {node: i for i, group in enumerate(groups) for node in group}
        reader: dict[int, int] = {}
        for node in tasks:
            for other in self.predecessors[node]:
                reader.setdefault(other, box[node])
        found: dict[tuple[str, int | None], list[int]] = {}
        for i in range(self.sources):
            found.setdefault((self.places[i], reader.get(i)), []).append(i)
        if rank is not None:
            rank = [rank[at] - 1 if at is not None else -1 for _, at in found] + rank
        return [*found.values(), *groups], rank

    def diagram(
        self,
        groups: Sequence[Sequence[int]],
        rank: Sequence[int] | None = None,
        first: int = 0,
        last: int | None = None,
        after: Collection[int] = (),
    ) -> Diagram:
        """Return the diagram of groups; those before ``first`` only come before the others.

        Those from ``last`` on only come after them, and may be the same; ``after`` are the nodes
        there that need one of the others.
        """
        last = len(groups) if last is None else last
        source = {node: i for i, group in enumerate(groups[:last]) for node in group}
        target = {
            node: i
            for i, group in enumerate(groups[first:], first)
            for node in group
            if i < last or node in after
        }
        is_simplified = any(len(group) > 1 for group in groups)
        found = self._arrows(source, target, is_simplified, rank)
        arrows = {(a, b): found[a, b] for a, b in found if a >= first or b < last}
        outer = sorted((a, b) for a, b in arrows if a < first or b >= last)
        most = {b: a for a, b in outer}
        least = dict(reversed(outer))
        for a, b in outer if len(outer) > MOST_OUTER else ():
            if least[a] != b and most[b] != a:
                del arrows[a, b]
        return Diagram(self._distinguished(groups), arrows, rank=rank)

    def _distinguished(self, groups: Sequence[Sequence[int]]) -> list[Box]:
        """Return boxes, those of equal labels labelled by their first and last module if they differ."""
        boxes = [self._box(tuple(group)) for group in groups]
        counts = Counter((box.kind, box.label) for box in boxes)
        for i, (box, group) in enumerate(zip(boxes, groups, strict=True)):
            if counts[box.kind, box.label] == 1 and " … " not in box.label:
                continue
            level = len(common_prefix(self.paths[node] for node in group)) + 1
            first, last = (".".join(self.paths[node][:level]) for node in (group[0], group[-1]))
            if first and last and first != last:
                label = " ".join(filter(None, (f"{first} … {last}", box.phase)))
                boxes[i] = replace(box, label=label)
        return boxes

    def _box(self, group: tuple[int, ...]) -> Box:
        """Return a box for sources or for tasks, labelled by their common module and phase."""
        if group in self._boxes:  # boxes around one part are often around another
            return self._boxes[group]
        names = tuple(self.names[i] for i in group)
        kinds = {self.kinds[i] for i in group}
        phases = {self.phases[i] for i in group}
        places = {self.places[i] for i in group}
        phase = phases.pop() if len(phases) == 1 else ""
        module = common_prefix(self.paths[i] for i in group)
        if kinds == {"input"}:  # parameters are named by their modules
            module = common_prefix(name.split(".")[:-1] for name in names)
        title = " ".join(filter(None, (".".join(module), phase)))
        label = names[0] if len(names) == 1 else title or f"{names[0]} … {names[-1]}"
        place = places.pop() if len(places) == 1 else f"{len(places)} devices"
        outputs = tuple(label for i in group for label in self.outputs.get(i, ()))
        kind = kinds.pop() if len(kinds) == 1 else "task"
        self._boxes[group] = Box(kind, label, place, names, phase, outputs)
        return self._boxes[group]

    def _arrows(
        self,
        source: Mapping[int, int],
        target: Mapping[int, int],
        is_simplified: bool,
        rank: Sequence[int] | None,
    ) -> dict[Edge, Kind]:
        """Return the arrows between boxes, those of order alone only if no others imply them.

        In a simplified graph, sources have arrows to their first readers only, since parameters are
        read almost everywhere.
        """
        found: dict[Edge, Kind] = {}
        reader: dict[int, int] = {}  # by source, the box of its first reader
        for node, box in sorted(target.items()):
            for other, kind in self.predecessors[node].items():
                if other not in source or source[other] == box:
                    continue
                if other < self.sources and is_simplified and reader.setdefault(other, box) != box:
                    continue
                edge = source[other], box
                found[edge] = min(found.get(edge, kind), kind, key=KINDS.index)
        implied = _implied(found)
        if rank is not None:  # where bands hide which data goes where, those nearby are enough
            return {
                (a, b): kind
                for (a, b), kind in found.items()
                if (a, b) not in implied or rank[b] - rank[a] < 2
            }
        return {
            edge: "faint" if is_simplified and kind == "data" and edge in implied else kind
            for edge, kind in found.items()
            if kind in ("move", "data") or edge not in implied
        }


def _places(graph: Graph, device: Mapping[str, str]) -> list[str]:
    """Return the device of each source and each task; views are on the device of their base."""
    given = [device.get(task.name) or task.device for task in graph.tasks]
    known = [place for place in (*given, *(source.home for source in graph.sources)) if place]
    host = next(filter(is_cpu, known), "cpu") if known else NOWHERE
    sources = {source.index: source.home or host for source in graph.sources}
    tasks: list[str] = []
    for task, place in zip(graph.tasks, given, strict=True):
        if place is None and task.view:
            base = graph.values[graph.values[task.outputs[0].value].root]
            tasks.append(sources[base.index] if base.producer is None else tasks[base.producer])
        else:
            tasks.append(place or NOWHERE)
    return [*sources.values(), *tasks]


def _predecessors(graph: Graph, places: Sequence[str]) -> list[dict[int, Kind]]:
    """Return the predecessors of each source and each task, and the kinds of dependencies."""
    source = {value.index: i for i, value in enumerate(graph.sources)}
    predecessors: list[dict[int, Kind]] = [{} for _ in source]
    for task in graph.tasks:
        here = places[len(source) + task.index]
        reads = (value for value, version in task.reads if value in source and not version)
        found: dict[int, Kind] = {source[value]: "data" for value in reads}
        found |= {len(source) + other.task: other.kind for other in task.dependencies}
        for other, kind in found.items():
            if kind == "data" and places[other] != here and NOWHERE not in (places[other], here):
                found[other] = "move"
        predecessors.append(found)
    return predecessors


def _implied(edges: Iterable[Edge]) -> set[Edge]:
    """Return the edges that paths of other edges to higher numbers imply."""
    direct: dict[int, list[int]] = {}
    for a, b in edges:
        direct.setdefault(b, []).append(a)
    ancestors: dict[int, int] = {}  # by box, as a bit set
    implied = set()
    for box in sorted(direct):
        distant = 0
        for other in direct[box]:
            distant |= ancestors.get(other, 0)
        implied |= {(other, box) for other in direct[box] if distant >> other & 1}
        ancestors[box] = distant | sum(1 << other for other in direct[box])
    return implied


# ---- folding


def fold(
    predecessors: Sequence[Sequence[int]],
    keys: Keys,
    paths: Sequence[Path],
    depth: int | None,
    most: float,
) -> tuple[list[int], list[int] | None]:
    """Return the box of each node, and the band of each box if boxes are of bands.

    Nodes of a box have one key. ``predecessors`` of each node come before it. ``depth`` is the
    number of parts of a path that are distinguished; if None, as many as give at most ``most``
    boxes; if no number does, boxes are of bands.
    """
    if depth is not None:
        cut = [(key, path[:depth]) for key, path in zip(keys, paths, strict=True)]
        return acyclic_partition(cut, predecessors), None
    levels = max(map(len, paths), default=0)
    by_path = (
        [(key, path[:n]) for key, path in zip(keys, paths, strict=True)]
        for n in range(levels, 0, -1)
    )
    for candidate in by_path if levels else [_chains(keys, predecessors)]:
        if len(set(candidate)) <= most:
            part = acyclic_partition(candidate, predecessors, most)
            if max(part, default=0) < most:
                return part, None
    return _bands(predecessors, keys, most)


def _chains(keys: Keys, predecessors: Sequence[Sequence[int]]) -> Keys:
    """Return keys shared by nodes of a chain, which others enter and leave only at its ends."""
    successors = Counter(node for nodes in predecessors for node in nodes)
    chain: list[int] = []
    for i, nodes in enumerate(predecessors):
        joins = len(nodes) == 1 and successors[nodes[0]] == 1 and keys[nodes[0]] == keys[i]
        chain.append(chain[nodes[0]] if joins else i)
    return chain


def _bands(
    predecessors: Sequence[Sequence[int]], keys: Keys, most: float
) -> tuple[list[int], list[int]]:
    """Return boxes of nodes of one key in bands of successive levels with about as many nodes."""
    level: list[int] = []
    for nodes in predecessors:
        level.append(1 + max((level[node] for node in nodes), default=-1))
    count = Counter(level)
    above = [0, *accumulate(count[i] for i in range(len(count)))]
    bands = min(max(int(most) // len(set(keys)), 1), MOST_BANDS)
    bands = -(-len(count) // -(-len(count) // bands))  # bands of as many levels look alike
    found = [(above[i] * bands // len(level), keys[node]) for node, i in enumerate(level)]
    ordered = sorted(set(found), key=lambda box: (box[0], str(box[1])))
    boxes = {box: i for i, box in enumerate(ordered)}
    rank = {band: i for i, band in enumerate(dict.fromkeys(band for band, _ in ordered))}
    return [boxes[box] for box in found], [rank[band] for band, _ in ordered]


def acyclic_partition(
    keys: Keys, predecessors: Sequence[Sequence[int]], most: float = float("inf")
) -> list[int]:
    """Return the box of each node 0, 1, ..., whose predecessors have lower numbers.

    Boxes are numbered in topological order. If they become more than ``most``, the result is not
    complete.

    >>> acyclic_partition("aba", [[], [], [0]]), acyclic_partition("aba", [[], [0], [1]])
    ([0, 1, 0], [0, 1, 2])
    """
    latest: dict[Hashable, int] = {}  # the last box of each key
    ancestors: list[int] = []  # of each box, as a bit set
    found: list[int] = []
    for key, nodes in zip(keys, predecessors, strict=True):
        box = latest.get(key, -1)
        mine = 0
        for other in {found[node] for node in nodes} - {box}:
            mine |= ancestors[other] | 1 << other
        if box < 0 or mine >> box & 1:
            box = latest[key] = len(ancestors)
            ancestors.append(mine)
        elif mine & ~ancestors[box]:
            for other, known in enumerate(ancestors):
                if other == box or known >> box & 1:
                    ancestors[other] |= mine
        found.append(box)
        if len(ancestors) > most:
            return found
    # An ancestor of a box has fewer ancestors than the box, so that their number is a topological
    # order.
    order = sorted(range(len(ancestors)), key=lambda box: ancestors[box].bit_count())
    number = {box: i for i, box in enumerate(order)}
    return [number[box] for box in found]
