"""Draw a graph as SVG: boxes in a column per device.

Time runs downwards, but the drawing knows no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autosched.graph.graph import Graph
from autosched.viz.frames import Frame, grouped
from autosched.viz.layers import Layout, Route, layout
from autosched.viz.outline import KINDS, NOWHERE, Arrow, Box, Edge, Outline, is_host, outline
from autosched.viz.paint import (
    PHASES,
    TITLE,
    document,
    escape,
    legend,
    legend_width,
    natural,
    number,
    shorten,
    shorten_path,
    text_width,
)

__all__ = ["graph_svg"]

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
    title: str = "",
    group: str = "device",
    depth: int | None = None,
    most: float | None = None,
    critical: Iterable[str] = (),
) -> str:
    """Draw a graph as SVG: a column per device with the host in the middle, copies thick.

    ``device`` has the device of each task, by name, as ``Placement.device`` does; without it the
    constraints count. With ``group="module"``, the boxes of a module have a frame around them. In a
    graph of more than ``most`` inputs and tasks, a module is one box, at the deepest level that
    gives no more boxes; with ``depth``, at that level. Without both, at most 200 boxes are drawn,
    and fewer if the picture were higher than 2,500 pixels otherwise. Tasks of a backward pass and
    of optimizers have colours of their own.

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
    bounded = depth is None and most is None
    boxes = MOST if most is None else most
    while True:
        drawn, frames = grouped(
            outline(graph, device, depth=depth, most=boxes, critical=critical), group
        )
        frames = frames if group == "module" else []
        found = _layout(drawn, frames)
        least = BOX + sum(FRAME) + 2 if frames else DENSE
        pitch = min(TALL / (max(found.rank, default=0) + 1), PITCH) if bounded else PITCH
        if pitch >= least or boxes <= 1:
            return _drawing(drawn, frames, found, (title, f"graph {graph.name}"), pitch)
        boxes = min(boxes, len(drawn.boxes)) * 3 // 4


def _layout(drawn: Outline, frames: Sequence[Frame]) -> Layout:
    """Return the layout of boxes and arrows, in a column per device."""
    devices = _columns(dict.fromkeys(box.place for box in drawn.boxes))
    free = {i for i, box in enumerate(drawn.boxes) if box.kind != "task"}
    bands = [band for band, frame in enumerate(frames) for _ in frame.boxes]
    column = [devices.index(box.place) for box in drawn.boxes]
    return layout(column, [_width(box) for box in drawn.boxes], list(drawn.arrows), free, bands)


def _drawing(
    drawn: Outline, frames: Sequence[Frame], found: Layout, called: tuple[str, str], pitch: float
) -> str:
    boxes, (title, name) = drawn.boxes, called
    devices = _columns(dict.fromkeys(box.place for box in boxes))
    widths = [_width(box) for box in boxes]
    phased = len({box.phase for box in boxes if box.kind == "task"}.intersection(("", *PHASES))) > 1
    entries = list(_entries(drawn))
    named = min(max(text_width(title, TITLE), text_width(drawn.said)), TITLED)
    whole = max(found.width, legend_width(entries) + 2 * MARGIN, named + 2 * MARGIN + 1)
    head, top = _head(title, drawn.said, whole)
    top += HEADER * _headed(devices) + FRAME[0] * bool(frames) + BOX / 2
    bottom = top + max(found.rank, default=0) * pitch + BOX / 2 + 16
    body = [*head, f'<g transform="translate({number((whole - found.width) / 2)} 0)">']
    body += _panels(devices, found, top - BOX / 2 - HEADER - FRAME[0] * bool(frames) + 4, bottom)
    body += [*_frames(frames, found, widths, top, pitch), *_arrows(drawn.arrows, found, top, pitch)]
    for box, x, rank, width in zip(boxes, found.x, found.rank, widths, strict=True):
        body.append(_node(box, x, top + rank * pitch, width, phased))
    body += ["</g>", *legend(MARGIN, bottom + 24, entries)]
    return document(whole, bottom + 24 + MARGIN, title or name, body)


def _width(box: Box) -> float:
    return min(max(text_width(_text(box)) + 22, NODE[0]), WIDER if box.amount else NODE[1])


def _text(box: Box, width: float = 1e6) -> str:
    """Return the text of a box: its name, shortened if necessary, and the number of its members."""
    amount = f" · {box.amount}" if box.amount else ""
    width -= text_width(amount)
    if " … " not in box.label:
        return shorten_path(box.label, width) + amount
    first, last = box.label.split(" … ", 1)
    half = (width - text_width(" … ")) / 2
    room = width - text_width(" … ") - min(text_width(last), half)
    first = shorten_path(first, room)
    return f"{first} … {shorten_path(last, width - text_width(first) - text_width(' … '))}{amount}"


def _columns(devices: Iterable[str]) -> list[str]:
    """Return the devices from left to right: hosts in the middle, others around them by name."""
    ordered = sorted(devices, key=lambda device: (device == NOWHERE, natural(device)))
    hosts = [device for device in ordered if is_host(device)]
    others = [device for device in ordered if not is_host(device)]
    half = (len(others) + 1) // 2
    return [*others[:half], *hosts, *others[half:]]


def _head(title: str, said: str, width: float) -> tuple[list[str], float]:
    """Draw the title with the extent of the picture; return it and the top of the drawing."""
    drawn = []
    y = MARGIN
    if title:
        text = escape(shorten(title, width - 2 * MARGIN, TITLE))
        drawn.append(
            f'<text class="ink title" x="{number(MARGIN)}" y="{number(y + 16)}">{text}</text>'
        )
        y += 28
    if said:
        drawn.append(
            f'<text class="muted" x="{number(MARGIN)}" y="{number(y + 10)}">{escape(said)}</text>'
        )
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


