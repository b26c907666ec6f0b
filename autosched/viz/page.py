"""Write a schedule as one interactive HTML page.

The page has a chart, the graph and texts that are linked with each other, and opens from the file
system in any browser. Its template, style sheet and scripts are in ``web/`` and are embedded whole.
The page loads nothing from elsewhere; its content security policy forbids that.

The page holds columns of numbers instead of objects, compressed. An *item* is a
run or a copy of the program. Everything refers to it by its index in issue order. Of several runs
of a loop, each has items of its own, behind those of the runs before. The scripts compute nothing
that Python knows, such as the critical path, the dependencies of a task, or where a box is in a
drawing of the graph: the drawings, of the whole and of each part, are those of ``dag``.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import PurePath
from string import Template
from typing import Any

from autosched.graph.graph import Graph, Use
from autosched.graph.task import Origin
from autosched.program.program import Copy, Program, Run
from autosched.timeline.timeline import Span, Timeline, preceding_spans
from autosched.viz.dag import graph_parts
from autosched.viz.drawing import phases
from autosched.viz.gantt import entries, gantt_rows, summary
from autosched.viz.perfetto import Steps, nanoseconds
from autosched.viz.svg import PREAMBLE, escape, legend, legend_width

LINES = 6000  # of each text
STEPS = 600  # of a device's memory over time, at most: more than a row has pixels
SCRIPTS = ("model.js", "gantt.js", "graph.js", "panel.js", "main.js")

Item = Run | Copy


def page_html(
    graph: Graph,
    program: Program,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    title: str = "",
    explanation: str = "",
    code: str = "",
    memory: Mapping[str, Steps] | None = None,
    limits: Mapping[str, float] | None = None,
) -> str:
    """Return a page that shows a schedule: zoom, pan, search, select, follow waits.

    ``measured`` is a timeline of the same program; ``explanation`` and ``code`` are texts with a
    panel each, omitted where empty; ``memory`` has steps (seconds, bytes) for each device,
    ``limits`` the bytes of memory of devices.

    >>> from autosched.program.program import Stream
    >>> from autosched.timeline.timeline import Span
    >>> graph, program = Graph("one sum"), Program.parse("cpu/compute run add")
    >>> y = graph.input("x") + 1
    >>> timeline = Timeline((Span("run", "add", (Stream("cpu", "compute"),), 0.0, 0.002, 0),))
    >>> "makespan 2 ms" in page_html(graph, program, timeline)
    True
    """
    timelines = {"predicted": predicted} | ({"measured": measured} if measured is not None else {})
    data = page_data(graph, program, timelines, memory or {}, limits or {})
    texts = {"explanation": explanation, "program": str(program), "code": code}
    data["texts"] = {name: _cut(text, name) for name, text in texts.items() if text}
    packed = json.dumps(data, separators=(",", ":"))
    folder = files("autosched.viz") / "web"
    summaries = (f"{name} {summary(timeline)}" for name, timeline in timelines.items())
    copies = any(isinstance(instruction, Copy) for instruction in program)
    shown = list(entries(list(timelines.values()), phases(graph), copies))
    parts = {
        "title": escape(title or graph.name),
        "summary": escape("; ".join(summaries)),
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "script": "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": base64.b64encode(zlib.compress(packed.encode())).decode(),
        "preamble": PREAMBLE,
        "legend": "".join(legend(1, 10, shown)),
        "wide": math.ceil(legend_width(shown)),
    }
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(parts)


def _cut(text: str, name: str) -> str:
    """Return the beginning of a text: nobody reads all lines of ten thousand tasks in a page."""
    lines = text.split("\n")
    rest = len(lines) - LINES
    more = [f"... and {rest:,} more lines of the {name}"] * (rest > 0)
    return "\n".join([*lines[:LINES], *more])


# ---- data


def page_data(
    graph: Graph,
    program: Program,
    timelines: Mapping[str, Timeline],
    memory: Mapping[str, Steps],
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the data of the page as a JSON object; times are whole nanoseconds.

    ``needs`` are the items that an item takes data from, ``after`` those that it only has to
    follow. They are stored as distances between items: small numbers compress well.

    >>> from autosched.program.program import Stream
    >>> from autosched.timeline.timeline import Span
    >>> graph, program = Graph(), Program.parse("cpu/compute run add")
    >>> y = graph.input("x") + 1
    >>> timeline = Timeline((Span("run", "add", (Stream("cpu", "compute"),), 0.0, 2.0, 0),))
    >>> found = page_data(graph, program, {"predicted": timeline}, {})
    >>> found["name"], found["streams"], found["timelines"]["predicted"]["taken"]
    (['add'], [['cpu', 'compute']], [2000000000])
    """
    runs = max((timeline.run_count for timeline in timelines.values()), default=1)
    positions = [i for i, instruction in enumerate(program) if isinstance(instruction, Item)]
    each = len(positions)
    items = [item for item in program if isinstance(item, Item)]
    needs, after = _links(graph, items)
    # 1. Repeat the items for each run: those of run r begin at r * each.
    number = {position: i for i, position in enumerate(positions)}

    def item_of(span: Span) -> int:
        return span.run * each + number[span.instruction]

    positions *= runs
    items *= runs
    needs, after = needs * runs, after * runs
    # 2. Describe them.
    rows = gantt_rows(*timelines.values())
    where = {
        (item_of(span), row.device): i
        for i, row in enumerate(rows)
        for spans in row.spans
        for span in spans
    }
    of_device = {row.device: i for i, row in reversed([*enumerate(rows)])}
    on = [[of_device.get(item.stream.device, 0)] for item in items]  # also of what did not run
    for span in (span for timeline in timelines.values() for span in timeline.spans):
        on[item_of(span)] = [where[item_of(span), stream.device] for stream in span.streams]
    tasks = [graph.task(item.task) if isinstance(item, Run) else None for item in items]
    finite = {name: round(limit) for name, limit in (limits or {}).items() if limit < math.inf}
    used = {name: steps for name, steps in memory.items() if any(n for _, n in steps)}
    return {
        "each": each,
        "streams": [[row.device, row.name] for row in rows],
        "hosts": [row.host for row in rows],
        "name": [item.task if isinstance(item, Run) else item.value for item in items],
        "on": on,
        "way": [f"{i.source} → {i.destination}" if isinstance(i, Copy) else "" for i in items],
        "free": [i for i, task in enumerate(tasks) if task is not None and task.view],
        "line": [b - a for a, b in itertools.pairwise([-len(program.inputs), *positions])],
        "needs": needs,
        "after": after,
        "source": [_source(task.origin) if task else "" for task in tasks],
        "module": [task.origin.module if task else "" for task in tasks],
        "phase": [task.origin.phase if task else "" for task in tasks],
        "calls": [", ".join(task.operators) if task else "" for task in tasks],
        "timelines": {name: _times(line, item_of, len(on)) for name, line in timelines.items()},
        "limits": finite,
        "memory": {name: _memory(steps) for name, steps in used.items()},
        **_views(graph, items[:each]),
    }


