"""Encode a schedule for the HTML page as compact columns and tables.

An *item* is a run or a copy of the program. Everything refers to it by its index in issue order.
Columns are delta-encoded and compressed: ten thousand tasks with their program take half a
megabyte. Knows no HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from autosched.graph.graph import Graph
from autosched.graph.task import Origin, Task
from autosched.program.program import Copy, Program, Run, Stream, occupied
from autosched.timeline.timeline import Timeline
from autosched.viz.format import natural

__all__ = ["Steps", "columns"]

STEPS = 600  # of a device's memory over time, at most: more than a row has pixels
DIGITS = 8  # of the longest time, so that a clock tick is far below a pixel at any useful zoom

Steps = Sequence[tuple[float, float]]  # (seconds, bytes from then on)


def columns(
    graph: Graph,
    program: Program,
    timelines: Mapping[str, Timeline],
    memory: Mapping[str, Steps],
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the data of the page as a JSON object; times are whole clock ticks.

    ``needs`` are the items that an item takes data from, ``after`` those that it only has to
    follow. Like ``waits``, they are stored as distances between items: small numbers compress well.

    >>> from autosched.timeline.timeline import Span
    >>> graph, program = Graph(), Program.parse("cpu/compute run add")
    >>> y = graph.input("x") + 1
    >>> timeline = Timeline((Span("run", "add", (Stream("cpu", "compute"),), 0.0, 2.0, 0),))
    >>> found = columns(graph, program, {"predicted": timeline}, {})
    >>> found["name"], found["streams"], found["timelines"]["predicted"]["seconds"], found["click"]
    (['add'], [['cpu', 'compute']], [20000000], 1e-07)
    """
    positions = [i for i, instruction in enumerate(program) if isinstance(instruction, (Run, Copy))]
    items = [item for item in program if isinstance(item, (Run, Copy))]
    place = {position: item for item, position in enumerate(positions)}
    streams = sorted(program.streams, key=_stream_order)
    number = {stream: i for i, stream in enumerate(streams)}
    on = [[number[stream] for stream in occupied(item)] for item in items]
    click = _click(max((timeline.makespan for timeline in timelines.values()), default=0.0))
    needs, after = _links(graph, items)
    tasks = [graph.task(item.task) if isinstance(item, Run) else None for item in items]
    return {
        "click": click,
        "streams": [list(stream) for stream in streams],
        "name": [item.task if isinstance(item, Run) else item.value for item in items],
        "on": on,
        **_words("way", [_way(item) for item in items]),
        "views": [i for i, task in enumerate(tasks) if task is not None and task.view],
        "line": [b - a for a, b in itertools.pairwise([-len(program.inputs), *positions])],
        "needs": needs,
        "after": after,
        **_origins(tasks),
        "timelines": {
            name: _times(timeline, place, on, click) for name, timeline in timelines.items()
        },
        "limits": {
            device: round(limit) for device, limit in (limits or {}).items() if limit < math.inf
        },
        "memory": {
            device: _thinned(steps, click)
            for device, steps in memory.items()
            if any(n for _, n in steps)
        },
    }


def _way(item: Run | Copy) -> str:
    return f"{item.source} \u2192 {item.destination}" if isinstance(item, Copy) else ""


def _stream_order(stream: Stream) -> tuple[Any, ...]:
    return natural(stream.device), not stream.name.startswith("compute"), natural(stream.name)


def _click(makespan: float) -> float:
    """Return the power of ten in seconds that gives the makespan about ``DIGITS`` digits."""
    power = math.floor(math.log10(makespan)) - DIGITS + 1 if makespan else -9
    return float(f"1e{max(power, -300)}")  # smaller ones are hardly distinguishable from 0


