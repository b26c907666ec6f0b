"""Predict when each instruction of a program runs.

One pass per run in issue order suffices, since streams are in order. A task starts when its stream
is free and its waits are satisfied; a copy starts when all streams that it occupies are free.
Neither starts before a thread has issued it: see ``issuing``. Runs are submitted immediately; run r
begins when run r - ``in_flight`` has ended. This module reads costs and the machine, and decides
nothing.

The streams of a device are simulated as if they did not disturb each other. One factor of
contention per device would be wrong for large kernels or for small ones. One factor per pair of
tasks would rule out planning in one pass and lower bounds on the makespan.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autosched._lib.jit import kernel, mode
from autosched.costs.costs import Costs
from autosched.errors import ProgramError, ScheduleError
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.placement import home
from autosched.program.arrays import COPY, RECORD, RUN, WAIT
from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied
from autosched.simulation.issuing import Issuing, Threads, deepest, issuing
from autosched.timeline.timeline import Span, Timeline, what

__all__ = ["durations", "is_pageable", "makespan", "simulate"]


def simulate(
    program: Program, graph: Graph, machine: Machine, costs: Costs, runs: int = 1
) -> Timeline:
    """Return the predicted timeline of a number of runs.

    Raises ScheduleError for a task or a copy that is impossible on the machine.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs.table({"add": 2.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> asc.simulate(schedule.program, graph, schedule.machine, schedule.costs).makespan
    2.0
    """
    spans: list[Span] = []
    parts = program, graph, machine, costs
    for run, i, instruction, start, end in _times(
        program, durations(*parts), issuing(*parts), runs
    ):
        nbytes = 0.0
        if isinstance(instruction, Copy):
            nbytes = costs.value_nbytes(graph.value(instruction.value))
        spans.append(Span(*what(instruction), occupied(instruction), start, end, i, nbytes, run))
    made = Timeline.of(spans, program.arrows, program.carried_arrows)
    arrows = *made.arrows, *_gates(made.spans, program.in_flight)
    learn = functools.partial(_known, costs)
    return replace(made, arrows=arrows, learn=learn, hosts=machine.hosts)


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
    """Return when the last instruction ends, given the seconds of each, and of issuing it.

    Raises ScheduleError as ``simulate`` does.
    """
    how = mode(len(program), last_end)
    if how.fast and program.columns.is_clean:
        known = issued or Issuing.free(program)
        found: float = how(last_end)(np.array(seconds, float), *known, *_numbered(program))
        if found < math.inf:
            return found
    return max((end for *_, end in _times(program, seconds, issued)), default=0.0)


def _numbered(program: Program) -> tuple[Any, ...]:
    known = program.columns
    free = np.zeros(len(program.streams))
    events = np.zeros(known.records)
    clock = np.zeros(len(program.streams) + 1)  # of threads
    issued = np.zeros(known.records)
    return known.kind, known.stream, known.also, known.event, free, events, clock, issued


@kernel
def last_end(
    seconds: Any,
    issue: Any,
    thread: Any,
    blocks: Any,
    begin: Any,
    kind: Any,
    stream: Any,
    also: Any,
    event: Any,
    free: Any,
    events: Any,
    clock: Any,
    issued: Any,
) -> float:
    """Return when the last instruction ends; those from ``free`` on are scratch arrays.

    ``issue``, ``thread``, ``blocks`` and ``begin`` are those of ``Issuing``; ``free`` and ``clock``
    are the times until which streams and threads are busy.
    """
    last = 0.0
    for own in range(len(clock)):
        clock[own] = begin[0]
    for i in range(len(kind)):
        own = stream[i]
        second = also[i]
        who = thread[own]
        if kind[i] == WAIT:
            clock[who] = max(clock[who], issued[event[i]])
        clock[who] += issue[i]
        if kind[i] in (RUN, COPY):
            end = free[own] if second < 0 else max(free[own], free[second])
            end = max(end, clock[who]) + seconds[i]
            free[own] = end
            if second >= 0:
                free[second] = end
            last = max(last, end)
        elif kind[i] == RECORD:
            events[event[i]] = max(free[own], clock[who])
            issued[event[i]] = clock[who]
        elif kind[i] == WAIT:
            free[own] = max(free[own], events[event[i]])
        if blocks[own]:
            clock[who] = max(clock[who], free[own])
    return last


def _times(
    program: Program, seconds: Sequence[float], issued: Issuing | None, runs: int = 1
) -> Iterator[tuple[int, int, Run | Copy, float, float]]:
    """Yield (run, position, run or copy, start, end)."""
    free: dict[Stream, float] = dict.fromkeys(program.streams, 0.0)
    events: deque[dict[int, float]] = deque(maxlen=deepest(program) + 1)  # by runs ago
    ends: deque[float] = deque([0.0] * program.in_flight, maxlen=program.in_flight)
    threads = None if issued is None else Threads(program, issued)
    for run in range(runs):
        begin = ends[0]
        last = begin
        free = {stream: max(time, begin) for stream, time in free.items()}
        events.appendleft({})
        if threads is not None:
            threads.begin(begin)
        for i, instruction in enumerate(program.instructions):
            stream = instruction.stream
            ready = 0.0 if threads is None else threads.issue(i, instruction)
            if isinstance(instruction, (Run, Copy)):
                streams = occupied(instruction)
                start = max(ready, *(free[stream] for stream in streams))
                end = start + seconds[i]
                if end == math.inf:
                    raise ScheduleError(
                        f"{instruction} on {stream} would end later than a float can say"
                    )
                free |= dict.fromkeys(streams, end)
                last = max(last, end)
                yield run, i, instruction, start, end
            elif isinstance(instruction, Record):
                events[0][instruction.event] = max(free[stream], ready)
            elif isinstance(instruction, Wait):
                free[stream] = max(free[stream], _awaited(instruction, events))
            if threads is not None:
                threads.finish(stream, free[stream])
        ends.append(last)


def _awaited(wait: Wait, events: Sequence[Mapping[int, float]]) -> float:
    """Return when an event was recorded, given those of each run, this one first."""
    if wait.ago >= len(events):  # there was no such run
        return 0.0
    if wait.event not in events[wait.ago]:
        what = "not recorded" if wait.ago else "not recorded before"
        raise ProgramError(f"{wait.stream} waits for e{wait.event}, which is {what}")
    return events[wait.ago][wait.event]


def durations(program: Program, graph: Graph, machine: Machine, costs: Costs) -> tuple[float, ...]:
    """Return the modelled seconds of each instruction; records, waits and frees take none."""
    found = [0.0] * len(program.instructions)
    for i, instruction in enumerate(program.instructions):
        if type(instruction) is Run:
            found[i] = costs.task_seconds(
                graph.task(instruction.task), machine.device(instruction.stream.device)
            )
        elif type(instruction) is Copy:
            nbytes = costs.value_nbytes(graph.value(instruction.value))
            slow = bool(costs.pageable) and is_pageable(instruction, graph, machine, costs)
            found[i] = machine.copy_seconds(
                instruction.source, instruction.destination, nbytes, slow
            )
    if math.inf in found:
        never = program.instructions[found.index(math.inf)]
        raise ScheduleError(f"{never.stream} cannot {never}: costs and links make it take for ever")
    return tuple(found)


def is_pageable(copy: Copy, graph: Graph, machine: Machine, costs: Costs) -> bool:
    """Return whether one end of a copy is host memory that is not page-locked.

    That is the memory of an input or constant, or a view of it. Host memory that a run allocates is
    page-locked, as ``to("cpu", non_blocking=True)`` does. So only copies from, or back to, a
    caller's memory are slow.
    """
    value = graph.value(copy.value)
    root = graph.values[value.root]
    if root.name not in costs.pageable or {
        machine.device(end).kind for end in (copy.source, copy.destination)
    } == {"cpu"}:
        return False
    where = home(graph, machine, root)
    return machine.device(where).kind == "cpu" and (copy.source == where or copy.overwrite)


def _known(costs: Costs, _: Timeline) -> Costs:
    return costs
