"""Choose which tasks can be fused, and groups of them that form regions.

A region begins where its stream waits for another stream, and ends where another stream waits for
it. So no task waits longer for another stream than it did before fusion. Alternatively, all tasks
of a device form one region, as far as dependencies allow. ``autosched.coarsening.merging`` splits
groups that would create a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload

from autosched.coarsening.folding import Folding
from autosched.coarsening.grouping import label_of, named
from autosched.fusion.inductor import AS_STRIDED, READ_NUMBER, TAGS
from autosched.graph.graph import HOST, Graph
from autosched.graph.task import Task
from autosched.placement import Placement
from autosched.program.program import Program, Record, Run, Stream, Wait

__all__ = ["by_device", "by_stream", "reads_numbers", "unfusable"]

# Operators for which Inductor generates atomic additions.
_SUMS = frozenset(
    getattr(torch.ops.aten, name)
    for name in """
    embedding_dense_backward index_add index_add_ index_put index_put_ _unsafe_index_put
    scatter_add scatter_add_ scatter_reduce scatter_reduce_
    """.split()
)


def unfusable(graph: Graph, unknown: Mapping[str, str] | None) -> dict[str, str]:
    """Return the tasks that cannot be part of a region, each with the reason.

    ``unknown`` has the tasks that cannot run on fake tensors, and why; None if that is not known.
    Views are omitted: each region that needs one makes it.
    """
    merged = Folding(graph).merged
    found: dict[str, str] = {}
    strided: set[int] = set()  # views made by as_strided, and views of them
    for task in graph.tasks:
        if task.view:
            if _is_one_of(task, AS_STRIDED) or any(use.value in strided for use in task.reads):
                strided.update(use.value for use in task.outputs)
            continue
        reason = (unknown or {}).get(task.name) or _reason(task, sizes_known=unknown is not None)
        if reason is None and task.index not in merged:
            reason = "touches a part of memory, or may return its argument"
        if reason is None and any(use.value in strided for use in task.reads):
            reason = "reads a view that as_strided makes"
        if reason is None and task.name in graph.alike:
            reason = "is done by several ranks, which must round alike"
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
        if task.fn is READ_NUMBER or _is_python(task, numbers):
            numbers.update(use.value for use in task.outputs)
        elif not any(use.value in numbers for use in task.reads):
            continue
        found.append(task)
    return found


def _is_python(task: Task, numbers: Container[int]) -> bool:
    """Whether a task computes with numbers alone."""
    return bool(task.reads) and all(use.value in numbers for use in task.reads)


def _reason(task: Task, sizes_known: bool) -> str | None:
    """Return why a task by itself cannot be fused.

    Indexing is tagged as if its result's size depended on data, which is so for masks alone. If
    sizes are known, tasks for which it is so are known, too.
    """
    if task.fn is None:
        return "has no function"
    if task.reads_file:
        return "reads a file"
    if task.random:
        return "draws random numbers"
    if task.shared:
        return f"uses the state of {type(task.shared[0]).__name__}"
    if task.device == HOST and isinstance(task.fn, FunctionType):
        return "is a Python function that is bound to the host"
    if _is_one_of(task, _SUMS):
        return "adds numbers in an order that varies, if compiled"
    if isinstance(task.fn, OpOverload) and task.fn is not READ_NUMBER:
        tags = set(task.fn.tags) - ({torch.Tag.dynamic_output_shape} if sizes_known else set())
        return next((why for tag, why in TAGS.items() if tag in tags), None)
    return next((why for part in task.parts if (why := _reason(part, sizes_known))), None)


def _is_one_of(task: Task, packets: Collection[Any]) -> bool:
    """Whether a task calls an overload of one of these operators."""
    return isinstance(task.fn, OpOverload) and task.fn.overloadpacket in packets


def by_device(
    graph: Graph, placement: Placement, can_fuse: Callable[[Task], bool]
) -> dict[str, str]:
    """Return a group of all tasks of each device, by task name."""
    return _groups(graph, can_fuse, lambda task: placement.device[task.name])


def by_stream(graph: Graph, program: Program, can_fuse: Callable[[Task], bool]) -> dict[str, str]:
    """Return the groups of tasks between which no stream waits or is waited for.

    A task that reads nothing, and that no task needs, joins the group of the task before it: batch
    norm has such tasks in evaluation mode.
    """
    segment: dict[Stream, int] = dict.fromkeys(program.streams, 0)
    found: dict[str, Any] = {}
    for instruction in program.instructions:
        if isinstance(instruction, (Wait, Record)):
            segment[instruction.stream] += 1
        elif isinstance(instruction, Run):
            found[instruction.task] = instruction.stream, segment[instruction.stream]
    latest: dict[str, Any] = {}  # by device, the group of the task before

    def key(task: Task) -> Any:
        own = found[task.name]
        device = own[0].device
        if not task.reads and not graph.users[task.index]:
            return latest.get(device, own)
        latest[device] = own
        return own

    return _groups(graph, can_fuse, key)


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
