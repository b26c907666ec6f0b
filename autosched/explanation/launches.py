"""Suggest a remedy for tasks that take less time than their launch.

Merging saves no launches, because a merged task calls its operators one by one. So the advice is to
fuse kernels or to replay a CUDA graph, for merged tasks too.
"""

from __future__ import annotations

from collections.abc import Iterator

from autosched._lib.text import count, duration, file_name, name_list
from autosched.explanation.advice import Remedy
from autosched.explanation.case import Case
from autosched.graph.graph import Task
from autosched.machine.machine import Device
from autosched.program.program import Run, Stream, Wait

__all__ = ["fuse_launches"]


def fuse_launches(case: Case) -> Iterator[Remedy]:
    """Suggest fusing tasks that take longer to launch than to run.

    Consecutive tasks that are launched as one would pay for one launch. ``asc.merge`` alone does
    not achieve that: the operators of a merged task are launched one by one, and count here like
    consecutive tasks.
    """
    rows = _launch_bound_rows(case)
    saved = {i: launch for row in rows for i, launch in row.items()}
    for first in map(min, rows):
        saved[first] -= min(saved[first], _device(case, first).launch_seconds)
    if not any(saved.values()):
        return
    makespan = case.timed([seconds - saved.get(i, 0.0) for i, seconds in enumerate(case.seconds)])
    tiny = [i for row in rows for i in row]
    tasks = [_task(case, i) for i in tiny]
    names = tuple(task.name for task in tasks)
    launch = sum(sum(row.values()) for row in rows)
    whole = sum(case.seconds[i] for i in tiny)
    words = (
        f"{count(len(tasks), 'task')} of about {duration(whole / len(tasks))} "
        f"({name_list(names)}, {file_name(tasks[0].source)}) "
        f"{'costs' if len(tasks) == 1 else 'cost'} more to launch ({duration(launch)}) than to run "
        f"({duration(whole - launch)}): merge kernels into one (torch.compile), "
        "or replay all as a CUDA graph, by asc.schedule(..., replay=True)"
    )
    yield Remedy("launch", words, names, (), makespan)


def _launch_bound_rows(case: Case) -> list[dict[int, float]]:
    """Return rows of consecutive tiny tasks on a stream: their launch seconds by instruction."""
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
    """Return the launch time of a task, which is part of its duration."""
    work = case.costs.work.get(task.name)
    given = case.costs.seconds.get(task.name, task.seconds)
    if given is None and task.parts:
        return sum(_launch_seconds(case, part, device) for part in task.parts if not part.view)
    return device.launch_seconds * (work.launches if given is None and work is not None else 1)


def _device(case: Case, instruction: int) -> Device:
    return case.machine.device(case.program.instructions[instruction].stream.device)


def _task(case: Case, instruction: int) -> Task:
    run = case.program.instructions[instruction]
    assert isinstance(run, Run)
    return case.graph.task(run.task)
