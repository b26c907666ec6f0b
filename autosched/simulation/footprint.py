"""Predict how many bytes each device holds.

torch's caching allocator hands out and takes back memory on the host, when instructions are issued,
not when devices execute them. ``footprint`` walks a program in issue order, in which one thread
issues it. Streams that wait for a CPU are issued by threads of their own (see ``program.units``),
and these may be ahead of others: a thread that issues copies allocates their memory as early as the
program lets it. ``peaks`` bounds what a device holds for any progress of the threads.
``memory_over_time`` uses the times of a timeline.

This module reads a program and the bytes of values, and decides nothing. It does not know the
temporary memory of a running task (which includes results that nothing uses), or the rounding and
caching of the allocator.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.allowed import is_storage
from autosched._lib.gc_pause import without_collecting
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.program.residency import Buffer, Buffers
from autosched.program.units import waiting_for_host
from autosched.timeline.timeline import Timeline

History = tuple[tuple[float, float], ...]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CLOCKED = 32  # threads, the busiest; of others, all that they may ever hold counts


@without_collecting()
def footprint(program: Program, problem: Problem) -> dict[str, tuple[float, ...]]:
    """Return the bytes that each device holds in a run: before the first instruction, and after each.

    Storage devices hold nothing. Inputs and constants are held on their own devices, as if no two
    shared memory. Results of runs and copies are held until they are freed. Views and in-place
    writes take no memory. A value of unknown size counts ``default_nbytes``.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs(default_nbytes=8)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> footprint(schedule.program, schedule.problem)
    {'cpu': (8.0, 16.0)}
    """
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


def peaks(program: Program, problem: Problem) -> dict[str, float]:
    """Return a bound on what each device holds at any time, for any progress of its threads.

    Where one thread allocates and frees all memory of a device, it is the maximum of ``footprint``.
    In a loop, all runs in flight count with their peak.

    Let a thread have made its first ``p`` allocations and frees. A vector clock tells how many
    those of each other thread are at least by then, since the thread has waited for them, and at
    most, since later ones wait for what it has not done yet. The sum of the most that each may hold
    in between bounds what is held together; the maximum over ``p`` is a bound for all moments. So
    there is a bound for each thread, and one more: of all that was allocated up to an allocation,
    in issue order, what was freed before that is gone. Programs for limited memory keep to the last
    one by construction. The least of them counts.

        copies    + a     + b     + c             for any progress they hold at most 3 blocks
        compute       + y (reads a)   - y         and compute at most 1, after the copy of a

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs(default_nbytes=8)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> peaks(schedule.program, schedule.problem)
    {'cpu': 16.0}
    """
    needs = needs_of_runs(program, problem)
    return {name: need.shared + program.in_flight * need.each for name, need in needs.items()}


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
    threads = _Threads(program, problem)
    needs = {}
    for name, history in footprint(program, problem).items():
        limit = problem.machine.device(name).nbytes
        each = threads.peak(_changes(history))
        most = math.inf if not each or math.isinf(limit) else (limit - history[0]) // each
        needs[name] = Needs(history[0], each, max(1.0, most))
    return needs


class _Threads:
    """The threads that issue a program, and what each has waited for at each of its instructions."""

    def __init__(self, program: Program, problem: Problem):
        machine = problem.machine
        on_gpu = {s for s in program.streams if machine.device(s.device).is_accelerator}
        alone = waiting_for_host(program, on_gpu)
        key = {s: s if s in alone else machine.device(s.device).rank for s in program.streams}
        busy = Counter(key[instruction.stream] for instruction in program).most_common()
        number = {thread: at for at, (thread, _) in enumerate(busy)}
        self.of = [number[key[instruction.stream]] for instruction in program]
        self.width = min(len(number), _CLOCKED)  # threads from this number on have no clocks
        # By position of a copy: the thread of its second stream, which waits there for the first.
        self.met = {
            at: number.setdefault(key[copy.also], len(number))
            for at, copy in enumerate(program)
            if isinstance(copy, Copy) and copy.also is not None
        }
        self._program = program

    def peak(self, changes: list[tuple[int, float]]) -> float:
        """Return a bound on the sum of changes, by position, for any progress of the threads."""
        own = np.array([self.of[at] for at, _ in changes], np.int64)
        nbytes = np.array([change for _, change in changes])
        threads = dict.fromkeys(own.tolist())
        if len(threads) <= 1:
            return float(np.cumsum([0.0, *nbytes]).max())
        known = self._known({at for at, _ in changes})
        rows = {t: np.flatnonzero(own == t) for t in threads}
        start = np.zeros((1, self.width), np.int64)
        clocks = {t: np.concatenate([start, known[rows[t]]]) for t in threads if t < self.width}
        held = {t: np.cumsum([0.0, *nbytes[rows[t]]]) for t in threads}
        allocated = np.cumsum(np.maximum(nbytes, 0.0))
        for t in clocks:
            allocated += np.cumsum([0.0, *np.minimum(nbytes[rows[t]], 0.0)])[known[:, t]]
        bounds = [allocated[nbytes > 0].max(initial=0.0)]
        for t, clock in clocks.items():
            together = held[t].copy()
            for other in threads:
                if other in clocks and other != t:
                    most = np.searchsorted(clocks[other][:, t], np.arange(len(clock)), "right") - 1
                    together += _most_between(held[other], clock[:, other], most)
                elif other != t:
                    together += held[other].max()
            bounds.append(together.max())
        return float(min(bounds))

    def _known(self, changes: set[int]) -> Ints:
        """Return how many changes of each thread have happened when each change has."""
        count = 1 + max((*self.of, *self.met.values()), default=0)
        clocks = [[0] * self.width for _ in range(count)]
        events: dict[int, list[int]] = {}
        found = []
        for at, instruction in enumerate(self._program):
            thread = self.of[at]
            clock = clocks[thread]
            met = clocks[self.met[at]] if at in self.met else clock
            if met is not clock:
                clock[:] = map(max, clock, met)
            if at in changes:
                if thread < self.width:
                    clock[thread] += 1
                found.append([*clock])
            elif isinstance(instruction, Record):
                events[instruction.event] = [*clock]
            elif isinstance(instruction, Wait) and not instruction.ago:
                clock[:] = map(max, clock, events[instruction.event])
            if met is not clock:
                met[:] = clock
        return np.array(found)


def _most_between(held: Floats, least: Ints, most: Ints) -> Floats:
    """Return the maximum of ``held[least[i]]`` to ``held[most[i]]`` for each i."""
    levels = [held]  # level k has the maxima of 2**k numbers
    while len(levels[-1]) > (width := 2 ** (len(levels) - 1)):
        levels.append(np.maximum(levels[-1][:-width], levels[-1][width:]))
    level = np.log2(most - least + 1).astype(np.int64)
    found = np.empty(len(level))
    for k, table in enumerate(levels):
        rows = np.flatnonzero(level == k)
        found[rows] = np.maximum(table[least[rows]], table[most[rows] + 1 - 2**k])
    return found


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
    histories = footprint(program, problem)
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
