"""What the page shows, as columns of numbers and tables of words that JSON holds in few bytes. Knows no HTML.

An *item* is a run or a copy of the program; everything names it by its place among them, in issue order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from autosched.graph import Graph, Task
from autosched.program import Copy, Program, Run, Stream, occupied
from autosched.timeline import Timeline
from autosched.viz.paint import natural

__all__ = ["Steps", "columns"]

STEPS = 600  # at most so many of a device's bytes over time: more than a row has pixels to show
DIGITS = 9  # of the longest time, so that a click of the clock is far below a pixel at any zoom that helps

Steps = Sequence[tuple[float, float]]  # (seconds, bytes from then on)


def columns(
    graph: Graph,
    program: Program,
    timelines: Mapping[str, Timeline],
    memory: Mapping[str, Steps],
) -> dict[str, Any]:
    """Return all that the page knows of a schedule and its timelines, as JSON takes it; times are whole clicks.

    ``needs`` are the items that an item takes data from, ``after`` those that it only comes behind.

    >>> from autosched.timeline import Span
    >>> graph, program = Graph(), Program.parse("cpu/compute run add")
    >>> y = graph.input("x") + 1
    >>> timeline = Timeline((Span("run", "add", (Stream("cpu", "compute"),), 0.0, 2.0, 0),))
    >>> found = columns(graph, program, {"predicted": timeline}, {})
    >>> found["name"], found["streams"], found["timelines"]["predicted"]["seconds"], found["click"]
    (['add'], [['cpu', 'compute']], [200000000], 1e-08)
    """
    items = [(i, instruction) for i, instruction in enumerate(program) if isinstance(instruction, (Run, Copy))]
    place = {position: item for item, (position, _) in enumerate(items)}
    streams = sorted(program.streams, key=_stream_order)
    number = {stream: i for i, stream in enumerate(streams)}
    click = _click(max((timeline.makespan for timeline in timelines.values()), default=0.0))
    needs, after = _links(graph, [instruction for _, instruction in items])
    tasks = [graph.task(item.task) if isinstance(item, Run) else None for _, item in items]
    return {
        "click": click,
        "streams": [list(stream) for stream in streams],
        "name": [item.task if isinstance(item, Run) else item.value for _, item in items],
        "on": [[number[stream] for stream in occupied(item)] for _, item in items],
        "copies": {i: [c.source, c.destination] for i, (_, c) in enumerate(items) if isinstance(c, Copy)},
        "views": [i for i, task in enumerate(tasks) if task is not None and task.view],
        "line": [len(program.inputs) + i for i, _ in items],
        "needs": needs,
        "after": after,
        **_origins(tasks),
        "timelines": {name: _times(timeline, place, click) for name, timeline in timelines.items()},
        "memory": {device: _thinned(steps, click) for device, steps in memory.items() if steps},
    }


def _stream_order(stream: Stream) -> tuple[Any, ...]:
    return natural(stream.device), not stream.name.startswith("compute"), natural(stream.name)


def _click(makespan: float) -> float:
    """Return the power of ten in seconds that gives the makespan about ``DIGITS`` digits."""
    return float(f"1e{math.floor(math.log10(makespan)) - DIGITS + 1}") if makespan else 1e-9


def _links(graph: Graph, items: Sequence[Run | Copy]) -> tuple[list[list[int]], list[list[int]]]:
    """Return what each item takes data from, copies before the tasks behind them, and what it only comes behind."""
    ran = {item.task: i for i, item in enumerate(items) if isinstance(item, Run)}
    copied: dict[tuple[int, int, str], int] = {}
    left = {use: task.name for task in graph.tasks for use in _left(task)}
    needs: list[list[int]] = []
    after: list[list[int]] = []
    for i, item in enumerate(items):
        found, behind = [], []
        if isinstance(item, Run):
            task, device = graph.task(item.task), item.stream.device
            found += [copied[*use, device] for use in task.reads if (*use, device) in copied]
            for dependency in task.dependencies:
                before = ran.get(graph.tasks[dependency.task].name)
                if before is not None:
                    (found if dependency.kind == "data" else behind).append(before)
        else:
            value = graph.value(item.value).index
            maker = ran.get(left.get((value, item.version), ""))
            found += [at for at in (copied.get((value, item.version, item.source)), maker) if at is not None][:1]
            copied[value, item.version, item.destination] = i
        needs.append(list(dict.fromkeys(found)))
        after.append([before for before in dict.fromkeys(behind) if before not in found])
    return needs, after


def _left(task: Task) -> Iterator[tuple[int, int]]:
    """Yield the versions of values that a task leaves."""
    yield from task.outputs
    for value, version in task.changes:
        yield value, version + 1


def _origins(tasks: Sequence[Task | None]) -> dict[str, Any]:
    """Return where items come from; a copy has the origin of nothing. Paths are cut: the rest is the user's affair."""
    origins = [task.origin if task is not None else None for task in tasks]
    found: dict[str, Any] = {"row": [origin.where[1] if origin else 0 for origin in origins]}
    for name, words in {
        "module": [origin.module if origin else "" for origin in origins],
        "phase": [origin.phase if origin else "" for origin in origins],
        "file": ["/".join(PurePath(origin.where[0]).parts[-2:]) if origin else "" for origin in origins],
    }.items():
        table = list(dict.fromkeys(["", *words]))
        number = {word: i for i, word in enumerate(table)}
        found[name] = [number[word] for word in words]
        found[f"{name}s"] = table
    return found


def _times(timeline: Timeline, place: Mapping[int, int], click: float) -> dict[str, Any]:
    """Return start, each counted from the one before, and duration of each item that ran, by ``item``."""
    spans = [span for span in timeline.spans if span.instruction in place]
    clicks = [round(span.start / click) for span in spans]
    return {
        "item": [place[span.instruction] for span in spans],
        "start": [b - a for a, b in itertools.pairwise([0, *clicks])],
        "seconds": [max(round(span.end / click) - at, 0) for span, at in zip(spans, clicks, strict=True)],
        "critical": [place[span.instruction] for span in timeline.critical_path() if span.instruction in place],
        "waits": [[place[timeline.spans[end].instruction] for end in arrow] for arrow in timeline.arrows],
        "pauses": [[round(start / click), round((end - start) / click)] for start, end in timeline.pauses],
    }


def _thinned(steps: Steps, click: float) -> dict[str, list[int]]:
    """Return at most ``STEPS`` steps, each the highest of those it stands for."""
    size = -(-len(steps) // STEPS)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    clicks = [round(group[0][0] / click) for group in groups]
    return {
        "start": [b - a for a, b in itertools.pairwise([0, *clicks])],
        "nbytes": [round(max(held for _, held in group)) for group in groups],
    }
