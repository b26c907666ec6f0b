"""Find the boxes of a picture that share a frame.

A frame surrounds the boxes of one device or of one module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosched.errors import ChartError, shown
from autosched.viz.folds import fold
from autosched.viz.outline import Box, Outline, common

__all__ = ["Frame", "grouped"]

HOLDS = 3  # boxes on average: modules are distinguished as deeply as leaves this many, if possible


@dataclass(frozen=True)
class Frame:
    """Boxes (positions) in one place, and their common device or module, or ""."""

    name: str
    place: str
    boxes: Sequence[int]

    @property
    def title(self) -> str:
        """The title of a frame where nothing else shows its device."""
        return self.name if self.place in ("", self.name) else f"{self.name} on {self.place}"


def grouped(drawn: Outline, group: str) -> tuple[Outline, list[Frame]]:
    """Return the frames of a picture, and the picture with its boxes in order of frames.

    The order changes only for modules. Raises ChartError for other groups than ``"device"`` and
    ``"module"``.
    """
    if group not in ("device", "module"):
        raise ChartError(f"group must be 'device' or 'module', got {shown(group)}")
    if group == "module":
        return _by_module(drawn)
    places: dict[str, list[int]] = {}
    for i, box in enumerate(drawn.boxes):
        places.setdefault(box.place, []).append(i)
    return drawn, [Frame(place, place, boxes) for place, boxes in places.items()]


def _by_module(drawn: Outline) -> tuple[Outline, list[Frame]]:
    """Order boxes topologically, those of a frame together; sources join their readers."""
    tasks = [i for i, box in enumerate(drawn.boxes) if box.kind != "input"]
    part = _modules(drawn, tasks)
    frame = dict(zip(tasks, part, strict=True))
    user: dict[int, int] = {}  # by source, the frame of its first reader
    for a, b in drawn.arrows:
        if drawn.boxes[a].kind == "input":
            user[a] = min(user.get(a, frame[b]), frame[b])
    groups: dict[
        tuple[int, bool, str], list[int]
    ] = {}  # a source on another device directly precedes its first reader
    for i, box in enumerate(drawn.boxes):
        number = frame.get(i, user.get(i, 0))
        apart = (
            i not in frame
            and box.place not in [drawn.boxes[j].place for j in tasks if frame[j] == number][:1]
        )
        groups.setdefault((number, not apart, box.place if apart else ""), []).append(i)
    ordered = [groups[key] for key in sorted(groups)]
    position = {box: i for i, box in enumerate(i for boxes in ordered for i in boxes)}
    boxes = [drawn.boxes[i] for i in position]
    arrows = {(position[a], position[b]): arrow for (a, b), arrow in drawn.arrows.items()}
    return replace(drawn, boxes=boxes, arrows=arrows), [
        _frame(drawn, mine, position) for mine in ordered
    ]


def _modules(drawn: Outline, tasks: Sequence[int]) -> list[int]:
    """Return the frame of each box of tasks, by modules at a suitable depth."""
    position = {box: i for i, box in enumerate(tasks)}
    before: list[list[int]] = [[] for _ in tasks]
    for a, b in drawn.arrows:
        if a in position:
            before[position[b]].append(position[a])
    boxes = [drawn.boxes[i] for i in tasks]
    deepest = max((len(box.path) for box in boxes), default=0)
    part: list[int] = []
    for level in range(max(deepest, 1), 0, -1):
        part = fold([(box.place, box.phase, box.path[:level]) for box in boxes], before)
        if HOLDS * (max(part, default=0) + 1) <= len(part):
            break
    return part


def _frame(drawn: Outline, boxes: Sequence[int], position: dict[int, int]) -> Frame:
    inside = [drawn.boxes[i] for i in boxes]
    tasks = [box for box in inside if box.kind != "input"]
    return Frame(_name(tasks), inside[0].place, [position[i] for i in boxes])


def _name(tasks: Sequence[Box]) -> str:
    """Return the common module of several boxes, with the phase."""
    if len(tasks) < 2:
        return ""
    path = common([box.path for box in tasks])
    return " ".join(filter(None, (".".join(path), tasks[0].phase))) if path else ""