def _frames(
    frames: Iterable[Frame], found: Layout, widths: Sequence[float], top: float, pitch: float
) -> Iterator[str]:
    """Draw a frame around the boxes of each module, with its name in a corner."""
    for frame in frames:
        if not frame.name:
            continue
        ranks = [found.rank[i] for i in frame.boxes]
        left = min(found.x[i] - widths[i] / 2 for i in frame.boxes) - 9
        right = max(found.x[i] + widths[i] / 2 for i in frame.boxes) + 9
        right = max(right, left + min(text_width(frame.name) + 16, 180))
        y = top + min(ranks) * pitch - BOX / 2 - FRAME[0]
        height = (max(ranks) - min(ranks)) * pitch + BOX + sum(FRAME)
        box = f'x="{number(left)}" y="{number(y)}" width="{number(right - left)}" height="{number(height)}"'
        text = escape(shorten(frame.name, right - left - 12))
        yield f'<rect class="frame" {box} rx="5"/>'
        yield f'<text class="muted halo" x="{number(left + 8)}" y="{number(y + 14)}">{text}</text>'


def _look(box: Box, phased: bool) -> str:
    """Return the class of a box: its kind, and its phase if tasks have several."""
    return (
        f"task {box.phase}" if phased and box.kind == "task" and box.phase in PHASES else box.kind
    )


def _node(box: Box, x: float, y: float, width: float, phased: bool) -> str:
    left = x - width / 2
    top = y - BOX / 2
    rx = BOX / 2 if box.kind == "input" else 4
    size = f'width="{number(width)}" height="{number(BOX)}" rx="{number(rx)}"'
    cls = _look(box, phased) + " critical" * box.critical
    behind = (
        f'<rect class="{_look(box, phased)}" x="{number(left + 4)}" y="{number(top + 4)}" {size}/>'
        if box.amount
        else ""
    )
    text = escape(_text(box, width - 12))
    return (
        f'{behind}<rect class="{cls}" x="{number(left)}" y="{number(top)}" {size}><title>{escape(box.facts)}</title>'
        f'</rect><text class="{"on-task" if box.kind == "task" else "ink"} middle" x="{number(x)}" '
        f'y="{number(y + 4)}">{text}</text>'
    )


def _arrows(arrows: Mapping[Edge, Arrow], found: Layout, top: float, pitch: float) -> Iterator[str]:
    """Draw all arrows, the most important ones last."""
    drawn: list[tuple[tuple[bool, bool, int], str]] = []
    for ((a, b), arrow), route in zip(arrows.items(), found.routes, strict=True):
        y1 = top + found.rank[a] * pitch + BOX / 2
        y2 = top + found.rank[b] * pitch - BOX / 2
        path = _path(route, y1, y2, pitch - BOX)
        cls = f"line {arrow.kind}" + " faint" * arrow.faint + " along" * arrow.critical
        weight = arrow.critical, not arrow.faint, -KINDS.index(arrow.kind)
        drawn.append((weight, f'<path class="{cls}" d="{path}"/>'))
    return (path for _, path in sorted(drawn, key=lambda item: item[0]))


def _path(route: Route, y1: float, y2: float, gap: float) -> str:
    """Return the curve from (leaves, y1) to (enters, y2), which bends only between ranks.

    There are no nodes between ranks.
    """
    if route.passes is None:
        return f"M{number(route.leaves)} {number(y1)}" + _turn(route.leaves, y1, route.enters, y2)
    first = y1 + gap
    last = y2 - gap
    return (
        f"M{number(route.leaves)} {number(y1)}{_turn(route.leaves, y1, route.passes, first)}"
        f"V{number(last)}{_turn(route.passes, last, route.enters, y2)}"
    )


def _turn(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = number((y1 + y2) / 2)
    return f"C{number(x1)} {middle} {number(x2)} {middle} {number(x2)} {number(y2)}"


def _entries(drawn: Outline) -> Iterator[tuple[str, str, str]]:
    """Return the legend of what occurs in the picture."""
    boxes = {box.kind for box in drawn.boxes}
    phases = {box.phase if box.phase in PHASES else "" for box in drawn.boxes if box.kind == "task"}
    phased = len(phases) > 1
    kinds = {arrow.kind for arrow in drawn.arrows.values()}
    shown = (
        ("input" in boxes, "pill", "input", "input"),
        ("task" in boxes and not phased, "box", "task", "task"),
        (phased and "" in phases, "box", "task", "forward"),
        *((phased and phase in phases, "box", f"task {phase}", phase) for phase in PHASES),
        ("view" in boxes, "box", "view", "view"),
        (any(box.amount for box in drawn.boxes), "stack", "task", "several"),
        ("data" in kinds, "line", "line data", "data"),
        (
            any(arrow.faint for arrow in drawn.arrows.values()),
            "line",
            "line data faint",
            "data from afar",
        ),
        ("move" in kinds, "line", "line move", "data copied"),
        ("anti" in kinds, "line", "line anti", "write after read"),
        ("order" in kinds, "line", "line order", "order only"),
        (any(box.critical for box in drawn.boxes), "box", "track critical", "critical path"),
    )
    return ((symbol, cls, text) for there, symbol, cls, text in shown if there)
