"""Choose which tasks can be fused, and groups of them that form regions.

A region begins where its stream waits for another stream, and ends where another stream waits for
it, unless it is shorter than a wait: then it goes on. So a task waits little longer for another
stream than before fusion. Alternatively, all tasks of a device form one region, as far
as dependencies allow. ``autosched.coarsening`` splits groups that would create a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from autosched.coarsening import Folding, label_of, named
from autosched.fusion.rewriting import READ_NUMBER, takes_number
from autosched.fusion.tracing import TAGS
from autosched.graph.graph import HOST, Graph
from autosched.graph.task import Task
from autosched.graph.value import Value
from autosched.placement import Placement
from autosched.program.program import Program, Record, Run, Stream, Wait

# Seconds in which a stream continues after another one for which it waits: a thread is woken, or gets
# the global lock from the other one, which goes on, too; or an accelerator sees an event.
_WAIT = {"cpu": 50e-6}
_WAIT_OTHERWISE = 5e-6

# Operators for which Inductor generates atomic additions.
_SUMS = frozenset(
    """
    embedding_dense_backward index_add index_add_ index_put index_put_ _unsafe_index_put put put_
    _unsafe_masked_index_put_accumulate scatter_add scatter_add_ scatter_reduce scatter_reduce_
    col2im unfold_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    grid_sampler_2d_backward index_reduce index_reduce_ upsample_bicubic2d_backward
    """.split()
)
# Operators of recurrent layers: some leave gradients undefined that nobody needs, and Inductor
# returns no workspace of one.
_MAY_BE_UNDEFINED = {"mkldnn_rnn_layer"}.union(
    name
    for name in dir(torch.ops.aten)
    if name.endswith("_backward") and any(kind in name for kind in ("rnn", "lstm", "gru"))
)
_REFUSED = {
    **dict.fromkeys(_SUMS, "adds numbers in an order that varies, if compiled"),
    **dict.fromkeys(_MAY_BE_UNDEFINED, "may leave results undefined"),
    # Inductor's C++ gives the wrong types to its functions of double precision.
    "frexp": "has no C++ that compiles in double precision",
}

# One of these makes an operator that writes traceable without data.
_META = (
    DispatchKey.Meta,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeImplicitAutograd,
)


def unfusable(
    graph: Graph,
    unknown: Mapping[str, str] | None,
    floats: Iterable[int] = (),
    place: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the tasks that cannot be part of a region, each with the reason.

    ``unknown`` has the tasks that cannot run on fake tensors, and why; None if that is not known.
    ``floats`` are the inputs (value indices) that are numbers. Views are omitted: each region that
    needs one makes it.
    """
    merged = Folding(graph, place or {}).merged
    tasks_with_numbers, numbers = _find_numbers(graph.tasks, floats)
    with_numbers = {task.index for task in tasks_with_numbers}
    found: dict[str, str] = {}
    strided: set[int] = set()  # views made by as_strided, and views of them
    for task in graph.tasks:
        if task.view:
            # Capture wraps it in a function of the same name.
            label = _name(task.fn) or getattr(task.fn, "__name__", None)
            begins = label in ("as_strided", "as_strided_")
            if begins or any(use.value in strided for use in task.reads):
                strided.update(use.value for use in task.outputs)
            continue
        device = (place or {}).get(task.name, task.device)
        reason = (unknown or {}).get(task.name) or _reason(task, device, unknown is not None)
        if reason is None and task.index in with_numbers:
            reason = _refuses_number(task, numbers)
        if reason is None and task.index not in merged:
            reason = "touches a part of memory, or may return its argument"
        if reason is None and any(use.value in strided for use in task.reads):
            reason = "reads a view that as_strided makes"
        if reason is not None:
            found[task.name] = reason
    return found


