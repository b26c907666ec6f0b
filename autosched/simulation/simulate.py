"""Predict when each instruction of a program runs.

One pass per run in issue order suffices, since streams are in order. A task starts when its stream
is free and its waits are satisfied; a copy starts when all streams that it occupies are free.
Neither starts before a thread has issued it: see ``issuing``. Runs are submitted immediately; run r
begins when run r - ``in_flight`` has ended. This module reads costs and the machine, and decides
nothing.

Tasks on several streams of a device disturb each other by ``durations``, which ``sharing`` has made
longer: that needs more than a pass, so policies plan, and bounds are derived, with durations alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel, mode
from autosched.costs.costs import Costs
from autosched.errors import ProgramError, ScheduleError
from autosched.problem import Problem
from autosched.program.arrays import CARRIED, COPY, RECORD, RUN, WAIT
from autosched.program.program import Copy, Instruction, Program, Run, Wait, occupied
from autosched.simulation.issuing import Issuing, issuing
from autosched.simulation.sharing import shared
from autosched.timeline.timeline import Span, Timeline, what


def simulate(program: Program, problem: Problem, runs: int = 1) -> Timeline:
    """Return the predicted timeline of a number of runs.

    Raises ScheduleError for a task or a copy that is impossible on the machine.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs.table({"add": 2.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> asc.simulate(schedule.program, schedule.problem).makespan
    2.0
    """
    spans: list[Span] = []
    graph = problem.graph
    costs = problem.costs
    seconds = durations(program, problem)
    starts, ends = times(program, seconds, issuing(program, problem), runs)
    for run in range(runs):
        start, end = starts[run].tolist(), ends[run].tolist()
        for i, instruction in enumerate(program.instructions):
            if isinstance(instruction, (Run, Copy)):
                nbytes = 0.0
                if isinstance(instruction, Copy):
                    nbytes = costs.value_nbytes(graph.value(instruction.value))
                names = what(instruction)
                streams = occupied(instruction)
                spans.append(Span(*names, streams, start[i], end[i], i, nbytes, run))
    made = Timeline.of(spans, program.arrows, program.carried_arrows)
    arrows = *made.arrows, *_gates(made.spans, program.in_flight)
    learn = functools.partial(_known, costs)
    return replace(made, arrows=arrows, learn=learn, hosts=problem.machine.hosts)


def _gates(spans: Sequence[Span], in_flight: int) -> Iterator[tuple[int, int]]:
    """Yield arrows from the end of a run to what begins then, and not before, ``in_flight`` later."""
    last: dict[int, int] = {}  # by run, the span that ends last
    for i, span in enumerate(spans):
        if span.run not in last or span.end > spans[last[span.run]].end:
            last[span.run] = i
    for i, span in enumerate(spans):
        before = last.get(span.run - in_flight)
        if before is not None and span.start == spans[before].end:
            yield before, i


def makespan(program: Program, seconds: Sequence[float], issued: Issuing | None = None) -> float:
    """Return when the last instruction ends, given the seconds of each, and of issuing it."""
    return float(times(program, seconds, issued)[1].max(initial=0.0))


def times(
    program: Program,
    seconds: Sequence[float],
    issued: Issuing | None = None,
    runs: int = 1,
    how: Mode | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each instruction of each run starts and ends, by [run, instruction].

    Both are 0 but for runs and copies. Raises ScheduleError for an end that is infinite, and
    ProgramError for an event that is not recorded.
    """
    p = program.columns
    count = len(program)
    streams = len(program.streams)
    how = how or mode(1.5 * runs * count, advance)
    issued = issued or Issuing.free(program)
    begin = how.floats(issued.begin)
    tables = how.of(_Lines(p.kind, p.stream, p.also, p.event, p.ago))
    threads = how.floats(issued.seconds), how.whole(issued.thread), how.whole(issued.blocks)
    clocks = _Clocks(
        how.numbers(streams), how.numbers(runs * p.records, -1.0), how.numbers(streams + 1),
        how.numbers(runs * p.records, -1.0), how.numbers(runs + program.in_flight),
    )  # fmt: skip
    starts, ends = how.numbers(runs * count), how.numbers(runs * count)
    stopped = how(advance)(
        tables, how.floats(seconds), *threads, begin, program.in_flight, clocks, starts, ends
    )
    if stopped >= 0:
        raise _refusal(program.instructions[stopped])
    return tuple(np.array(found, float).reshape(runs, count) for found in (starts, ends))  # type: ignore[return-value]


class _Lines(NamedTuple):
    """The instructions of a program: see ``Columns``."""

    kind: Any
    stream: Any
    also: Any
    event: Any
    ago: Any


class _Clocks(NamedTuple):
    """The times until which streams and threads are busy, and the events and runs so far."""

    free: Any  # [stream]
    events: Any  # [event of a run], when its stream reaches the record, -1 until then
    threads: Any  # [thread]
    issued: Any  # [event of a run], when its record has been issued
    last: Any  # [run], when it ends; the first ``in_flight`` are those before all runs


@kernel
def advance(
    p: _Lines,
    seconds: Any,
    issue: Any,
    thread: Any,
    blocks: Any,
    call: Any,
    in_flight: int,
    c: _Clocks,
    starts: Any,
    ends: Any,
) -> int:
    """Fill the times of all runs; return the instruction that cannot be executed, or -1.

    ``issue``, ``thread``, ``blocks`` and ``call`` are those of ``Issuing``.
    """
    count = len(p.kind)
    runs = len(c.last) - in_flight
    events = len(c.events) // max(runs, 1)
    for run in range(runs):
        begin = c.last[run]
        last = begin
        for own in range(len(c.free)):
            c.free[own] = max(c.free[own], begin)
        for who in range(len(c.threads)):
            c.threads[who] = max(c.threads[who], begin) + call[0]
        for i in range(count):
            own = p.stream[i]
            who = thread[own]
            kind = p.kind[i]
            clock = c.threads[who]
            event = run * events + p.event[i]
            if kind in (WAIT, CARRIED) and p.ago[i] <= run:
                event -= p.ago[i] * events
                if p.event[i] < 0 or c.events[event] < 0:
                    return i
                clock = max(clock, c.issued[event])
                c.free[own] = max(c.free[own], c.events[event])
            clock += issue[i]
            if kind in (RUN, COPY):
                also = p.also[i]
                start = max(c.free[own], clock)
                if also >= 0:
                    start = max(start, c.free[also])
                    c.free[also] = start + seconds[i]
                end = start + seconds[i]
                if end == math.inf:
                    return i
                c.free[own] = end
                starts[run * count + i] = start
                ends[run * count + i] = end
                last = max(last, end)
            elif kind == RECORD:
                c.events[event] = max(c.free[own], clock)
                c.issued[event] = clock
            if blocks[own]:
                clock = max(clock, c.free[own])
            c.threads[who] = clock
        c.last[run + in_flight] = last
    return -1


def _refusal(instruction: Instruction) -> Exception:
    """Return the error for an instruction that cannot be executed."""
    if isinstance(instruction, Wait):
        what = "not recorded" if instruction.ago else "not recorded before"
        return ProgramError(f"{instruction.stream} waits for e{instruction.event}, which is {what}")
    return ScheduleError(
        f"{instruction} on {instruction.stream} would end later than a float can say"
    )


def durations(program: Program, problem: Problem) -> tuple[float, ...]:
    """Return the modelled seconds of each instruction; records, waits and frees take none.

    Tasks that share a device take longer than alone: see ``sharing``.
    """
    graph = problem.graph
    machine = problem.machine
    costs = problem.costs
    found = [0.0] * len(program.instructions)
    devices = {stream: machine.device(stream.device) for stream in program.streams}
    tasks = {task.name: task for task in graph.tasks}
    for i, instruction in enumerate(program.instructions):
        if type(instruction) is Run:
            task = tasks.get(instruction.task) or graph.task(instruction.task)  # raises GraphError
            found[i] = costs.task_seconds(task, devices[instruction.stream])
        elif type(instruction) is Copy:
            nbytes = costs.value_nbytes(graph.value(instruction.value))
            slow = bool(costs.pageable) and is_pageable(instruction, problem)
            link = machine.link(instruction.source, instruction.destination)
            found[i] = math.inf if link is None else link.seconds(nbytes, slow)
    if math.inf in found:
        never = program.instructions[found.index(math.inf)]
        raise ScheduleError(f"{never.stream} cannot {never}: costs and links make it take for ever")
    return tuple(shared(found, program, problem))


def is_pageable(copy: Copy, problem: Problem) -> bool:
    """Return whether one end of a copy is host memory that is not page-locked.

    That is the memory of an input or constant, or a view of it. Host memory that a run allocates is
    page-locked, as ``to("cpu", non_blocking=True)`` does. So only copies from, or back to, a
    caller's memory are slow.
    """
    graph = problem.graph
    machine = problem.machine
    value = graph.value(copy.value)
    root = graph.values[value.root]
    if root.name not in problem.costs.pageable or {
        machine.device(end).kind for end in (copy.source, copy.destination)
    } == {"cpu"}:
        return False
    where = problem.homes[root.index]
    return machine.device(where).kind == "cpu" and (copy.source == where or copy.overwrite)


def _known(costs: Costs, _: Timeline) -> Costs:
    return costs