def _views(graph: Graph, items: Sequence[Item]) -> dict[str, Any]:
    """Return the drawings of the graph, whose boxes refer to a table of groups of items."""
    runs = {
        item.task: (i, item.stream.device) for i, item in enumerate(items) if isinstance(item, Run)
    }
    number = [runs.get(task.name, (-1, ""))[0] for task in graph.tasks]
    groups: dict[tuple[int, ...], int] = {}
    views = []
    for part in graph_parts(graph, {name: device for name, (_, device) in runs.items()}):
        mine = [tuple(number[i] for i in box if number[i] >= 0) for box in part["members"]]
        views.append({**part, "members": [groups.setdefault(box, len(groups)) for box in mine]})
    return {"views": views, "groups": list(groups)}


def _links(graph: Graph, items: Sequence[Item]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the distances to the items that each item takes data from, and only has to follow.

    Data that was copied is taken from the copy, and not from the task that produced it.
    """
    run_of: dict[int | None, int] = {}  # by task
    copied: dict[tuple[int, int, str], int] = {}
    needs: list[list[int]] = []
    after: list[list[int]] = []
    for i, item in enumerate(items):
        order: list[int] = []
        if isinstance(item, Run):
            task = graph.task(item.task)
            device = item.stream.device
            data = [copied[*use, device] for use in task.reads if (*use, device) in copied]
            copied_from = {copy - distance for copy in data for distance in needs[copy]}
            for dependency in task.dependencies:
                other = run_of.get(dependency.task)
                is_data = dependency.kind == "data"
                if other is not None and not (is_data and other in copied_from):
                    (data if is_data else order).append(other)
            run_of[task.index] = i
        else:
            use = Use(graph.value(item.value).index, item.version)
            source = copied.get((*use, item.source), run_of.get(graph.maker(use)))
            data = [] if source is None else [source]
            copied[*use, item.destination] = i
        needs.append([i - other for other in dict.fromkeys(data)])
        after.append([i - other for other in dict.fromkeys(order) if other not in data])
    return needs, after


def _source(origin: Origin) -> str:
    """Return where a task was added. The path is cut to two parts, for privacy."""
    path, row = origin.where
    return f"{'/'.join(PurePath(path).parts[-2:])}:{row}" if row else ""


def _times(timeline: Timeline, item_of: Callable[[Span], int], count: int) -> dict[str, Any]:
    """Return when items start, and how long they take; None and 0 for those that did not run.

    ``last`` is the distance to what the item waited for, of all that preceded it, or 0.
    """
    start: list[int | None] = [None] * count
    taken, last = [0] * count, [0] * count
    items = [*map(item_of, timeline.spans)]
    for item, span, before in zip(items, timeline.spans, preceding_spans(timeline), strict=True):
        start[item] = nanoseconds(span.start)
        taken[item] = nanoseconds(span.end) - nanoseconds(span.start)
        if before:
            last[item] = item - items[max(before, key=lambda i: timeline.spans[i].end)]
    return {
        "start": start,
        "taken": taken,
        "arrows": [(items[b], items[b] - items[a]) for a, b in timeline.arrows],
        "last": last,
        "critical": sorted(map(item_of, timeline.critical_path())),
        "period": nanoseconds(timeline.period or 0.0),
    }


def _memory(steps: Steps) -> dict[str, list[int]]:
    """Return at most ``STEPS`` steps, each the maximum of those it replaces."""
    size = -(-len(steps) // STEPS)
    few = [steps[i : i + size] for i in range(0, len(steps), size or 1)]
    nbytes = [round(max(held for _, held in group)) for group in few]
    return {"start": [nanoseconds(group[0][0]) for group in few], "nbytes": nbytes}