def reads_numbers(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks that read a number from a tensor, or use such a number.

    A region can contain them if no size and no decision depends on the number.
    """
    return _find_numbers(tasks, ())[0]


def _find_numbers(tasks: Iterable[Task], floats: Iterable[int]) -> tuple[list[Task], set[int]]:
    """Return the tasks that make or take numbers, and the values that are numbers."""
    numbers = {*floats}
    found = []
    for task in tasks:
        if task.fn is READ_NUMBER or _is_python(task, numbers):
            numbers.update(use.value for use in task.outputs)
        elif not any(use.value in numbers for use in task.reads):
            continue
        found.append(task)
    return found, numbers


def _is_python(task: Task, numbers: Container[int]) -> bool:
    """Whether a task computes with numbers alone."""
    return bool(task.reads) and all(use.value in numbers for use in task.reads)


def _reason(task: Task, device: str | None, sizes_known: bool) -> str | None:
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
    if device == HOST and isinstance(task.fn, FunctionType):
        return "is a Python function that is bound to the host"
    if (name := _name(task.fn)) in _REFUSED:
        return _REFUSED[name]
    if isinstance(task.fn, OpOverload) and task.fn is not READ_NUMBER:
        if task.fn._schema.is_mutable and not any(map(task.fn.has_kernel_for_dispatch_key, _META)):
            return "has no kernel for tensors without data"
        if _writes_lists(task.fn):
            return "writes to lists of tensors in one kernel"
        tags = set(task.fn.tags) - ({torch.Tag.dynamic_output_shape} if sizes_known else set())
        return next((why for tag, why in TAGS.items() if tag in tags), None)
    reasons = (_reason(part, part.device, sizes_known) for part in task.parts)
    return next(filter(None, reasons), None)


def _writes_lists(fn: OpOverload[Any, Any]) -> bool:
    """Whether an operator that cannot be rewritten writes to lists of tensors, as in optimizers."""
    lists = [arg for arg in fn._schema.arguments if isinstance(arg.type, torch.ListType)]
    is_each = fn._schema.name.startswith("aten::_foreach_")
    return not is_each and any(arg.alias_info and arg.alias_info.is_write for arg in lists)


def _refuses_number(task: Task, numbers: Container[int]) -> str | None:
    """Return why a task that takes one of these numbers, or reads one, cannot be fused."""
    if task.composite is not None:
        pairs = zip(task.composite.takes, task.args, strict=False)
        inner = [taken for taken, arg in pairs if isinstance(arg, Value) and arg.index in numbers]
        found, known = _find_numbers(task.parts, inner)
        return next((why for part in found if (why := _refuses_number(part, known))), None)
    name = _name(task.fn)
    if task.fn is READ_NUMBER or name is None or takes_number(name):
        return None
    return f"{name!r} takes a number that varies"


def _name(fn: Any) -> str | None:
    """Return the name of an operator, or of a method or builtin function of torch."""
    fn = getattr(fn, "__wrapped__", fn)
    if isinstance(fn, OpOverload):
        return fn._schema.name.partition("::")[2]
    if not isinstance(fn, (BuiltinFunctionType, MethodDescriptorType)):
        return None
    module = getattr(fn, "__module__", None) or getattr(fn, "__objclass__", fn).__module__
    return fn.__name__ if str(module).startswith("torch") else None


def by_device(
    graph: Graph, placement: Placement, can_fuse: Callable[[Task], bool]
) -> dict[str, str]:
    """Return a group of all tasks of each device, by task name."""
    groups: dict[str, list[Task]] = {}
    for task in filter(can_fuse, graph.tasks):
        groups.setdefault(placement.device[task.name], []).append(task)
    return _named(groups.values())


def by_stream(
    graph: Graph,
    program: Program,
    members: Callable[[Task], Sequence[Task]],
    seconds: Callable[[Task, str], float],
) -> dict[str, str]:
    """Return the groups of tasks between which a stream waits or is waited for.

    ``members`` are the tasks that stand for a task in its group. ``seconds`` are those of a task on
    a device: a group that is shorter than a wait goes on after one. A task that reads nothing, and
    that no task needs, joins the group of the task before it: batch norm has such tasks in
    evaluation mode. What is repeated to save memory is not in the graph, and in no group.
    """
    number: dict[Stream, int] = dict.fromkeys(program.streams, 0)
    worked: dict[Stream, float] = dict.fromkeys(program.streams, 0.0)
    groups: dict[tuple[Stream, int], list[Task]] = {}
    latest: dict[str, list[Task]] = {}  # by device
    for instruction in program.instructions:
        stream = instruction.stream
        if isinstance(instruction, (Wait, Record)):
            if worked[stream] > wait_seconds(stream.device):
                number[stream] += 1
                worked[stream] = 0.0
        elif isinstance(instruction, Run) and instruction.task in graph.names:  # not repeated
            task = graph.task(instruction.task)
            group = groups.setdefault((stream, number[stream]), [])
            if task.reads or graph.users[task.index]:
                latest[stream.device] = group
            if own := members(task):
                latest.get(stream.device, group).extend(own)
                worked[stream] += seconds(task, stream.device)
    return _named(sorted(tasks, key=lambda task: task.index) for tasks in groups.values())


def wait_seconds(device: str) -> float:
    """Return the seconds in which a stream continues after another one for which it waits."""
    return _WAIT.get(device.partition(":")[0], _WAIT_OTHERWISE)


def _named(groups: Iterable[Sequence[Task]]) -> dict[str, str]:
    """Return the name of the group of each task; views are in none, nor are tasks by themselves."""
    found = [[task for task in tasks if not task.view] for tasks in groups]
    return named((label_of(tasks), tasks) for tasks in found if len(tasks) > 1)
