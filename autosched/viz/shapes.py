"""Parse SVG drawings into paths and texts with colours.

Reads only the subset of SVG that the drawings of this package use, in their light colours. The
result can be drawn by other means, of which this module knows nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from autosched.viz.paint import FONT_SIZE, HEADS, light

__all__ = ["Picture", "Shape", "Words", "shapes"]

_SVG = "{http://www.w3.org/2000/svg}"
_TOKEN = re.compile(r"[A-Za-z]|-?(?:\d+\.?\d*|\.\d+)")
_TAKES = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "A": 7, "Z": 0}
_BEND = 0.5523  # distance of the handles of a curve that is a quarter of a circle
_STRIPES = (
    6.0,
    1.25,
    2.5,
)  # from one to the next, the middle of the first, how wide: as in the pattern of ``paint``

Box = tuple[float, float, float, float]  # left, top, width, height


class Step(NamedTuple):
    """A part of a path: begin, go straight, go in a curve (two handles and the end), close."""

    kind: Literal["begin", "line", "curve", "close"]
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Shape:
    """A path, filled and stroked; lengths are pixels. It is clipped to ``clip``."""

    path: tuple[Step, ...]
    fill: str = "none"
    stroke: str = "none"
    width: float = 1.0
    dashes: tuple[float, ...] = ()
    round: bool = False
    opacity: float = 1.0
    fill_opacity: float = 1.0
    clip: Box | None = None


@dataclass(frozen=True)
class Words:
    """A line of text, in consecutive runs, and the position of its ``anchor``."""

    x: float
    y: float
    anchor: Literal["start", "middle", "end"]
    runs: tuple[Run, ...]
    clip: Box | None = None


class Run(NamedTuple):
    """Text in one style; ``halo`` is the colour around its letters."""

    text: str
    size: float
    bold: bool
    fill: str
    halo: str


class Picture(NamedTuple):
    """The size of a picture, and its content from back to front."""

    width: float
    height: float
    items: tuple[Shape | Words, ...]


@dataclass(frozen=True)
class _Around:
    """Properties that apply to all content of an element."""

    x: float = 0.0
    y: float = 0.0
    color: str = "#000000"
    opacity: float = 1.0
    clip: Box | None = None


def shapes(svg: str) -> Picture:
    """Return the content of a drawing. Raises ValueError for other SVG.

    >>> from autosched.viz.bars import Bar, bars_svg
    >>> picture = shapes(bars_svg([Bar("one GPU", 3.75)]))
    >>> picture.width, [item.runs[0].text for item in picture.items if isinstance(item, Words)][-1]
    (720.0, 'one GPU')
    """
    root = ElementTree.fromstring(svg)
    if root.tag != f"{_SVG}svg" or root.get("class") != "autosched":
        raise ValueError(f"expected a drawing of autosched, got a {root.tag!r}")
    return Picture(_number(root, "width"), _number(root, "height"), tuple(_inside(root, _Around())))


def _inside(element: ElementTree.Element, around: _Around) -> Iterator[Shape | Words]:
    for child in element:
        kind = child.tag.removeprefix(_SVG)
        here = _here(child, around)
        if kind == "g":
            yield from _inside(child, here)
        elif kind == "svg":
            box = tuple(_number(child, key) for key in ("x", "y", "width", "height"))
            clip = here.x + box[0], here.y + box[1], box[2], box[3]
            yield from _inside(child, replace(here, x=clip[0], y=clip[1], clip=clip))
        elif kind in ("rect", "path"):
            yield from _drawn(
                child, here, _rect(child) if kind == "rect" else _path(child.get("d", ""))
            )
        elif kind == "text":
            yield _words(child, here)


def _here(element: ElementTree.Element, around: _Around) -> _Around:
    style = light(element.get("class", ""))
    x = around.x
    y = around.y
    if moved := element.get("transform"):
        dx, dy = (float(n) for n in _TOKEN.findall(moved.removeprefix("translate")))
        x = x + dx
        y = y + dy
    opacity = around.opacity * float(element.get("opacity", style.get("opacity", "1")))
    return replace(around, x=x, y=y, color=style.get("color", around.color), opacity=opacity)


def _number(element: ElementTree.Element, key: str) -> float:
    return float(element.get(key, "0"))


# ---- paths


def _drawn(element: ElementTree.Element, here: _Around, path: tuple[Step, ...]) -> Iterator[Shape]:
    """Return a shape, with its stripes or its arrow head."""
    style = light(element.get("class", ""))
    path = tuple(
        Step(kind, tuple((x + here.x, y + here.y) for x, y in points)) for kind, points in path
    )
    closed = bool(path) and path[-1].kind == "close"
    striped = style.get("fill", "").startswith("url")
    fill = (
        light("ground")["fill"]
        if striped
        else _colour(style.get("fill", "#000000" if closed else "none"), here)
    )
    shape = Shape(
        path, fill, _colour(style.get("stroke", "none"), here), float(style.get("stroke-width", "1")),
        tuple(map(float, style.get("stroke-dasharray", "").split())), style.get("stroke-linejoin") == "round",
        here.opacity, float(style.get("fill-opacity", "1")), here.clip,
    )  # fmt: skip
    if striped:
        yield replace(shape, stroke="none")
        yield _stripes(shape)
        shape = replace(shape, fill="none")
    yield shape
    if head := style.get("marker-end"):
        yield _head(path, head.partition("-")[2].rstrip(")"), here)


def _colour(value: str, here: _Around) -> str:
    return here.color if value == "currentColor" else value


def _rect(element: ElementTree.Element) -> tuple[Step, ...]:
    x, y, width, height = (_number(element, key) for key in ("x", "y", "width", "height"))
    r = min(_number(element, "rx"), width / 2, height / 2)
    k = r * (1 - _BEND)
    right = x + width
    bottom = y + height
    return (
        Step("begin", ((x + r, y),)),
        Step("line", ((right - r, y),)),
        Step("curve", ((right - k, y), (right, y + k), (right, y + r))),
        Step("line", ((right, bottom - r),)),
        Step("curve", ((right, bottom - k), (right - k, bottom), (right - r, bottom))),
        Step("line", ((x + r, bottom),)),
        Step("curve", ((x + k, bottom), (x, bottom - k), (x, bottom - r))),
        Step("line", ((x, y + r),)),
        Step("curve", ((x, y + k), (x + k, y), (x + r, y))),
        Step("close"),
    )


def _path(text: str) -> tuple[Step, ...]:
    """Parse the data of a path: M, L, H, V, C, Z and a for half a circle, absolute or relative."""
    steps: list[Step] = []
    x = 0.0
    y = 0.0
    tokens = _TOKEN.findall(text)
    at = 0
    command = "M"
    while at < len(tokens):
        if tokens[at].isalpha():
            command = tokens[at]
            at = at + 1
        kind = command.upper()
        count = _TAKES[command.upper()]
        numbers = [float(token) for token in tokens[at : at + count]]
        at += count
        found = _step(kind, numbers, (x, y), command.islower())
        steps += found
        if found and found[-1].points:
            x, y = found[-1].points[-1]
        command = {"M": "L", "m": "l"}.get(command, command)  # further points are lines
    return tuple(steps)


def _step(kind: str, numbers: list[float], at: tuple[float, float], relative: bool) -> list[Step]:
    x, y = at if relative else (0.0, 0.0)
    match kind:
        case "Z":
            return [Step("close")]
        case "H":
            return [Step("line", ((x + numbers[0], at[1]),))]
        case "V":
            return [Step("line", ((at[0], y + numbers[0]),))]
        case "A":
            return _half_circle(at, (x + numbers[5], y + numbers[6]))
    points = tuple((x + dx, y + dy) for dx, dy in zip(numbers[::2], numbers[1::2], strict=True))
    return [Step({"M": "begin", "L": "line", "C": "curve"}[kind], points)]  # type: ignore[arg-type]


def _half_circle(start: tuple[float, float], end: tuple[float, float]) -> list[Step]:
    """Go around, against the clock on the screen, in two curves."""
    (x1, y1), (x2, y2) = start, end
    rx = (x2 - x1) / 2  # from the start to the middle; (ry, -rx) is across
    ry = (y2 - y1) / 2
    top = x1 + rx - ry, y1 + ry + rx
    k = _BEND
    return [
        Step("curve", ((x1 - ry * k, y1 + rx * k), (top[0] - rx * k, top[1] - ry * k), top)),
        Step("curve", ((top[0] + rx * k, top[1] + ry * k), (x2 - ry * k, y2 + rx * k), end)),
    ]


def _stripes(shape: Shape) -> Shape:
    """Return the stripes over a box: lines of constant x + y."""
    xs, ys = zip(*(point for step in shape.path for point in step.points), strict=True)
    left = min(xs)
    top = min(ys)
    right = max(xs)
    bottom = max(ys)
    period, first, width = (length * math.sqrt(2) for length in _STRIPES)
    lines = []
    for i in range(math.floor((left + top) / period) - 1, math.ceil((right + bottom) / period) + 1):
        c = i * period + first
        lines += [Step("begin", ((c - top, top),)), Step("line", ((c - bottom, bottom),))]
    clip = left, top, right - left, bottom - top
    stripe = light("stripe")["fill"]
    return replace(
        shape,
        path=tuple(lines),
        fill="none",
        stroke=stripe,
        width=width / math.sqrt(2),
        dashes=(),
        clip=clip,
    )


def _head(path: tuple[Step, ...], name: str, here: _Around) -> Shape:
    """Return the head of an arrow, its tip a little beyond the end of the line."""
    cls, size = HEADS[name]
    points = [point for step in path for point in step.points]
    end = points[-1]
    before = next(
        (point for point in reversed(points) if math.dist(point, end) > 0.01), (end[0] - 1, end[1])
    )
    length = math.dist(before, end)
    ux = (end[0] - before[0]) / length * size / 8
    uy = (end[1] - before[1]) / length * size / 8
    corners = (
        (a * ux - b * uy + end[0], a * uy + b * ux + end[1])
        for a, b in ((-7, -3.5), (1, 0), (-7, 3.5))
    )
    first, *others = corners
    steps = Step("begin", (first,)), *(Step("line", (corner,)) for corner in others), Step("close")
    return Shape(steps, fill=light(cls)["fill"], opacity=here.opacity, clip=here.clip)


# ---- words


def _words(element: ElementTree.Element, here: _Around) -> Words:
    style = light(element.get("class", ""))
    x = element.get("x", "0")
    across = here.clip[2] / 2 if x == "50%" and here.clip is not None else float(x)
    runs = [_run(element.text or "", style)]
    for child in element:
        runs.append(_run(child.text or "", {**style, **light(child.get("class", ""))}))
        runs.append(_run(child.tail or "", style))
    anchor: Literal["start", "middle", "end"] = style.get("text-anchor", "start")  # type: ignore[assignment]
    return Words(
        here.x + across,
        here.y + _number(element, "y"),
        anchor,
        tuple(run for run in runs if run.text),
        here.clip,
    )


def _run(text: str, style: Mapping[str, str]) -> Run:
    size = float(style.get("font-size", f"{FONT_SIZE}px").removesuffix("px"))
    return Run(
        text,
        size,
        style.get("font-weight") == "600",
        style.get("fill", "#000000"),
        style.get("stroke", ""),
    )
