"""Print or draw a schedule.

``FORMATS`` has the function that draws each view in each format.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from autosched.cli.commands import summary
from autosched.cli.loading import planned, subject_of
from autosched.cli.output import deliver, has_colours, width
from autosched.errors import UsageError
from autosched.scheduling.schedule import Schedule
from autosched.timeline.timeline import Timeline
from autosched.viz import (
    gantt_svg,
    gantt_text,
    graph_dot,
    graph_svg,
    perfetto_json,
    picture,
)
from autosched.viz.charts import links, memory
from autosched.viz.drawing import phases

__all__ = ["FORMATS", "show"]

Draw = Callable[[Schedule], str | bytes]


def show(arguments: argparse.Namespace) -> int:
    """Print or draw a schedule."""
    form, view = _choice(arguments)
    made = planned(arguments, subject_of(arguments))
    if form == "text" and view == "gantt" and arguments.output is None:
        deliver(_text(made, has_colours()), None)
    else:
        deliver(FORMATS[form][view](made), arguments.output)
    return 0


def _choice(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the format and the view. Raises UsageError if they do not go together."""
    suffix = arguments.output.suffix.lower() if arguments.output else ".txt"
    form = arguments.format or _SUFFIXES.get(suffix)
    if form is None:
        known = f"{', '.join(_SUFFIXES)}, or give --format"
        raise UsageError(f"{arguments.output}: no format has this suffix; known are {known}")
    view = arguments.what or next(iter(FORMATS[form]))
    if view not in FORMATS[form]:
        able = ", ".join(name for name, views in FORMATS.items() if view in views)
        raise UsageError(f"--what {view} cannot be shown as {form}; it can as {able}")
    return form, view


def _timeline(made: Schedule) -> Timeline:
    return made.simulate(made.runs_shown)


def _text(made: Schedule, colour: bool = False) -> str:
    chart = gantt_text(_timeline(made), width(), colour=colour)
    return f"{made}\n\n{chart}\n\n{summary(made)}"


def _gantt(made: Schedule) -> str:
    return gantt_svg(_timeline(made), title=made.graph.name, phases=phases(made.graph))


def _graph(draw: Callable[..., str], made: Schedule) -> str:
    return draw(made.graph, made.placement.device, title=made.graph.name)


def _memory(made: Schedule) -> str:
    devices = made.machine.devices
    limits = {device.name: device.nbytes for device in devices if device.nbytes < math.inf}
    return memory(made.memory(), title=made.graph.name, limits=limits)


def _links(made: Schedule) -> str:
    return links(_timeline(made), title=made.graph.name)


def _trace(made: Schedule) -> str:
    memory = made.memory()
    title = made.graph.name
    return perfetto_json(_timeline(made), graph=made.graph, memory=memory, title=title)


_PICTURES: Mapping[str, Callable[[Schedule], str]] = {
    "gantt": _gantt,
    "graph": partial(_graph, graph_svg),
    "memory": _memory,
    "links": _links,
}


def _picture(view: str, kind: Literal["png", "pdf"], made: Schedule) -> bytes:
    return picture(_PICTURES[view](made), kind)


# By format, the views that it supports; the first is the default of --what.
FORMATS: Mapping[str, Mapping[str, Draw]] = {
    "text": {"gantt": _text, "graph": lambda made: str(made.graph)},
    "svg": _PICTURES,
    "png": {view: partial(_picture, view, "png") for view in _PICTURES},
    "pdf": {view: partial(_picture, view, "pdf") for view in _PICTURES},
    "html": {"page": lambda made: made.page()},
    "dot": {"graph": partial(_graph, graph_dot)},
    "perfetto": {"trace": _trace},
    "code": {"code": lambda made: made.code},
}
_SUFFIXES = {
    ".txt": "text",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".html": "html",
    ".dot": "dot",
    ".json": "perfetto",
    ".py": "code",
}
