"""Choose the boxes and arrows that a picture of a graph has.

A graph of few nodes is shown whole. In a large one, the tasks of each module are one box, at the
deepest level of modules that gives few enough boxes; then chains of tasks are folded; then
neighbours. The folded graph is still a DAG: see ``folds``. All drawings of graphs use the same
outlines. Knows no coordinates and no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autosched.errors import ChartError, shown
from autosched.graph.graph import Graph, Task, Value
from autosched.viz.folds import parts, together

__all__ = [
    "KINDS",
    "NOWHERE",
    "Arrow",
    "Box",
    "Edge",
    "Kind",
    "Outline",
    "common",
    "is_host",
    "outline",
]

NOWHERE = ""  # the device of unplaced tasks

Node = Value | Task
Edge = tuple[int, int]
Kind = Literal["move", "data", "anti", "order"]
KINDS: Sequence[Kind] = (
    "move",
    "data",
    "anti",
    "order",
)  # of several between two boxes, the first counts


@dataclass(frozen=True)
class Box:
    """A source or a task, or several on one device, with their label and ``names``.

    ``path`` is their common module, ``phase`` their common phase if that is not the forward pass.
    """

    kind: Literal["input", "task", "view"]
    label: str
    place: str
    names: tuple[str, ...]
    path: tuple[str, ...] = ()
    phase: str = ""
    critical: bool = False

    @property
    def amount(self) -> str:
        """The number of its members, in words; "" for one."""
        return f"{len(self.names):,} {self.kind}s" if len(self.names) > 1 else ""

    @property
    def facts(self) -> str:
        """The text of its tooltip, in some lines."""
        where = f" on {self.place}" if self.place else ""
        if not self.amount:
            return f"{self.label}\n{self.kind}{where}"
        more = [f"and {len(self.names) - 12:,} more"] * (len(self.names) > 12)
        return "\n".join([f"{self.label}\n{self.amount}{where}", *self.names[:12], *more])


@dataclass(frozen=True)
class Arrow:
    """A dependency between boxes: data, copied to another device or not, or only order.

    ``faint`` if it is of little interest in a picture of many tasks: data from distant boxes that
    also arrive by other boxes.
    """

    kind: Kind
    faint: bool = False
    critical: bool = False


@dataclass(frozen=True)
class Outline:
    """Boxes in topological order, and arrows by positions; a note on its extent if folded."""

    boxes: Sequence[Box]
    arrows: Mapping[Edge, Arrow]
    said: str = ""


def outline(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    depth: int | None = None,
    most: float = 200,
    critical: Iterable[str] = (),
) -> Outline:
    """Return the outline of a graph; the parameters are those of ``graph_svg``."""
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        raise ChartError(
            f"depth must be a number of levels of modules, 0 or more, or None, got {shown(depth)}"
        )
    nodes: list[Node] = [*graph.sources, *graph.tasks]
    places = _places(graph, device or {})
    before = _before(graph, places)
    paths = [_path(node) for node in nodes]
    sources = len(nodes) - len(graph.tasks)
    part = parts(
        [list(b) for b in before],
        list(zip(places, map(_phase, nodes), strict=True)),
        paths,
        sources,
        depth,
        most,
    )
    members = together(part)
    boxes = [_box([nodes[i] for i in mine], places[mine[0]]) for mine in members]
    boxes = _told_apart(boxes, [[paths[i] for i in mine] for mine in members])
    arrows = _arrows(before, part, sources)
    said = f"{len(graph.tasks):,} tasks and {sources:,} input{'s' * (sources != 1)} in {len(boxes):,} boxes"
    return _marked(Outline(boxes, arrows, said * (len(boxes) < len(nodes))), graph, critical)


def is_host(place: str) -> bool:
    """Whether a device is a CPU."""
    return place.partition(":")[0] == "cpu"


def common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common prefix.

    >>> common([("layer1", "0", "conv"), ("layer1", "1")])
    ('layer1',)
    """
    low = min(paths)
    high = max(paths)
    same = [a == b for a, b in zip(low, high, strict=False)]
    return low[: [*same, False].index(False)]


def _path(node: Node) -> tuple[str, ...]:
    return (
        ()
        if isinstance(node, Value) or not node.origin.module
        else tuple(node.origin.module.split("."))
    )


def _phase(node: Node) -> str:
    return "" if isinstance(node, Value) or node.origin.phase == "forward" else node.origin.phase


def _places(graph: Graph, device: Mapping[str, str]) -> list[str]:
    """Return the device of each source and each task; views are on the device of their base."""
    given = [device.get(task.name) or task.device for task in graph.tasks]
    known = [place for place in (*given, *(source.home for source in graph.sources)) if place]
    host = next(filter(is_host, known), "cpu") if known else NOWHERE
    sources = {source.index: source.home or host for source in graph.sources}
    tasks: list[str] = []
    for task, place in zip(graph.tasks, given, strict=True):
        if place is None and task.view:
            base = graph.values[graph.values[task.outputs[0].value].root]
            tasks.append(sources[base.index] if base.producer is None else tasks[base.producer])
        else:
            tasks.append(place or NOWHERE)
    return [*sources.values(), *tasks]


