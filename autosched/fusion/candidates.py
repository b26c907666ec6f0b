"""Choose which tasks can be fused, and groups of them that form regions.

A region begins where its stream waits for another stream, and ends where another stream waits for
it. So no task waits longer for another stream than it did before fusion. Alternatively, all tasks
of a device form one region, as far as dependencies allow. ``autosched.coarsening.merging`` splits
groups that would create a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.coarsening.folding import Folding
from autosched.coarsening.grouping import label_of, named
from autosched.graph.graph import Graph
from autosched.graph.task import Task
from autosched.placement import Placement
from autosched.program.program import Program, Record, Run, Stream, Wait

__all__ = ["by_device", "by_stream", "reads_numbers", "unfusable"]

_UNFUSABLE_TAGS = {
    torch.Tag.data_dependent_output: "returns what depends on data",
    torch.Tag.dynamic_output_shape: "returns a tensor whose size depends on data",
}


def unfusable(graph: Graph, unknown: Mapping[str, str]) -> dict[str, str]:
    """Return the tasks that cannot be part of a region, each with the reason.

    ``unknown`` has the tasks that cannot run on fake tensors, and why. Views are omitted: each
    region that needs one makes it.
    """
    merged = Folding(graph).merged
    found: dict[str, str] = {}
    for task in graph.tasks:
        if task.view:
            continue
        reason = unknown.get(task.name) or _reason(task)
        if reason is None and task.index not in merged:
            reason = "touches a part of memory, or may return its argument"
        if reason is not None:
            found[task.name] = reason
    return found


def reads_numbers(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that read a number from a tensor, or use such a number.

    A region can contain them if no size and no decision depends on the number.
    """
    numbers: set[int] = set()  # values that are no tensors
    found = []
    for task in tasks:
        if task.fn is torch.ops.aten._local_scalar_dense.default or _is_python(task, numbers):
            numbers.update(use.value for use in task.outputs)
        elif not any(use.value in numbers for use in task.reads):
            continue
        found.append(task)
    return found


def _is_python(task: Task, numbers: Container[int]) -> bool:
    """Whether a task computes with numbers alone."""
    return bool(task.reads) and all(use.value in numbers for use in task.reads)


def _reason(task: Task) -> str | None:
    """Return why a task by itself cannot be fused."""
    if task.fn is None:
        return "has no function"
    if task.random:
        return "draws random numbers"
    if task.shared:
        return f"uses the state of {type(task.shared[0]).__name__}"
    if (
        isinstance(task.fn, OpOverload)
        and task.fn is not torch.ops.aten._local_scalar_dense.default
    ):
        return next((why for tag, why in _UNFUSABLE_TAGS.items() if tag in task.fn.tags), None)
    return next((why for part in task.parts if (why := _reason(part))), None)


def by_device(
    graph: Graph, placement: Placement, can_fuse: Callable[[Task], bool]
) -> dict[str, str]:
    """Return a group of all tasks of each device, by task name."""
    return _groups(graph, can_fuse, lambda task: placement.device[task.name])


def by_stream(graph: Graph, program: Program, can_fuse: Callable[[Task], bool]) -> dict[str, str]:
    """Return the groups of tasks between which no stream waits or is waited for."""
    segment: dict[Stream, int] = dict.fromkeys(program.streams, 0)
    found: dict[str, Any] = {}
    for instruction in program.instructions:
        if isinstance(instruction, (Wait, Record)):
            segment[instruction.stream] += 1
        elif isinstance(instruction, Run):
            found[instruction.task] = instruction.stream, segment[instruction.stream]
    return _groups(graph, can_fuse, lambda task: found[task.name])


def _groups(
    graph: Graph, can_fuse: Callable[[Task], bool], key: Callable[[Task], Any]
) -> dict[str, str]:
    """Return the groups of tasks with equal keys; a group has at least two tasks."""
    groups: dict[Any, list[Task]] = {}
    for task in graph.tasks:
        if not task.view and can_fuse(task):
            groups.setdefault(key(task), []).append(task)
    return named(_labelled(tasks for tasks in groups.values() if len(tasks) > 1))


def _labelled(groups: Iterable[Sequence[Task]]) -> Iterable[tuple[str, Sequence[Task]]]:
    return ((label_of(tasks), tasks) for tasks in groups)