def _links(graph: Graph, items: Sequence[Run | Copy]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the distances to the items that each item takes data from, and only has to follow.

    Data that was copied is taken from the copy, and not from the task that produced it.
    """
    ran = {item.task: i for i, item in enumerate(items) if isinstance(item, Run)}
    left = {use: ran[task.name] for task in graph.tasks if task.name in ran for use in _left(task)}
    copied: dict[tuple[int, int, str], int] = {}
    needs: list[list[int]] = []
    after: list[list[int]] = []
    for i, item in enumerate(items):
        behind: list[int] = []
        if isinstance(item, Run):
            task = graph.task(item.task)
            device = item.stream.device
            found = [copied[*use, device] for use in task.reads if (*use, device) in copied]
            through = {copy - back for copy in found for back in needs[copy]}
            for dependency in task.dependencies:
                before = ran.get(graph.tasks[dependency.task].name)
                if before is not None and not (dependency.kind == "data" and before in through):
                    (found if dependency.kind == "data" else behind).append(before)
        else:
            use = graph.value(item.value).index, item.version
            made = copied.get((*use, item.source), left.get(use))
            found = [made] if made is not None else []
            copied[*use, item.destination] = i
        needs.append([i - before for before in dict.fromkeys(found)])
        after.append([i - before for before in dict.fromkeys(behind) if before not in found])
    return needs, after


def _left(task: Task) -> Iterator[tuple[int, int]]:
    """Yield the versions of values that a task produces."""
    yield from task.outputs
    for value, version in task.changes:
        yield value, version + 1


def _origins(tasks: Sequence[Task | None]) -> dict[str, Any]:
    """Return source locations of tasks. Paths are cut to two parts, for privacy."""
    origins = [task.origin if task is not None else Origin(("", 0)) for task in tasks]
    short = {
        file: "/".join(PurePath(file).parts[-2:])
        for file in dict.fromkeys(origin.where[0] for origin in origins)
    }
    return {
        "row": [origin.where[1] for origin in origins],
        **_words("file", [short[origin.where[0]] for origin in origins]),
        **_words("module", [origin.module for origin in origins]),
        **_words("phase", [origin.phase for origin in origins]),
    }


def _words(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return a table of distinct words, the empty one first, and the index of each item's word."""
    table = list(dict.fromkeys(["", *words]))
    number = {word: i for i, word in enumerate(table)}
    return {name: [number[word] for word in words], f"{name}s": table}


def _times(
    timeline: Timeline, items: Mapping[int, int], on: Sequence[Sequence[int]], click: float
) -> dict[str, Any]:
    """Return the duration of items, and ``idle``, the gap since the previous item on the stream.

    The stream is the first one of the item. ``idle`` is None for items that did not run.
    """
    found = {items[span.instruction]: span for span in timeline.spans if span.instruction in items}
    idle: list[int | None] = [None] * len(items)
    seconds: list[int] = [0] * len(items)
    ended: dict[int, int] = {}
    for item, streams in enumerate(on):
        if item in found:
            start = round(found[item].start / click)
            end = round(found[item].end / click)
            idle[item] = start - ended.get(streams[0], 0)
            seconds[item] = end - start
            ended |= dict.fromkeys(streams, end)
    waits: list[list[int]] = [[] for _ in items]
    for a, b in timeline.arrows:
        before, item = (items[timeline.spans[end].instruction] for end in (a, b))
        waits[item].append(item - before)
    return {
        "idle": idle,
        "seconds": seconds,
        "waits": waits,
        "critical": sorted(items[span.instruction] for span in timeline.critical_path()),
        "pauses": [
            [round(start / click), round((end - start) / click)] for start, end in timeline.pauses
        ],
    }


def _thinned(steps: Steps, click: float) -> dict[str, list[int]]:
    """Return at most ``STEPS`` steps, each the maximum of the steps that it replaces."""
    size = -(-len(steps) // STEPS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    nbytes = [round(max(held for _, held in group)) for group in groups]
    return {"start": [round(group[0][0] / click) for group in groups], "nbytes": nbytes}
