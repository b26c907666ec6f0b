"""Choose which tasks can be fused, and groups of them that form regions.

A region begins where its stream waits for another stream, and ends where another stream waits for
it. So no task waits longer for another stream than it did before fusion. Alternatively, all tasks
of a device form one region, as far as dependencies allow. ``autosched.coarsening.merging`` splits
groups that would create a cycle.

Short tasks between two waits are run again by each region that needs their results, as in
scheduling by task duplication (Ahmad, Kwok, "On exploiting task duplication in parallel program
scheduling", IEEE Transactions on Parallel and Distributed Systems, 1998). Where branches are joined
by a concatenation or a sum, one stream would wait for the other, join them, and then be waited for:
when each stream joins them for itself, one of these waits is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from autosched.coarsening.folding import Folding
from autosched.coarsening.grouping import label_of, named
from autosched.fusion.joining import Step, joined, makespan
from autosched.fusion.rewriting import READ_NUMBER, takes_number
from autosched.fusion.tracing import TAGS
from autosched.graph.graph import HOST, Graph
from autosched.graph.task import Task
from autosched.graph.value import Value
from autosched.machine.machine import Machine
from autosched.measurement.signatures import function_text
from autosched.placement import Placement
from autosched.program.program import Program, Record, Run, Stream, Wait
from autosched.timeline.timeline import Timeline

__all__ = [
    "by_device",
    "by_joining",
    "by_stream",
    "is_repeatable",
    "reads_numbers",
    "repeatable",
    "seconds_with_waits",
    "unfusable",
]

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

# One of these makes an operator that writes traceable without data.
_META = (
    DispatchKey.Meta,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeImplicitAutograd,
)


def unfusable(
    graph: Graph, unknown: Mapping[str, str] | None, floats: Iterable[int] = ()
) -> dict[str, str]:
    """Return the tasks that cannot be part of a region, each with the reason.

    ``unknown`` has the tasks that cannot run on fake tensors, and why; None if that is not known.
    ``floats`` are the inputs (value indices) that are numbers. Views are omitted: each region that
    needs one makes it.
    """
    merged = Folding(graph).merged
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
        reason = (unknown or {}).get(task.name) or _reason(task, sizes_known=unknown is not None)
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
    """Return the tasks that make or take numbers, and which values are numbers.

    ``floats`` are those that the tasks get.
    """
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
    if _is_one_of(task, _MAY_BE_UNDEFINED):
        return "may leave results undefined"
    if isinstance(task.fn, OpOverload) and task.fn is not READ_NUMBER:
        if task.fn._schema.is_mutable and not any(map(task.fn.has_kernel_for_dispatch_key, _META)):
            return "has no kernel for tensors without data"
        if _writes_lists(task.fn):
            return "writes to lists of tensors in one kernel"
        tags = set(task.fn.tags) - ({torch.Tag.dynamic_output_shape} if sizes_known else set())
        return next((why for tag, why in TAGS.items() if tag in tags), None)
    return next((why for part in task.parts if (why := _reason(part, sizes_known))), None)


def _writes_lists(fn: OpOverload[Any, Any]) -> bool:
    """Whether an operator, other than those that can be rewritten, writes to lists of tensors.

    The fused steps of optimizers do. Inductor cannot call them from C++.
    """
    written = [arg.type for arg in fn._schema.arguments if _is_written(arg)]
    is_each = fn._schema.name.startswith("aten::_foreach_")
    return not is_each and any(isinstance(kind, torch.ListType) for kind in written)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


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
    text = (
        function_text(fn) if isinstance(fn, (BuiltinFunctionType, MethodDescriptorType)) else None
    )
    if text is None or not text.startswith("torch"):
        return None
    return text.rpartition(".")[2]


def _is_one_of(task: Task, names: Collection[str]) -> bool:
    """Whether a task calls an operator of one of these names."""
    return _name(task.fn) in names


def by_device(
    graph: Graph, placement: Placement, can_fuse: Callable[[Task], bool]
) -> dict[str, str]:
    """Return a group of all tasks of each device, by task name."""
    return _groups(graph, can_fuse, lambda task: placement.device[task.name])


def by_stream(
    graph: Graph,
    program: Program,
    can_fuse: Callable[[Task], bool],
    repeated: Container[str] = (),
) -> dict[str, str]:
    """Return the groups of tasks between which no stream waits or is waited for.

    A task that reads nothing, and that no task needs, joins the group of the task before it: batch
    norm has such tasks in evaluation mode. Tasks that are ``repeated`` have no group.
    """
    found = _segments(program)
    latest: dict[str, _Segment] = {}  # by device, the group of the task before

    def key(task: Task) -> _Segment:
        own = found[task.name]
        device = own[0].device
        if not task.reads and not graph.users[task.index]:
            return latest.get(device, own)
        latest[device] = own
        return own

    return _groups(graph, lambda task: can_fuse(task) and task.name not in repeated, key)


def by_joining(
    graph: Graph, machine: Machine, timeline: Timeline, members: Mapping[str, Sequence[Task]]
) -> dict[str, str]:
    """Return fewer groups than those of which a fused graph was made.

    ``timeline`` predicts the fused graph, and ``members`` are the original tasks of each of its
    tasks that can be part of a larger region. ``autosched.fusion.joining`` joins them.
    """
    spans = timeline.spans
    steps = _steps(graph, machine, timeline, members)
    groups = joined(steps)
    alone = {i for i, span in enumerate(spans) if span.kind == "run"}.difference(*groups)
    together = [
        [task for i in group for task in members.get(spans[i].name, ())]
        for group in [*groups, *([i] for i in sorted(alone))]
    ]
    return named(_labelled(tasks for tasks in together if len(tasks) > 1))


def seconds_with_waits(graph: Graph, machine: Machine, timeline: Timeline) -> float:
    """Return the makespan that ``timeline`` predicts, if waits for other streams take time."""
    return makespan(_steps(graph, machine, timeline, ()))


def _steps(
    graph: Graph, machine: Machine, timeline: Timeline, joinable: Container[str]
) -> list[Step]:
    """Return a step for each span of a timeline of this graph."""
    spans = timeline.spans
    numbers = {span.name: i for i, span in enumerate(spans) if span.kind == "run"}
    before: list[set[int]] = [set() for _ in spans]
    for i, j in timeline.arrows:
        before[j].add(i)
    needed: dict[int, set[int]] = {}  # by task, the spans before it, some of which make its views
    for task in graph.tasks:
        found = needed[task.index] = set[int]()
        for dependency in task.dependencies:
            number = numbers.get(graph.tasks[dependency.task].name)
            found.update(needed[dependency.task] if number is None else [number])
        if task.name in numbers:
            before[numbers[task.name]] |= found
    steps = []
    for span, others in zip(spans, before, strict=True):
        device = machine.device(span.streams[0].device)
        is_joinable = span.kind == "run" and span.name in joinable
        wait = _wait_seconds(device.name)
        steps.append(
            Step(span.streams, span.seconds, others, is_joinable, wait, device.launch_seconds)
        )
    return steps


_Segment = tuple[Stream, int]


def _segments(program: Program) -> dict[str, _Segment]:
    """Return by task its stream, and the number of the stream's waits and records before it."""
    number: dict[Stream, int] = dict.fromkeys(program.streams, 0)
    found: dict[str, _Segment] = {}
    for instruction in program.instructions:
        if isinstance(instruction, (Wait, Record)):
            number[instruction.stream] += 1
        elif isinstance(instruction, Run):
            found[instruction.task] = instruction.stream, number[instruction.stream]
    return found