def _before(graph: Graph, places: Sequence[str]) -> list[dict[int, Kind]]:
    """Return the predecessors of each source and each task, and the kinds of dependencies."""
    source = {value.index: i for i, value in enumerate(graph.sources)}
    before: list[dict[int, Kind]] = [{} for _ in source]
    for task in graph.tasks:
        here = places[len(source) + task.index]
        found: dict[int, Kind] = {
            source[v]: "data" for v, version in task.reads if v in source and not version
        }
        found |= {
            len(source) + dependency.task: dependency.kind for dependency in task.dependencies
        }
        for other, kind in found.items():
            if kind == "data" and places[other] != here and NOWHERE not in (places[other], here):
                found[other] = "move"
        before.append(found)
    return before


# ---- boxes


def _box(nodes: Sequence[Node], place: str) -> Box:
    """Return a box for sources or for tasks, labelled by their common module and phase."""
    names = tuple(node.name for node in nodes)
    phases = set(map(_phase, nodes))
    phase = phases.pop() if len(phases) == 1 else ""
    path = common([_path(node) for node in nodes])
    kinds = {_kind(node) for node in nodes}
    called = path
    if kinds == {"input"}:  # parameters are named by their modules
        called = common([tuple(name.split(".")[:-1]) for name in names])
    module = " ".join(filter(None, (".".join(called), phase)))
    label = names[0] if len(names) == 1 else module or f"{names[0]} … {names[-1]}"
    return Box(kinds.pop() if len(kinds) == 1 else "task", label, place, names, path, phase)


def _told_apart(boxes: Sequence[Box], paths: Sequence[Sequence[tuple[str, ...]]]) -> list[Box]:
    """Relabel boxes of equal labels by their first and last module, if that distinguishes them.

    ``paths`` are by box.
    """
    counts = Counter((box.kind, box.label) for box in boxes)
    made = []
    for box, mine in zip(boxes, paths, strict=True):
        level = len(box.path) + 1
        ends = [".".join(path[:level]) for path in (mine[0], mine[-1])]
        ambiguous = counts[box.kind, box.label] > 1 or " … " in box.label
        if ambiguous and all(ends) and ends[0] != ends[1]:
            label = " ".join(filter(None, (" … ".join(ends), box.phase)))
            box = replace(box, label=label)  # noqa: PLW2901
        made.append(box)
    return made


def _kind(node: Node) -> Literal["input", "task", "view"]:
    return "input" if isinstance(node, Value) else "view" if node.view else "task"


# ---- arrows


def _arrows(
    before: Sequence[Mapping[int, Kind]], part: Sequence[int], sources: int
) -> dict[Edge, Arrow]:
    """Return the arrows between boxes, those of order alone only if no others imply them.

    In a folded graph, sources have arrows to their first readers only, since parameters are read
    almost everywhere.
    """
    folded = max(part, default=-1) + 1 < len(part)
    found: dict[Edge, Kind] = {}
    first: dict[int, int] = {}
    for node, others in enumerate(before):
        for other, kind in others.items():
            edge = part[other], part[node]
            if other < sources and folded and first.setdefault(other, part[node]) != part[node]:
                continue
            if edge[0] != edge[1]:
                found[edge] = min(kind, found.get(edge, kind), key=KINDS.index)
    implied = (
        _implied(found)
        if folded or any(kind in ("anti", "order") for kind in found.values())
        else set()
    )
    kept = {
        edge: kind
        for edge, kind in found.items()
        if kind in ("move", "data") or edge not in implied
    }
    return {
        edge: Arrow(kind, folded and kind == "data" and edge in implied)
        for edge, kind in kept.items()
    }


def _implied(found: Iterable[Edge]) -> set[Edge]:
    """Return the edges that others imply. Edges lead from lower numbers to higher."""
    before: dict[int, list[int]] = {}
    for a, b in found:
        before.setdefault(b, []).append(a)
    behind: dict[int, int] = {}  # by box, its predecessors as a bit set
    implied = set()
    for box in sorted(before):
        far = 0
        for other in before[box]:
            far |= behind.get(other, 0)
        implied |= {(other, box) for other in before[box] if far >> other & 1}
        behind[box] = far | sum(1 << other for other in before[box])
    return implied


def _marked(drawn: Outline, graph: Graph, critical: Iterable[str]) -> Outline:
    """Mark the boxes of these names, and the arrows along them. A copy has its value's name."""
    box = {name: i for i, found in enumerate(drawn.boxes) for name in found.names}
    path: list[int] = []
    before = ""
    for name in critical:
        called = _maker(graph, name, before) or name
        before = called
        if called not in box:
            raise ChartError(
                f"critical names {shown(name)}, which is no task and no value of graph {graph.name!r}"
            )
        path.append(box[called])
    on = set(path)
    along = set(pairwise(path))
    boxes = [replace(found, critical=i in on) for i, found in enumerate(drawn.boxes)]
    arrows = {edge: replace(arrow, critical=edge in along) for edge, arrow in drawn.arrows.items()}
    return replace(drawn, boxes=boxes, arrows=arrows)


def _maker(graph: Graph, name: str, before: str) -> str | None:
    """Return the producer of a value, or the previous task of the path if that writes the value."""
    value = graph.names.get(name)
    if not isinstance(value, Value):
        return None
    writer = graph.names.get(before)
    index = (
        writer.index
        if isinstance(writer, Task)
        else writer.producer
        if writer is not None
        else None
    )
    if index is not None and any(use.value == value.index for use in graph.tasks[index].changes):
        return before
    return graph.tasks[value.producer].name if value.producer is not None else None
