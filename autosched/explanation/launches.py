"""Suggest remedies for tasks that take less time than their launch, and for busy threads.

Merging saves no launches, because a merged task calls its operators one by one. So the advice is to
fuse kernels or to replay a CUDA graph, for merged tasks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autosched._lib.text import count, duration, file_name, name_list
from autosched.costs.costs import Replay
from autosched.explanation.advice import LEAST, Remedy
from autosched.explanation.case import Case
from autosched.explanation.placements import promised
from autosched.graph.graph import Task
from autosched.machine.machine import Device
from autosched.program.program import Run, Stream, Wait
from autosched.simulation.simulate import makespan

__all__ = ["fuse_launches", "host_note", "is_issued_late", "replay_launches"]


def fuse_launches(case: Case) -> Iterator[Remedy]:
    """Suggest fusing tasks that take longer to launch than to run.

    Consecutive tasks that are launched as one would pay for one launch. ``asc.merge`` alone does
    not achieve that: the operators of a merged task are launched one by one, and count here like
    consecutive tasks.
    """
    rows = _launch_bound_rows(case)
    saved = {i: launch for row in rows for i, launch in row.items()}
    heads = set(map(min, rows))
    for first in heads:
        saved[first] -= min(saved[first], _device(case, first).launch_seconds)
    if not any(saved.values()):
        return
    faster = [seconds - saved.get(i, 0.0) for i, seconds in enumerate(case.seconds)]
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
    yield Remedy("launch", words, names, (), case.timed(faster, saved.keys() - heads))


def replay_launches(case: Case) -> Iterator[Remedy]:
    """Suggest replaying CUDA graphs if threads of the host are busy issuing work."""
    if is_issued_late(case) and case.costs.replay is None:
        replayed = case.with_costs(replace(case.costs, replay=Replay()))
        words = f"{_busy(case)}: replay CUDA graphs, by asc.schedule(..., replay=True)"
        yield Remedy("launch", words, (), (), promised(replayed))


def host_note(case: Case) -> tuple[str, ...]:
    """Note that the host bounds the makespan, if it would be shorter with work issued in no time."""
    if not is_issued_late(case):
        return ()
    free = duration(makespan(case.program, case.seconds))
    return (f"the host bounds the run: {_busy(case)}; issued in no time, it would take {free}",)


def is_issued_late(case: Case) -> bool:
    """Return whether issuing work prolongs the run."""
    least = 0.0 if case.issuing is None else makespan(case.program, case.seconds)
    return case.issuing is not None and case.makespan - least > LEAST * case.makespan


def _busy(case: Case) -> str:
    assert case.issuing is not None
    thread = dict(zip(case.program.streams, case.issuing.thread.tolist(), strict=True))
    busy: dict[int, float] = {}
    for instruction, seconds in zip(case.program, case.issuing.seconds.tolist(), strict=True):
        number = thread[instruction.stream]
        busy[number] = busy.get(number, float(case.issuing.begin[0])) + seconds
    return f"one thread is busy for {duration(max(busy.values()))} with issuing work"


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
            if not device.is_accelerator or launch <= case.seconds[i] / 2:
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
    return device.launch_seconds * case.costs.launches(task)


def _device(case: Case, instruction: int) -> Device:
    return case.machine.device(case.program.instructions[instruction].stream.device)


def _task(case: Case, instruction: int) -> Task:
    run = case.program.instructions[instruction]
    assert isinstance(run, Run)
    return case.graph.task(run.task)
