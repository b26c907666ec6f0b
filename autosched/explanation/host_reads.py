"""Suggest remedies for host reads that delay accelerators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autosched._lib.text import device_list, duration, file_name, name_list, percent
from autosched.errors import ScheduleError
from autosched.explanation.advice import LEAST, Remedy, fewest
from autosched.explanation.case import Case
from autosched.graph.graph import Task
from autosched.placement import Placement, choices
from autosched.program.program import Copy, Run

__all__ = ["avoid_host_reads", "host_read_note"]

# Called by .item(), float() and similar functions.
_READS = ("_local_scalar_dense", "item", "tolist", "numpy", "cpu")


def avoid_host_reads(case: Case, idle_by_span: Mapping[int, float]) -> Iterator[Remedy]:
    """Suggest removing host tasks that read results of accelerators and delay accelerators.

    ``idle_by_span`` is how long accelerators waited for each span. Tasks that a policy put on the
    host are not included.
    """
    waited = _waited_for_readers(case, idle_by_span)
    needed, last = _delaying_readers(case, waited)
    if needed:
        tasks, makespan = fewest(needed, case.makespan, lambda some: _makespan_without(case, some))
        what, how = _alternative(tasks)
        yield _remedy(case, tasks, waited, f"{what} ({how})", makespan)
    if sum(waited[task.name] for task in last) > LEAST * case.makespan:
        tasks, makespan = fewest(
            last, case.makespan, lambda some: _makespan_if_last(case, some), case.tries
        )
        yield _remedy(case, tasks, waited, "read it after all else", makespan)


def host_read_note(case: Case, idle_by_span: Mapping[int, float]) -> tuple[str, ...]:
    """List host tasks that accelerators wait for, if the predicted cost is small.

    The real cost may be larger.
    """
    waited = _waited_for_readers(case, idle_by_span)
    needed, _ = _delaying_readers(case, waited)
    saved = case.makespan - _makespan_without(case, needed) if needed else 0.0
    if not 0 < saved <= LEAST * case.makespan:
        return ()
    what, _ = _alternative(needed)
    cure = f"to {what} would save {percent(saved / case.makespan)}, as predicted"
    return (_remedy(case, needed, waited, cure, case.makespan).words,)


def _alternative(tasks: Sequence[Task]) -> tuple[str, str]:
    """Return what to do instead of host tasks, and how.

    For example, a number that torch reads can stay a tensor.
    """
    functions = [str(getattr(task.fn, "__name__", "")).partition(".")[0] for task in tasks]
    if all(name in _READS for name in functions):
        return "keep it on the device", "no .item(), float() or .cpu()"
    them = "it" if len(tasks) == 1 else "them"
    how = "leave out what needs the result, or let it take that of an earlier run"
    return f"do without {them}", how


def _remedy(
    case: Case, tasks: Sequence[Task], waited: Mapping[str, float], cure: str, makespan: float
) -> Remedy:
    values = tuple(dict.fromkeys(name for task in tasks for name in _read_results(case, task)))
    names = tuple(task.name for task in tasks)
    one_task = len(names) == 1
    one_device = len(case.used) == 1
    words = (
        f"{name_list(names)} ({file_name(tasks[0].source)}) {'reads' if one_task else 'read'} "
        f"{name_list(values)} on the host, and {device_list(case.used)} "
        f"{'waits' if one_device else 'wait'} {duration(sum(map(waited.__getitem__, names)))} "
        f"for that: {cure}"
    )
    return Remedy("host read", words, names, values, makespan)


# ---- tasks that read on the host


def _delaying_readers(case: Case, waited: Mapping[str, float]) -> tuple[list[Task], list[Task]]:
    """Return the host tasks for which accelerators wait, the longest wait first.

    They are those whose results accelerators need, and others, separately.
    """
    allowed = choices(case.graph, case.machine).devices
    readers = [
        task
        for task in case.graph.tasks
        if waited.get(task.name) and len(allowed[task.index]) == 1 and _read_results(case, task)
    ]
    readers.sort(key=lambda task: -float(f"{waited[task.name]:.3g}"))
    back = _leading_to_accelerators(case)
    needed = [task for task in readers if task.index in back]
    return needed, [task for task in readers if task.index not in back]


def _read_results(case: Case, task: Task) -> list[str]:
    """Return the results of accelerators that a host task reads."""
    if _is_accelerated(case, task):
        return []
    made = ((use, case.graph.maker(use)) for use in case.graph.needs(task))
    return [
        case.graph.values[use.value].name
        for use, maker in made
        if maker is not None and _is_accelerated(case, case.graph.tasks[maker])
    ]


def _is_accelerated(case: Case, task: Task) -> bool:
    return case.machine.device(case.placement.device[task.name]).is_accelerator


def _waited_for_readers(case: Case, idle_by_span: Mapping[int, float]) -> dict[str, float]:
    """Return by task how long accelerators waited for it and its inputs."""
    readers: dict[tuple[str, str], str] = {}
    for task in case.graph.tasks:
        for value in _read_results(case, task):
            readers.setdefault((value, case.placement.device[task.name]), task.name)
    waited: dict[str, float] = {}
    for span, seconds in idle_by_span.items():
        instruction = case.program.instructions[case.predicted.spans[span].instruction]
        name = None
        if isinstance(instruction, Run):
            name = instruction.task
        elif isinstance(instruction, Copy):
            name = readers.get((instruction.value, instruction.destination))
        if name is not None:
            waited[name] = waited.get(name, 0.0) + seconds
    return waited


def _leading_to_accelerators(case: Case) -> set[int]:
    """Return the tasks on accelerators, and those with successors there."""
    found: set[int] = set()
    for task in reversed(case.graph.tasks):
        if _is_accelerated(case, task) or not found.isdisjoint(case.graph.users[task.index]):
            found.add(task.index)
    return found


# ---- what-if predictions


def _makespan_without(case: Case, tasks: Sequence[Task]) -> float:
    """Return the makespan if tasks and their copies took no time."""
    names = {task.name for task in tasks}
    host = {case.placement.device[task.name] for task in tasks}
    values = case.graph.values
    read = {values[use.value].name for task in tasks for use in case.graph.needs(task)}
    made = {values[use.value].name for t in tasks for use in (*t.outputs, *t.changes)}
    seconds = list(case.seconds)
    for i, instruction in enumerate(case.program):
        match instruction:
            case Run(_, name) if name in names:
                seconds[i] = 0.0
            case Copy(value=value) if value in read and instruction.destination in host:
                seconds[i] = 0.0
            case Copy(value=value) if value in made and instruction.source in host:
                seconds[i] = 0.0
    return case.timed(seconds)


def _makespan_if_last(case: Case, tasks: Iterable[Task]) -> float:
    """Return the makespan if tasks and their successors ran last; infinity if impossible."""
    late: set[int] = set()
    pending = [task.index for task in tasks]
    while pending:
        index = pending.pop()
        if index not in late:
            late.add(index)
            pending += case.graph.users[index]
    names = {case.graph.tasks[index].name for index in late}
    order = sorted(case.placement.order, key=names.__contains__)  # stable: false comes first
    try:
        return case.placed(Placement(case.placement.device, tuple(order))).makespan
    except ScheduleError:
        return math.inf
