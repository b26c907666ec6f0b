"""The graph as a picture: tasks as boxes in a column per device, time running downwards, as SVG. Knows no times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from autosched.graph import Graph, Task, Value
from autosched.viz.layers import Layout, Route, layout
from autosched.viz.paint import TITLE, document, escape, legend, natural, number, shorten, text_width

__all__ = ["graph_svg"]

BOX = 28.0  # the height of a node
PITCH = 62.0  # from one rank to the next
MARGIN = 20.0
HEADER = 40.0  # above the first rank, for the names of devices
NODE = (48.0, 150.0)  # how narrow and how wide nodes may be
NARROWEST = 500.0  # of the drawing, for the legend
NOWHERE = ""  # the column of what is placed nowhere yet

Node = Value | Task
Edge = tuple[int, int]  # positions among the sources and then the tasks
Kind = Literal["order", "data", "move"]


def graph_svg(graph: Graph, device: Mapping[str, str] | None = None, *, title: str = "") -> str:
    """Draw a graph as SVG: a column per device with the host in the middle, copies from one to another thick.

    ``device`` says where each task runs, by name, as ``Placement.device`` does; without it the constraints count.
    Order and anti dependencies are dashed; those that other dependencies imply are left out.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> "<title>matmul" in graph_svg(graph, {"matmul": "cuda:0"})
    True
    """
    nodes: list[Node] = [*graph.sources, *graph.tasks]
    places = _places(graph, device or {})
    devices = _columns(dict.fromkeys(places))
    edges = _edges(graph, places)
    widths = [min(max(text_width(node.name) + 22, NODE[0]), NODE[1]) for node in nodes]
    free = {i for i, node in enumerate(nodes) if isinstance(node, Value) or node.view}
    found = layout([devices.index(place) for place in places], widths, list(edges), free)
    top = MARGIN + 28 * bool(title) + HEADER * _headed(devices) + BOX / 2
    bottom = top + max(found.rank, default=0) * PITCH + BOX / 2 + 16
    whole = max(found.width, NARROWEST)
    body = [*_title(title, whole), f'<g transform="translate({number((whole - found.width) / 2)} 0)">']
    body += [*_panels(devices, found, top, bottom), *_arrows(edges, found, top)]
    for node, place, x, rank, width in zip(nodes, places, found.x, found.rank, widths, strict=True):
        body.append(_node(node, place, x, top + rank * PITCH, width))
    body += ["</g>", *legend(MARGIN, bottom + 24, _entries(nodes, edges))]
    return document(whole, bottom + 24 + MARGIN, title or f"graph {graph.name}", body)


def _places(graph: Graph, device: Mapping[str, str]) -> list[str]:
    """Return the device of each source and each task; a view is where its base is."""
    given = [device.get(task.name) or task.device for task in graph.tasks]
    known = [place for place in (*given, *(source.home for source in graph.sources)) if place]
    host = next(filter(_is_host, known), "cpu") if known else NOWHERE
    sources = {source.index: source.home or host for source in graph.sources}
    tasks: list[str] = []
    for task, place in zip(graph.tasks, given, strict=True):
        if place is None and task.view:
            base = graph.values[graph.values[task.outputs[0].value].root]
            tasks.append(sources[base.index] if base.producer is None else tasks[base.producer])
        else:
            tasks.append(place or NOWHERE)
    return [*sources.values(), *tasks]


def _is_host(device: str) -> bool:
    return device.partition(":")[0] == "cpu"


def _columns(devices: Iterable[str]) -> list[str]:
    """Return the devices from left to right: hosts in the middle, the others around them by name."""
    ordered = sorted(devices, key=lambda device: (device == NOWHERE, natural(device)))
    hosts = [device for device in ordered if _is_host(device)]
    others = [device for device in ordered if not _is_host(device)]
    half = (len(others) + 1) // 2
    return [*others[:half], *hosts, *others[half:]]


def _edges(graph: Graph, places: Sequence[str]) -> dict[Edge, Kind]:
    """Return what depends on what: on data that stays or moves, or on order alone where nothing else implies it."""
    source = {value.index: i for i, value in enumerate(graph.sources)}
    edges: dict[Edge, Kind] = {}
    behind: list[int] = []  # for each task the set of those it comes after, as bits
    for task in graph.tasks:
        node = len(source) + task.index
        before = [source[use.value] for use in task.reads if use.value in source and not use.version]
        implied = 0
        for dependency in task.dependencies:
            implied |= behind[dependency.task]
        for dependency in task.dependencies:
            if dependency.kind == "data":
                before.append(len(source) + dependency.task)
            elif not implied >> dependency.task & 1:
                edges[len(source) + dependency.task, node] = "order"
        for other in before:
            moves = places[other] != places[node] and NOWHERE not in (places[other], places[node])
            edges[other, node] = "move" if moves else "data"
        behind.append(implied | sum(1 << dependency.task for dependency in task.dependencies))
    return edges


def _title(title: str, width: float) -> Iterator[str]:
    if title:
        text = escape(shorten(title, width - 2 * MARGIN, TITLE))
        yield f'<text class="ink title" x="{number(MARGIN)}" y="{number(MARGIN + 16)}">{text}</text>'


def _headed(devices: Sequence[str]) -> bool:
    return devices not in ([], [NOWHERE])


def _panels(devices: Sequence[str], found: Layout, top: float, bottom: float) -> Iterator[str]:
    if not _headed(devices):
        return
    y = top - BOX / 2 - HEADER + 4
    for device, (left, right) in zip(devices, found.columns, strict=True):
        box = f'x="{number(left)}" y="{number(y)}" width="{number(right - left)}" height="{number(bottom - y)}"'
        yield f'<rect class="track column" {box} rx="6"/>'
        text = escape(shorten(device or "anywhere", right - left))
        yield f'<text class="ink strong middle" x="{number((left + right) / 2)}" y="{number(y + 22)}">{text}</text>'


def _node(node: Node, place: str, x: float, y: float, width: float) -> str:
    cls, ink, rx = "input", "ink", BOX / 2
    if isinstance(node, Task):
        cls, ink, rx = ("view", "ink", 4) if node.view else ("task", "on-task", 4)
    box = f'x="{number(x - width / 2)}" y="{number(y - BOX / 2)}" width="{number(width)}" height="{number(BOX)}"'
    facts = f"{node.name}\n{cls}" + (f" on {place}" if place else "")
    text = escape(shorten(node.name, width - 12))
    return (
        f'<rect class="{cls}" {box} rx="{number(rx)}"><title>{escape(facts)}</title></rect>'
        f'<text class="{ink} middle" x="{number(x)}" y="{number(y + 4)}">{text}</text>'
    )


def _arrows(edges: Mapping[Edge, Kind], found: Layout, top: float) -> Iterator[str]:
    """Draw all edges, those that matter most last."""
    drawn: dict[Kind, list[str]] = {"order": [], "data": [], "move": []}
    for ((a, b), kind), route in zip(edges.items(), found.routes, strict=True):
        path = _path(route, top + found.rank[a] * PITCH + BOX / 2, top + found.rank[b] * PITCH - BOX / 2)
        drawn[kind].append(f'<path class="line {kind}" d="{path}"/>')
    for paths in drawn.values():
        yield from paths


def _path(route: Route, y1: float, y2: float) -> str:
    """Return the curve from (leaves, y1) to (enters, y2), which turns only between ranks, where no node can be."""
    if route.passes is None:
        return f"M{number(route.leaves)} {number(y1)}" + _turn(route.leaves, y1, route.enters, y2)
    gap = PITCH - BOX
    first, last = y1 + gap, y2 - gap
    return (
        f"M{number(route.leaves)} {number(y1)}{_turn(route.leaves, y1, route.passes, first)}"
        f"V{number(last)}{_turn(route.passes, last, route.enters, y2)}"
    )


def _turn(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = number((y1 + y2) / 2)
    return f"C{number(x1)} {middle} {number(x2)} {middle} {number(x2)} {number(y2)}"


def _entries(nodes: Sequence[Node], edges: Mapping[Edge, Kind]) -> Iterator[tuple[str, str, str]]:
    """Explain what occurs, and only that."""
    kinds = list(edges.values())
    tasks = [node for node in nodes if isinstance(node, Task)]
    shown = (
        (len(tasks) < len(nodes), "pill", "input", "input"),
        (any(not task.view for task in tasks), "box", "task", "task"),
        (any(task.view for task in tasks), "box", "view", "view"),
        ("data" in kinds, "line", "line data", "data"),
        ("move" in kinds, "line", "line move", "data copied"),
        ("order" in kinds, "line", "line order", "order only"),
    )
    return ((symbol, cls, text) for there, symbol, cls, text in shown if there)
