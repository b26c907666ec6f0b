"""Group the boxes of a diagram by device or by module, to be framed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosched.errors import ChartError, shown
from autosched.viz.diagram import Box, Diagram, common
from autosched.viz.partition import acyclic_partition

__all__ = ["Cluster", "clustered"]

# Boxes on average: modules are distinguished at the deepest level that gives this many, if any.
AVERAGE = 3


@dataclass(frozen=True)
class Cluster:
    """Boxes (positions) on one device, and their common device or module, or ""."""

    name: str
    place: str
    boxes: Sequence[int]

    @property
    def title(self) -> str:
        """The title of a frame where nothing else shows its device."""
        return self.name if self.place in ("", self.name) else f"{self.name} on {self.place}"


def clustered(found: Diagram, group: str) -> tuple[Diagram, list[Cluster]]:
    """Return the clusters of a diagram, and the diagram with its boxes in order of clusters.

    The order changes only for modules. Raises ChartError for other groups than ``"device"`` and
    ``"module"``.
    """
    if group not in ("device", "module"):
        raise ChartError(f"group must be 'device' or 'module', got {shown(group)}")
    if group == "module":
        return _by_module(found)
    places: dict[str, list[int]] = {}
    for i, box in enumerate(found.boxes):
        places.setdefault(box.place, []).append(i)
    return found, [Cluster(place, place, boxes) for place, boxes in places.items()]


def _by_module(found: Diagram) -> tuple[Diagram, list[Cluster]]:
    """Order boxes topologically, those of a cluster together; sources join their readers."""
    boxes = found.boxes
    tasks = [i for i, box in enumerate(boxes) if box.kind != "input"]
    cluster = dict(zip(tasks, _modules(found, tasks), strict=True))
    place = {number: boxes[i].place for i, number in reversed(cluster.items())}
    reader: dict[int, int] = {}  # by source, the cluster of its first reader
    for a, b in found.arrows:
        if boxes[a].kind == "input":
            reader[a] = min(reader.get(a, cluster[b]), cluster[b])
    # A source on another device is a cluster directly before that of its first reader.
    groups: dict[tuple[int, bool, str], list[int]] = {}
    for i, box in enumerate(boxes):
        number = cluster.get(i, reader.get(i, 0))
        is_inside = i in cluster or box.place == place.get(number)
        groups.setdefault((number, is_inside, "" if is_inside else box.place), []).append(i)
    ordered = [groups[key] for key in sorted(groups)]
    position = {box: i for i, box in enumerate(i for mine in ordered for i in mine)}
    arrows = {(position[a], position[b]): arrow for (a, b), arrow in found.arrows.items()}
    clusters = []
    for mine in ordered:
        name = _name([boxes[i] for i in mine if boxes[i].kind != "input"])
        clusters.append(Cluster(name, boxes[mine[0]].place, [position[i] for i in mine]))
    return replace(found, boxes=[boxes[i] for i in position], arrows=arrows), clusters


def _modules(found: Diagram, tasks: Sequence[int]) -> list[int]:
    """Return the cluster of each box of tasks, by modules at a suitable depth."""
    position = {box: i for i, box in enumerate(tasks)}
    predecessors: list[list[int]] = [[] for _ in tasks]
    for a, b in found.arrows:
        if a in position:
            predecessors[position[b]].append(position[a])
    boxes = [found.boxes[i] for i in tasks]
    deepest = max((len(box.path) for box in boxes), default=0)
    part: list[int] = []
    for level in range(max(deepest, 1), 0, -1):
        keys = [(box.place, box.phase, box.path[:level]) for box in boxes]
        part = acyclic_partition(keys, predecessors)
        if AVERAGE * (max(part, default=0) + 1) <= len(part):
            break
    return part


def _name(tasks: Sequence[Box]) -> str:
    """Return the common module of several boxes, with the phase."""
    if len(tasks) < 2:
        return ""
    path = common([box.path for box in tasks])
    return " ".join(filter(None, (".".join(path), tasks[0].phase))) if path else ""
