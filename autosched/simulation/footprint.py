"""Predict how many bytes each device holds.

``footprint`` walks a program in issue order, and ``memory_over_time`` uses the times of a timeline.
Issue order is the order in which torch's caching allocator hands out and takes back memory: on the
host, when instructions are issued, not when devices execute them. This module reads a program and
the bytes of values, and decides nothing. It does not know the temporary memory of a running task
(which includes results that nothing uses), or the rounding and caching of the allocator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from autosched._lib.allowed import is_storage
from autosched._lib.gc_pause import without_collecting
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.program.residency import Buffer, Buffers
from autosched.timeline.timeline import Timeline

History = tuple[tuple[float, float], ...]


@without_collecting()
def footprint(program: Program, problem: Problem) -> dict[str, tuple[float, ...]]:
    """Return the bytes that each device holds: before the first instruction, and after each.

    Storage devices hold nothing. Inputs and constants are held on their own devices, as if no two
    shared memory. Results of runs and copies are held until they are freed. Views and in-place
    writes take no memory. A value of unknown size counts ``default_nbytes``. In a loop, inputs and
    constants count once, and all other runs in flight count with their peak, so that devices hold
    no more for any interleaving of runs.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs(default_nbytes=8)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> footprint(schedule.program, schedule.problem)
    {'cpu': (8.0, 16.0)}
    """
    histories = _one_run(program, problem)
    if program.in_flight == 1:
        return histories
    others = program.in_flight - 1
    needs = {name: _needs(history, math.inf) for name, history in histories.items()}
    return {
        name: tuple(nbytes + others * needs[name].each for nbytes in history)
        for name, history in histories.items()
    }


class Needs(NamedTuple):
    """The bytes that all runs share, those of each run, and how many runs in flight fit."""

    shared: float
    each: float
    most: float  # a whole number, at least 1, or infinity


def needs_of_runs(program: Program, problem: Problem) -> dict[str, Needs]:
    """Return by device what runs in flight need.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs(default_nbytes=8)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> needs_of_runs(schedule.program, schedule.problem)
    {'cpu': Needs(shared=8.0, each=8.0, most=inf)}
    """
    histories = _one_run(program, problem)
    machine = problem.machine
    return {
        name: _needs(history, machine.device(name).nbytes) for name, history in histories.items()
    }


def _needs(history: tuple[float, ...], limit: float) -> Needs:
    shared = history[0]
    each = max(history) - shared
    most = math.inf if not each or math.isinf(limit) else (limit - shared) // each
    return Needs(shared, each, max(1.0, most))


def _one_run(program: Program, problem: Problem) -> dict[str, tuple[float, ...]]:
    graph = problem.graph
    costs = problem.costs
    buffers = Buffers(graph, {graph.value(name).index: home for name, home in program.inputs})
    held = {device.name: 0.0 for device in problem.machine.devices}
    histories: dict[str, list[float]] = {name: [] for name in held}
    sizes: dict[Buffer, float] = {}  # of the blocks in memory

    def hold(at: int, device: str, nbytes: float) -> None:
        """Add bytes to a device; until instruction ``at`` it held what it holds now."""
        history = histories[device]
        if at >= len(history):
            history += [held[device]] * (at + 1 - len(history))
        held[device] += 0.0 if is_storage(device) else nbytes

    for source in buffers.sources.values():
        sizes[source] = costs.value_nbytes(graph.values[source.value])
        hold(-1, source.device, sizes[source])
    for step in buffers.walk(program.instructions):
        for made in step.made:
            if made is not None and made.base is None and made not in sizes:
                sizes[made] = costs.value_nbytes(graph.values[made.value])
                hold(step.at, made.device, sizes[made])
        if isinstance(step.instruction, Free):
            (freed,) = step.reads
            hold(step.at, freed.device, -sizes.pop(freed.block, 0.0))
    for name in held:
        hold(len(program), name, 0.0)
    return {name: tuple(history) for name, history in histories.items()}


def memory_over_time(program: Program, problem: Problem, timeline: Timeline) -> dict[str, History]:
    """Return for each device the (seconds, bytes) at which its memory use changes.

    Times come from a predicted or measured timeline. Results of runs and copies are held from their
    start until their stream reaches the ``free``. If streams take turns, a device never holds more
    than ``footprint`` returns; if one stream allocates and frees all its memory, it holds at most
    that much, too. Streams that run concurrently do not keep the order of issue, so then it may be
    more or less. Of several runs, each holds its memory, apart from inputs and constants, until it
    ends: then outputs are the caller's.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=(graph.input("x") + 1) * 2)
    >>> costs = asc.Costs(default_nbytes=8, seconds={"add": 1.0, "mul": 1.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> memory_over_time(schedule.program, schedule.problem, schedule.simulate())
    {'cpu': ((0.0, 8.0), (0.0, 16.0), (1.0, 24.0), (2.0, 16.0))}
    """
    histories = _one_run(program, problem)
    runs = 1 + max((span.run for span in timeline.spans), default=0)
    changes = {name: _changes(history) for name, history in histories.items()}
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in histories}
    for run in range(runs):
        spans = tuple(span for span in timeline.spans if span.run == run)
        times = _times(program, replace(timeline, spans=spans, arrows=()))
        end = max((span.end for span in spans), default=0.0)
        for name, history in histories.items():
            base = run * (len(program) + 1)
            found[name] += [(times[i], base + i, change) for i, change in changes[name]]
            if runs > 1:  # of a single one, the outputs remain
                found[name].append((end, base + len(program), history[0] - history[-1]))
    return {name: _over_time(histories[name][0], steps) for name, steps in found.items()}


def _changes(history: tuple[float, ...]) -> list[tuple[int, float]]:
    """Return the instructions that allocate or free, and by how many bytes."""
    pairs = enumerate(pairwise(history))
    return [(i, after - before) for i, (before, after) in pairs if after != before]


def _times(program: Program, timeline: Timeline) -> list[float]:
    """Return when each instruction allocates or frees: when it starts, or its stream reaches it."""
    spans = {span.instruction: span for span in timeline.spans}
    clock: dict[Stream, float] = dict.fromkeys(program.streams, 0.0)
    events: dict[int, float] = {}
    times = []
    for i, instruction in enumerate(program):
        stream = instruction.stream
        times.append(clock[stream])
        match instruction:
            case Record(_, event):
                events[event] = clock[stream]
            case Wait(_, event, 0):
                clock[stream] = max(clock[stream], events[event])
            case Run() | Copy() if span := spans.get(i):
                times[i] = span.start
                clock |= dict.fromkeys(span.streams, span.end)
    return times


def _over_time(held: float, steps: list[tuple[float, int, float]]) -> History:
    """Add up changes: (seconds, rank among those of the same time, bytes)."""
    points = [(0.0, held)]
    for time, _, change in sorted(steps):
        if change:
            held += change
            points.append((time, held))
    return tuple(points)
