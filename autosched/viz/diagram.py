"""Choose the boxes and arrows that represent a graph in a picture.

A graph of few nodes is shown whole. In a large one, the tasks of each module are one box, at the
deepest level of modules that gives few enough boxes; then chains of tasks are merged; then
neighbours. The boxes still form a DAG: see ``partition``. All drawings of graphs use the same
diagrams. Knows no coordinates and no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from autosched.errors import ChartError, shown
from autosched.graph.graph import Graph, Task, Value
from autosched.viz.partition import members, partition

__all__ = ["KINDS", "NOWHERE", "Arrow", "Box", "Diagram", "common", "diagram", "is_host"]

NOWHERE = ""  # the device of unplaced tasks
MOST_NAMES = 12  # in the tooltip of a box

Node = Value | Task
Edge = tuple[int, int]
Kind = Literal["move", "data", "anti", "order"]
# Of several dependencies between two boxes, the first of these counts.
KINDS: Sequence[Kind] = ("move", "data", "anti", "order")


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
        rest = len(self.names) - MOST_NAMES
        more = [f"and {rest:,} more"] * (rest > 0)
        return "\n".join([self.label, f"{self.amount}{where}", *self.names[:MOST_NAMES], *more])


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
class Diagram:
    """Boxes in topological order, and arrows by positions; a note on its extent if simplified."""

    boxes: Sequence[Box]
    arrows: Mapping[Edge, Arrow]
    note: str = ""


def diagram(
    graph: Graph,
    device: Mapping[str, str] | None = None,
    *,
    depth: int | None = None,
    most: float = 200,
    critical: Iterable[str] = (),
) -> Diagram:
    """Return the diagram of a graph; the parameters are those of ``graph_svg``."""
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        expected = "a number of levels of modules, 0 or more, or None"
        raise ChartError(f"depth must be {expected}, got {shown(depth)}")
    nodes: list[Node] = [*graph.sources, *graph.tasks]
    places = _places(graph, device or {})
    predecessors = _predecessors(graph, places)
    paths = [_path(node) for node in nodes]
    sources = len(graph.sources)
    keys = list(zip(places, map(_phase, nodes), strict=True))
    part = partition([list(mine) for mine in predecessors], keys, paths, sources, depth, most)
    inside = members(part)
    boxes = [_box([nodes[i] for i in mine], places[mine[0]]) for mine in inside]
    boxes = _distinguished(boxes, [[paths[i] for i in mine] for mine in inside])
    arrows = _arrows(predecessors, part, sources)
    inputs = f"{sources:,} input{'s' * (sources != 1)}"
    note = f"{len(graph.tasks):,} tasks and {inputs} in {len(boxes):,} boxes"
    found = Diagram(boxes, arrows, note if len(boxes) < len(nodes) else "")
    return _with_critical_path(found, graph, critical)


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
    module = "" if isinstance(node, Value) else node.origin.module
    return tuple(module.split(".")) if module else ()


def _phase(node: Node) -> str:
    phase = "" if isinstance(node, Value) else node.origin.phase
    return "" if phase == "forward" else phase


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


def _predecessors(graph: Graph, places: Sequence[str]) -> list[dict[int, Kind]]:
    """Return the predecessors of each source and each task, and the kinds of dependencies."""
    source = {value.index: i for i, value in enumerate(graph.sources)}
    predecessors: list[dict[int, Kind]] = [{} for _ in source]
    for task in graph.tasks:
        here = places[len(source) + task.index]
        reads = [value for value, version in task.reads if value in source and not version]
        found: dict[int, Kind] = {source[value]: "data" for value in reads}
        found |= {len(source) + other.task: other.kind for other in task.dependencies}
        for other, kind in found.items():
            if kind == "data" and places[other] != here and NOWHERE not in (places[other], here):
                found[other] = "move"
        predecessors.append(found)
    return predecessors


# ---- boxes


def _box(nodes: Sequence[Node], place: str) -> Box:
    """Return a box for sources or for tasks, labelled by their common module and phase."""
    names = tuple(node.name for node in nodes)
    phases = set(map(_phase, nodes))
    phase = phases.pop() if len(phases) == 1 else ""
    path = common([_path(node) for node in nodes])
    kinds = {_kind(node) for node in nodes}
    module = path
    if kinds == {"input"}:  # parameters are named by their modules
        module = common([tuple(name.split(".")[:-1]) for name in names])
    title = " ".join(filter(None, (".".join(module), phase)))
    label = names[0] if len(names) == 1 else title or f"{names[0]} … {names[-1]}"
    return Box(kinds.pop() if len(kinds) == 1 else "task", label, place, names, path, phase)


def _distinguished(boxes: Sequence[Box], paths: Sequence[Sequence[tuple[str, ...]]]) -> list[Box]:
    """Relabel boxes of equal labels by their first and last module, if that distinguishes them.

    ``paths`` are by box.
    """
    counts = Counter((box.kind, box.label) for box in boxes)
    relabelled = []
    for box, mine in zip(boxes, paths, strict=True):
        level = len(box.path) + 1
        first, last = (".".join(path[:level]) for path in (mine[0], mine[-1]))
        is_ambiguous = counts[box.kind, box.label] > 1 or " … " in box.label
        label = " ".join(filter(None, (f"{first} … {last}", box.phase)))
        changes = is_ambiguous and first and last and first != last
        relabelled.append(replace(box, label=label) if changes else box)
    return relabelled


def _kind(node: Node) -> Literal["input", "task", "view"]:
    return "input" if isinstance(node, Value) else "view" if node.view else "task"


# ---- arrows


def _arrows(
    predecessors: Sequence[Mapping[int, Kind]], part: Sequence[int], sources: int
) -> dict[Edge, Arrow]:
    """Return the arrows between boxes, those of order alone only if no others imply them.

    In a simplified graph, sources have arrows to their first readers only, since parameters are
    read almost everywhere.
    """
    is_simplified = max(part, default=-1) + 1 < len(part)
    found: dict[Edge, Kind] = {}
    reader: dict[int, int] = {}  # by source, the box of its first reader
    for node, others in enumerate(predecessors):
        box = part[node]
        for other, kind in others.items():
            if other < sources and is_simplified and reader.setdefault(other, box) != box:
                continue
            if part[other] != box:
                edge = part[other], box
                found[edge] = min(kind, found.get(edge, kind), key=KINDS.index)
    implied = _implied(found)
    return {
        edge: Arrow(kind, is_simplified and kind == "data" and edge in implied)
        for edge, kind in found.items()
        if kind in ("move", "data") or edge not in implied
    }


def _implied(edges: Iterable[Edge]) -> set[Edge]:
    """Return the edges that paths of other edges imply. Edges lead to higher numbers."""
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


def _with_critical_path(found: Diagram, graph: Graph, critical: Iterable[str]) -> Diagram:
    """Mark the boxes of these names, and the arrows along them. A copy has its value's name."""
    box_of = {name: i for i, box in enumerate(found.boxes) for name in box.names}
    path: list[int] = []
    previous = ""
    for name in critical:
        task = _producer(graph, name, previous) or name
        if task not in box_of:
            what = f"which is no task and no value of graph {graph.name!r}"
            raise ChartError(f"critical names {shown(name)}, {what}")
        path.append(box_of[task])
        previous = task
    on_path = set(path)
    edges = set(pairwise(path))
    boxes = [replace(box, critical=i in on_path) for i, box in enumerate(found.boxes)]
    arrows = {edge: replace(arrow, critical=edge in edges) for edge, arrow in found.arrows.items()}
    return replace(found, boxes=boxes, arrows=arrows)


def _producer(graph: Graph, name: str, previous: str) -> str | None:
    """Return the producer of a value, or the previous task of the path if that writes the value."""
    value = graph.names.get(name)
    if not isinstance(value, Value):
        return None
    writer = graph.names.get(previous)
    index = (
        writer.producer
        if isinstance(writer, Value)
        else writer.index
        if writer is not None
        else None
    )
    if index is not None and any(use.value == value.index for use in graph.tasks[index].changes):
        return previous
    return graph.tasks[value.producer].name if value.producer is not None else None