def repeatable(
    graph: Graph,
    program: Program,
    can_fuse: Callable[[Task], bool],
    seconds: Callable[[Task, str], float],
) -> frozenset[str]:
    """Return the tasks that each region that needs their results is to run itself.

    These are all tasks between two waits, if another stream of the device needs their results, and
    running them again takes less time than a wait. ``seconds`` are those of a task on a device.
    """
    segment_of = _segments(program)
    segments: dict[_Segment, list[Task]] = {}
    for task in graph.tasks:
        if not task.view:
            segments.setdefault(segment_of[task.name], []).append(task)
    found: set[int] = set()
    for (stream, _), tasks in segments.items():
        readers = _readers(graph, tasks)
        groups = {segment_of[task.name] for task in readers}
        if {other.device for other, _ in groups} != {stream.device} or len(groups) == 1:
            continue
        again = (len(groups) - 1) * sum(seconds(task, stream.device) for task in tasks)
        if again > _wait_seconds(stream.device):
            continue
        involved = [*tasks, *readers]
        alike = all(map(can_fuse, involved)) and len({task.device for task in involved}) == 1
        if alike and all(is_repeatable(graph, task, found) for task in tasks):
            found.update(task.index for task in tasks)
    return frozenset(graph.tasks[i].name for i in found)


def _wait_seconds(device: str) -> float:
    return _WAIT.get(device.partition(":")[0], _WAIT_OTHERWISE)


def _readers(graph: Graph, tasks: Sequence[Task]) -> list[Task]:
    """Return the other tasks that read results of these, or views of them."""
    own = {task.index for task in tasks}
    found: dict[int, Task] = {}
    pending = [*own]
    while pending:
        for user in graph.users[pending.pop()]:
            if graph.tasks[user].view:
                pending.append(user)
            elif user not in own:
                found[user] = graph.tasks[user]
    return list(found.values())


def is_repeatable(graph: Graph, task: Task, repeated: Container[int] = ()) -> bool:
    """Whether a task, run again for each task that needs its results, makes the same ones.

    Nothing writes later what it reads, or writes what it makes, no task is ordered by it, and it
    makes no output. What it reads is not made by tasks that are ``repeated`` themselves: work would
    grow with the length of a chain of them.
    """
    returned = {graph.values[value].root for value in graph.outputs.values()}
    made = [use.value for use in task.outputs]
    sources = (graph.values[graph.values[use.value].root].producer for use in task.reads)
    after = (d for user in graph.users[task.index] for d in graph.tasks[user].dependencies)
    return not (
        any(use.version != graph.last_version(use.value) for use in task.reads)
        or any(graph.last_version(member) for value in made for member in graph.members(value))
        or any(value in returned for value in made)
        or any(source in repeated for source in sources)
        or any(d.kind != "data" for d in task.dependencies)
        or any(d.kind != "data" for d in after if d.task == task.index)
        or graph.bonds(task)
    )


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
