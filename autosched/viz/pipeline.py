"""Draw what each device of a pipeline does, as papers do: a row per device, boxes in time.

Knows seconds and labels, no orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autosched._lib.text import duration
from autosched.viz.format import shorten, text_width, ticks
from autosched.viz.svg import LABEL, TITLE, document, legend, path, rect, text

WIDTH = 1000.0
MARGIN = 20.0
HEIGHT = 18.0  # of a box
GAP = 4.0  # between rows
TICKS = 8
CLASSES = {"F": "task", "B": "backward", "I": "backward", "W": "optimizer"}
NAMES = {
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: gradient by the input",
    "W": "W: gradient by the weights",
}


class Box(NamedTuple):
    """An action: its start and duration in seconds, its kind (F, B, I, W), label and tooltip.

    Every second stage of a device (``odd``) is paler.
    """

    start: float
    seconds: float
    kind: str
    label: str
    tooltip: str
    odd: bool = False


def pipeline_svg(rows: Sequence[Sequence[Box]], title: str) -> str:
    """Draw rows of boxes as SVG.

    >>> svg = pipeline_svg([[Box(0.0, 1.0, "F", "0", "F of stage 0")]], "one action")
    >>> svg.startswith("<svg"), "one action" in svg
    (True, True)
    """
    end = max(box.start + box.seconds for row in rows for box in row)
    left = MARGIN + text_width(f"device {len(rows) - 1}") + 12
    scale = (WIDTH - MARGIN - left) / (end or 1.0)
    top = MARGIN + 34
    bottom = top + len(rows) * (HEIGHT + GAP)
    body = [text("ink title", MARGIN, MARGIN + 14, shorten(title, WIDTH - 2 * MARGIN, TITLE))]
    for seconds, label in ticks(end, TICKS):
        body.append(path("grid", "M", left + seconds * scale, top - 4, "V", bottom))
        body.append(text("muted middle", left + seconds * scale, bottom + 14, label))
    for rank, row in enumerate(rows):
        y = top + rank * (HEIGHT + GAP)
        body.append(text("ink", MARGIN, y + 13, f"device {rank}"))
        body.append(rect("track", left, y, WIDTH - MARGIN - left, HEIGHT))
        body += _boxes(row, left, y, scale)
    kinds = {box.kind for row in rows for box in row}
    entries = [("box", CLASSES[kind], name) for kind, name in NAMES.items() if kind in kinds]
    if any(box.odd for row in rows for box in row):
        entries.append(("box", "task odd", "every second stage of a device"))
    body += legend(MARGIN, bottom + 40, entries)
    return document(WIDTH, bottom + 60, title, body)


def _boxes(row: Sequence[Box], left: float, y: float, scale: float) -> Iterator[str]:
    for box in row:
        x, width = left + box.start * scale, box.seconds * scale
        times = f"start {duration(box.start)}, takes {duration(box.seconds)}"
        cls = CLASSES[box.kind] + " odd" * box.odd + " thin" * (width < 4)
        yield rect(cls, x, y, width, HEIGHT, 0, f"{box.tooltip}\n{times}")
        if text_width(box.label, LABEL) + 2 <= width:
            ink = "ink" if box.odd else "on-task"
            yield text(f"{ink} middle label", x + width / 2, y + 13, box.label)
