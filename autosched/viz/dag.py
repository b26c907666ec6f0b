"""The graph as a picture: tasks as boxes in a column per device, time running downwards, as SVG. Knows no times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autosched.graph import Graph
from autosched.viz.frames import Frame, grouped
from autosched.viz.layers import Layout, Route, layout
from autosched.viz.outline import KINDS, NOWHERE, Arrow, Box, Edge, Outline, is_host, outline
from autosched.viz.paint import TITLE, document, escape, legend, legend_width, natural, number, shorten, text_width

__all__ = ["graph_svg"]

BOX = 28.0  # the height of a node
PITCH = 62.0  # from one rank to the next
MARGIN = 20.0
HEADER = 40.0  # above the first rank, for the names of devices
FRAME = (21.0, 7.0)  # above and below the boxes of a frame
NODE = (48.0, 150.0)  # how narrow and how wide nodes may be
TITLED = 700.0  # how wide a title makes the drawing, at most
WIDER = 230.0  # how wide those may be that stand for several


def graph_svg(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    title: str = "",
    group: str = "device",
    depth: int | None = None,
    most: float = 200,
    critical: Iterable[str] = (),
) -> str:
    """Draw a graph as SVG: a column per device with the host in the middle, copies from one to another thick.

    ``device`` says where each task runs, by name, as ``Placement.device`` does; without it the constraints count.
    With ``group="module"``, what is of one module has a frame around it. Of a graph of more than ``most`` inputs and
    tasks, a module is one box, at the deepest level that gives no more boxes; with ``depth``, at that level.
    ``critical`` are the names of tasks or copies along a path, to be marked. Order and anti dependencies are dashed and
    dotted; those that other dependencies imply are left out. Raises ChartError for names that are unknown.

    >>> graph = Graph("one product")
    >>> x, w = graph.inputs("x", "w")
    >>> product = x @ w
    >>> "<title>matmul" in graph_svg(graph, {"matmul": "cuda:0"})
    True
    """
    drawn, frames = grouped(outline(graph, device, depth=depth, most=most, critical=critical), group)
    return _drawing(drawn, frames if group == "module" else [], title, f"graph {graph.name}")


def _drawing(drawn: Outline, frames: Sequence[Frame], title: str, name: str) -> str:
    boxes = drawn.boxes
    devices = _columns(dict.fromkeys(box.place for box in boxes))
    widths = [_width(box) for box in boxes]
    free = {i for i, box in enumerate(boxes) if box.kind != "task"}
    bands = [band for band, frame in enumerate(frames) for _ in frame.boxes]
    found = layout([devices.index(box.place) for box in boxes], widths, list(drawn.arrows), free, bands)
    entries = list(_entries(drawn))
    named = min(max(text_width(title, TITLE), text_width(drawn.said)), TITLED)
    whole = max(found.width, legend_width(entries) + 2 * MARGIN, named + 2 * MARGIN + 1)
    head, top = _head(title, drawn.said, whole)
    top += HEADER * _headed(devices) + FRAME[0] * bool(frames) + BOX / 2
    bottom = top + max(found.rank, default=0) * PITCH + BOX / 2 + 16
    body = [*head, f'<g transform="translate({number((whole - found.width) / 2)} 0)">']
    body += _panels(devices, found, top - BOX / 2 - HEADER - FRAME[0] * bool(frames) + 4, bottom)
    body += [*_frames(frames, found, widths, top), *_arrows(drawn.arrows, found, top)]
    for box, x, rank, width in zip(boxes, found.x, found.rank, widths, strict=True):
        body.append(_node(box, x, top + rank * PITCH, width))
    body += ["</g>", *legend(MARGIN, bottom + 24, entries)]
    return document(whole, bottom + 24 + MARGIN, title or name, body)


def _width(box: Box) -> float:
    return min(max(text_width(_text(box)) + 22, NODE[0]), WIDER if box.amount else NODE[1])


def _text(box: Box, width: float = 1e6) -> str:
    """Return what stands in a box: its name, shortened if need be, and how many it stands for."""
    amount = f" · {box.amount}" if box.amount else ""
    return shorten(box.label, width - text_width(amount)) + amount


def _columns(devices: Iterable[str]) -> list[str]:
    """Return the devices from left to right: hosts in the middle, the others around them by name."""
    ordered = sorted(devices, key=lambda device: (device == NOWHERE, natural(device)))
    hosts = [device for device in ordered if is_host(device)]
    others = [device for device in ordered if not is_host(device)]
    half = (len(others) + 1) // 2
    return [*others[:half], *hosts, *others[half:]]


def _head(title: str, said: str, width: float) -> tuple[list[str], float]:
    """Write the title, and how much it is a picture of; return them, and where the picture begins."""
    drawn, y = [], MARGIN
    if title:
        text = escape(shorten(title, width - 2 * MARGIN, TITLE))
        drawn.append(f'<text class="ink title" x="{number(MARGIN)}" y="{number(y + 16)}">{text}</text>')
        y += 28
    if said:
        drawn.append(f'<text class="muted" x="{number(MARGIN)}" y="{number(y + 10)}">{escape(said)}</text>')
        y += 24
    return drawn, y


def _headed(devices: Sequence[str]) -> bool:
    return devices not in ([], [NOWHERE])


def _panels(devices: Sequence[str], found: Layout, top: float, bottom: float) -> Iterator[str]:
    if not _headed(devices):
        return
    for device, (left, right) in zip(devices, found.columns, strict=True):
        box = f'x="{number(left)}" y="{number(top)}" width="{number(right - left)}" height="{number(bottom - top)}"'
        yield f'<rect class="track column" {box} rx="6"/>'
        text = escape(shorten(device or "anywhere", right - left))
        yield f'<text class="ink strong middle" x="{number((left + right) / 2)}" y="{number(top + 22)}">{text}</text>'


def _frames(frames: Iterable[Frame], found: Layout, widths: Sequence[float], top: float) -> Iterator[str]:
    """Draw a frame around the boxes of each module, with its name in a corner."""
    for frame in frames:
        if not frame.name:
            continue
        ranks = [found.rank[i] for i in frame.boxes]
        left = min(found.x[i] - widths[i] / 2 for i in frame.boxes) - 9
        right = max(found.x[i] + widths[i] / 2 for i in frame.boxes) + 9
        right = max(right, left + min(text_width(frame.name) + 16, 180))
        y = top + min(ranks) * PITCH - BOX / 2 - FRAME[0]
        height = (max(ranks) - min(ranks)) * PITCH + BOX + sum(FRAME)
        box = f'x="{number(left)}" y="{number(y)}" width="{number(right - left)}" height="{number(height)}"'
        text = escape(shorten(frame.name, right - left - 12))
        yield f'<rect class="frame" {box} rx="5"/>'
        yield f'<text class="muted halo" x="{number(left + 8)}" y="{number(y + 14)}">{text}</text>'


def _node(box: Box, x: float, y: float, width: float) -> str:
    left, top, rx = x - width / 2, y - BOX / 2, BOX / 2 if box.kind == "input" else 4
    size = f'width="{number(width)}" height="{number(BOX)}" rx="{number(rx)}"'
    cls = box.kind + " critical" * box.critical
    behind = f'<rect class="{box.kind}" x="{number(left + 4)}" y="{number(top + 4)}" {size}/>' if box.amount else ""
    text = escape(_text(box, width - 12))
    return (
        f'{behind}<rect class="{cls}" x="{number(left)}" y="{number(top)}" {size}><title>{escape(box.facts)}</title>'
        f'</rect><text class="{"on-task" if box.kind == "task" else "ink"} middle" x="{number(x)}" '
        f'y="{number(y + 4)}">{text}</text>'
    )


def _arrows(arrows: Mapping[Edge, Arrow], found: Layout, top: float) -> Iterator[str]:
    """Draw all arrows, those that matter most last."""
    drawn: list[tuple[tuple[bool, bool, int], str]] = []
    for ((a, b), arrow), route in zip(arrows.items(), found.routes, strict=True):
        path = _path(route, top + found.rank[a] * PITCH + BOX / 2, top + found.rank[b] * PITCH - BOX / 2)
        cls = f"line {arrow.kind}" + " faint" * arrow.faint + " along" * arrow.critical
        weight = arrow.critical, not arrow.faint, -KINDS.index(arrow.kind)
        drawn.append((weight, f'<path class="{cls}" d="{path}"/>'))
    return (path for _, path in sorted(drawn, key=lambda item: item[0]))


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


def _entries(drawn: Outline) -> Iterator[tuple[str, str, str]]:
    """Explain what occurs, and only that."""
    boxes = {box.kind for box in drawn.boxes}
    kinds = {arrow.kind for arrow in drawn.arrows.values()}
    shown = (
        ("input" in boxes, "pill", "input", "input"),
        ("task" in boxes, "box", "task", "task"),
        ("view" in boxes, "box", "view", "view"),
        (any(box.amount for box in drawn.boxes), "stack", "task", "several"),
        ("data" in kinds, "line", "line data", "data"),
        (any(arrow.faint for arrow in drawn.arrows.values()), "line", "line data faint", "data from afar"),
        ("move" in kinds, "line", "line move", "data copied"),
        ("anti" in kinds, "line", "line anti", "write after read"),
        ("order" in kinds, "line", "line order", "order only"),
        (any(box.critical for box in drawn.boxes), "box", "track critical", "critical path"),
    )
    return ((symbol, cls, text) for there, symbol, cls, text in shown if there)
