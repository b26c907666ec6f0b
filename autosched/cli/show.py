"""``autosched show`` prints or draws a schedule.

Two tables list the function that draws each view in each format.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from autosched.cli.options import add_planning, planned
from autosched.cli.output import coloured, deliver, width
from autosched.cli.predict import summary
from autosched.cli.subject import add_thing, subject
from autosched.errors import UsageError
from autosched.scheduling.schedule import Schedule
from autosched.viz import (
    gantt_svg,
    gantt_text,
    graph_dot,
    graph_mermaid,
    graph_svg,
    links_svg,
    memory_svg,
    perfetto_json,
    picture,
)
from autosched.viz.drawing import phases

__all__ = ["add"]


def _text(schedule: Schedule, colour: bool = False) -> str:
    chart = gantt_text(schedule.simulate(), width(), colour=colour)
    return f"{schedule}\n\n{chart}\n\n{summary(schedule)}"


def _memory(schedule: Schedule) -> str:
    limits = {
        device.name: device.nbytes
        for device in schedule.machine.devices
        if device.nbytes < math.inf
    }
    return memory_svg(schedule.memory(), title=schedule.graph.name, limits=limits)


def _trace(schedule: Schedule) -> str:
    memory = schedule.memory()
    return perfetto_json(
        schedule.simulate(), graph=schedule.graph, memory=memory, title=schedule.graph.name
    )


def _gantt(schedule: Schedule) -> str:
    return gantt_svg(schedule.simulate(), title=schedule.graph.name, phases=phases(schedule.graph))


def _graph(schedule: Schedule) -> str:
    return graph_svg(schedule.graph, schedule.placement.device, title=schedule.graph.name)


def _links(schedule: Schedule) -> str:
    return links_svg(schedule.simulate(), title=schedule.graph.name)


Draw = Callable[[Schedule], str | bytes]
_PICTURES: Mapping[str, Callable[[Schedule], str]] = {
    "gantt": _gantt,
    "graph": _graph,
    "memory": _memory,
    "links": _links,
}


def _drawn(
    draw: Callable[[Schedule], str], kind: Literal["png", "pdf"], schedule: Schedule
) -> bytes:
    return picture(draw(schedule), kind)


# By format, the views that it supports; the first is the default of --what.
_SHOWN: Mapping[str, Mapping[str, Draw]] = {
    "text": {"gantt": _text, "graph": lambda schedule: str(schedule.graph)},
    "svg": _PICTURES,
    "png": {what: partial(_drawn, draw, "png") for what, draw in _PICTURES.items()},
    "pdf": {what: partial(_drawn, draw, "pdf") for what, draw in _PICTURES.items()},
    "html": {"page": lambda schedule: schedule.page()},
    "dot": {
        "graph": lambda made: graph_dot(made.graph, made.placement.device, title=made.graph.name)
    },
    "mermaid": {
        "graph": lambda made: graph_mermaid(
            made.graph, made.placement.device, title=made.graph.name
        )
    },
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
    ".mmd": "mermaid",
    ".json": "perfetto",
    ".py": "code",
}


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "show",
        help="show a schedule as text or as a picture",
        description="Show a schedule: what runs where and when, as predicted.",
        epilog="example: autosched show autosched.demo:mlp_step --gpus 2 --format svg -o mlp.svg",
    )
    add_thing(parser)
    parser.add_argument(
        "--format", choices=tuple(_SHOWN), help="default: as FILE is named, or text"
    )
    whats = dict.fromkeys(what for mine in _SHOWN.values() for what in mine)
    parser.add_argument(
        "--what", choices=tuple(whats), help="of what (default: gantt, where it can be)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it there instead of to stdout"
    )
    add_planning(parser)
    parser.set_defaults(do=_show)


def _show(arguments: argparse.Namespace) -> int:
    form, what = _choice(arguments)
    made = planned(arguments, subject(arguments.thing, arguments.graph))
    draw = _SHOWN[form][what]
    if draw is _text and arguments.output is None:
        draw = partial(_text, colour=coloured())
    deliver(draw(made), arguments.output)
    return 0


def _choice(arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the format and the view. Raises UsageError if they do not go together."""
    suffix = arguments.output.suffix.lower() if arguments.output else ".txt"
    form = arguments.format or _SUFFIXES.get(suffix)
    if form is None:
        known = ", ".join(_SUFFIXES)
        raise UsageError(
            f"{arguments.output}: no format has this suffix; known are {known}, or give --format"
        )
    what = arguments.what or next(iter(_SHOWN[form]))
    if what not in _SHOWN[form]:
        able = [name for name, mine in _SHOWN.items() if what in mine]
        raise UsageError(f"--what {what} cannot be shown as {form}; it can as {', '.join(able)}")
    return form, what
