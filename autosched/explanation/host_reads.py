"""Suggest remedies for tiny tasks and for reads on the host.

Tasks are tiny if they take less time than their launch. Reads on the host are remedied if
accelerators wait for them. Merging saves no launches, because a merged task calls its operators one
by one. So the advice on tiny tasks is to fuse kernels or to replay a CUDA graph, for merged tasks
too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autosched.errors import ScheduleError
from autosched.explanation.advice import LEAST, Remedy, fewest
from autosched.explanation.case import Case
from autosched.explanation.words import count, joined, names, place, share
from autosched.graph.graph import Task
from autosched.machine.machine import Device
from autosched.placement import Placement, choices
from autosched.program.program import Copy, Run, Stream, Wait
from autosched.viz.paint import duration

__all__ = ["host_note", "host_reads", "launches"]

_READS = (
    "_local_scalar_dense",
    "item",
    "tolist",
    "numpy",
    "cpu",
)  # called by .item(), float() and similar functions


def launches(case: Case) -> Iterator[Remedy]:
    """Suggest fusing tasks that take longer to launch than to run.

    Consecutive tasks that are launched as one would pay for one launch. ``asc.merge`` alone does
    not achieve that: the operators of a merged task are launched one by one, and count here like
    consecutive tasks.
    """
    rows = _rows(case)
    saved = {i: launch for row in rows for i, launch in row.items()}
    for first in map(min, rows):
        saved[first] -= min(saved[first], _device(case, first).launch_seconds)
    if not any(saved.values()):
        return
    makespan = case.timed([seconds - saved.get(i, 0.0) for i, seconds in enumerate(case.seconds)])
    tiny = [i for row in rows for i in row]
    tasks = [_task(case, i).name for i in tiny]
    where = place(_task(case, tiny[0]))
    launch = sum(sum(row.values()) for row in rows)
    whole = sum(case.seconds[i] for i in tiny)
    words = (
        f"{count(len(tasks), 'task')} of about {duration(whole / len(tasks))} ({names(tasks)}, {where}) "
        f"{'costs' if len(tasks) == 1 else 'cost'} more to launch ({duration(launch)}) than to run "
        f"({duration(whole - launch)}): merge kernels into one (torch.compile), or replay all as a CUDA graph, by "
        "asc.schedule(..., replay=True)"
    )
    yield Remedy("launch", words, tuple(tasks), (), makespan)


def _rows(case: Case) -> list[dict[int, float]]:
    """Return runs of consecutive tiny tasks on a stream, and their launch time."""
    rows: list[dict[int, float]] = []
    open_rows: dict[Stream, dict[int, float]] = {}
    for i, instruction in enumerate(case.program):
        if isinstance(instruction, Wait):
            open_rows.pop(instruction.stream, None)
        elif isinstance(instruction, Run) and case.seconds[i]:
            device = _device(case, i)
            launch = min(_launch_seconds(case, _task(case, i), device), case.seconds[i])
            if device.kind == "cpu" or launch <= case.seconds[i] / 2:
                open_rows.pop(instruction.stream, None)
                continue
            if instruction.stream not in open_rows:
                rows.append(open_rows.setdefault(instruction.stream, {}))
            open_rows[instruction.stream][i] = launch
    return [
        row
        for row in rows
        if len(row) > 1 or any(row[i] > _device(case, i).launch_seconds for i in row)
    ]


def _launch_seconds(case: Case, task: Task, device: Device) -> float:
    """Return the launch time of a task: part of its duration, even if only that is known."""
    work = case.costs.work.get(task.name)
    given = case.costs.seconds.get(task.name, task.seconds)
    if given is None and task.parts:
        return sum(_launch_seconds(case, part, device) for part in task.parts if not part.view)
    return device.launch_seconds * (work.launches if given is None and work is not None else 1)


# ---- reading on the host


def host_reads(case: Case, held_up: Mapping[int, float]) -> Iterator[Remedy]:
    """Suggest removing host tasks that read results of accelerators and delay accelerators.

    ``held_up`` is by span. Tasks that a policy put on the host are not included.
    """
    blamed = _blamed(case, held_up)
    middle, last = _readers(case, blamed)
    if middle:
        tasks, makespan = fewest(
            middle, case.makespan, lambda some: case.timed(_at_once(case, some))
        )
        cure = f"{_without(tasks)[0]} ({_without(tasks)[1]})"
        yield _remedy(case, tasks, blamed, cure, makespan)
    if sum(blamed[task.name] for task in last) > LEAST * case.makespan:
        tasks, makespan = fewest(last, case.makespan, lambda some: _later(case, some), case.tries)
        yield _remedy(case, tasks, blamed, "read it after all else", makespan)


def host_note(case: Case, held_up: Mapping[int, float]) -> tuple[str, ...]:
    """List host tasks that accelerators wait for, if the predicted cost is small.

    The real cost may be larger.
    """
    blamed = _blamed(case, held_up)
    middle, _ = _readers(case, blamed)
    saved = case.makespan - case.timed(_at_once(case, middle)) if middle else 0.0
    if not 0 < saved <= LEAST * case.makespan:
        return ()
    cure = f"to {_without(middle)[0]} would save {share(saved / case.makespan)}, as predicted"
    return (_remedy(case, middle, blamed, cure, case.makespan).words,)


def _without(tasks: Sequence[Task]) -> tuple[str, str]:
    """Return how to avoid host tasks: for example, a number that torch reads can stay a tensor."""
    called = [str(getattr(task.fn, "__name__", "")).partition(".")[0] for task in tasks]
    if all(name in _READS for name in called):
        return "keep it on the device", "no .item(), float() or .cpu()"
    them = "it" if len(tasks) == 1 else "them"
    return (
        f"do without {them}",
        "leave out what needs the result, or let it take that of an earlier run",
    )


def _readers(case: Case, blamed: Mapping[str, float]) -> tuple[list[Task], list[Task]]:
    """Return the host tasks to blame, the worst first.

    They are those whose results accelerators need, and others, separately.
    """
    allowed = choices(case.graph, case.machine).devices
    readers = sorted(
        (
            t
            for t in case.graph.tasks
            if blamed.get(t.name) and len(allowed[t.index]) == 1 and _reads(case, t)
        ),
        key=lambda t: -float(f"{blamed[t.name]:.3g}"),
    )
    back = _leading_back(case)
    return [t for t in readers if t.index in back], [t for t in readers if t.index not in back]


def _remedy(
    case: Case, tasks: Sequence[Task], blamed: Mapping[str, float], cure: str, makespan: float
) -> Remedy:
    values = tuple(dict.fromkeys(name for task in tasks for name in _reads(case, task)))
    waited = duration(sum(blamed[task.name] for task in tasks))
    called = [task.name for task in tasks]
    devices = joined(case.used)
    where = f" ({place(tasks[0])})"
    reads = f"{'reads' if len(called) == 1 else 'read'} {names(values)} on the host, and {devices}"
    words = f"{names(called)}{where} {reads} {'waits' if len(case.used) == 1 else 'wait'} {waited} for that: {cure}"
    return Remedy("host read", words, tuple(called), values, makespan)


def _reads(case: Case, task: Task) -> list[str]:
    """Return the results of accelerators that a host task reads."""
    if case.machine.device(case.placement.device[task.name]).kind != "cpu":
        return []
    made = ((use, case.graph.maker(use)) for use in case.graph.needs(task))
    return [
        case.graph.values[use.value].name
        for use, maker in made
        if maker is not None and _accelerated(case, maker)
    ]


def _accelerated(case: Case, task: int) -> bool:
    return case.machine.device(case.placement.device[case.graph.tasks[task].name]).kind != "cpu"


def _blamed(case: Case, held_up: Mapping[int, float]) -> dict[str, float]:
    """Return by task how long accelerators waited for host tasks and for copies of their inputs."""
    blamed: dict[str, float] = {}
    readers: dict[tuple[str, str], str] = {}
    for task in case.graph.tasks:
        for value in _reads(case, task):
            readers.setdefault((value, case.placement.device[task.name]), task.name)
    for span, seconds in held_up.items():
        instruction = case.program.instructions[case.predicted.spans[span].instruction]
        if isinstance(instruction, Run):
            blamed[instruction.task] = blamed.get(instruction.task, 0.0) + seconds
        elif (
            isinstance(instruction, Copy)
            and (instruction.value, instruction.destination) in readers
        ):
            name = readers[instruction.value, instruction.destination]
            blamed[name] = blamed.get(name, 0.0) + seconds
    return blamed


def _behind(case: Case, task: Task) -> set[int]:
    """Return a task and all its transitive successors."""
    found = {task.index}
    open_ends = [task.index]
    while open_ends:
        new = [user for user in case.graph.users[open_ends.pop()] if user not in found]
        found.update(new)
        open_ends += new
    return found


def _leading_back(case: Case) -> set[int]:
    """Return the tasks with successors on accelerators."""
    found: set[int] = set()
    for task in reversed(case.graph.tasks):
        if _accelerated(case, task.index) or not found.isdisjoint(case.graph.users[task.index]):
            found.add(task.index)
    return found


def _at_once(case: Case, tasks: Sequence[Task]) -> list[float]:
    """Return durations in which tasks, and copies of their inputs and outputs, take no time."""
    called = {task.name for task in tasks}
    host = {case.placement.device[task.name] for task in tasks}
    read = {case.graph.values[use.value].name for task in tasks for use in case.graph.needs(task)}
    made = {
        case.graph.values[use.value].name
        for task in tasks
        for use in (*task.outputs, *task.changes)
    }
    seconds = list(case.seconds)
    for i, instruction in enumerate(case.program):
        if isinstance(instruction, Run):
            spared = instruction.task in called
        elif isinstance(instruction, Copy):
            comes = instruction.value in read and instruction.destination in host
            spared = comes or (instruction.value in made and instruction.source in host)
        else:
            continue
        seconds[i] = 0.0 if spared else seconds[i]
    return seconds


def _later(case: Case, tasks: Sequence[Task]) -> float:
    """Return the makespan if tasks and their successors ran last; infinity if impossible."""
    late = {case.graph.tasks[index].name for task in tasks for index in _behind(case, task)}
    first = [name for name in case.placement.order if name not in late]
    order = (*first, *(name for name in case.placement.order if name in late))
    try:
        return case.placed(Placement(case.placement.device, order)).makespan
    except ScheduleError:
        return math.inf


def _device(case: Case, instruction: int) -> Device:
    return case.machine.device(case.program.instructions[instruction].stream.device)


def _task(case: Case, instruction: int) -> Task:
    run = case.program.instructions[instruction]
    assert isinstance(run, Run)
    return case.graph.task(run.task)
