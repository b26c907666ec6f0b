"""Predict how many bytes each device holds.

``footprint`` walks a program in issue order, and ``memory_over_time`` uses the times of a timeline.
Issue order is the order in which torch's caching allocator hands out and takes back memory: on the
host, when instructions are issued, not when devices execute them. This module reads a program and
the bytes of values, and decides nothing. It does not know the temporary memory of a running task
(which includes results that nothing uses), or the rounding and caching of the allocator.
"""

from __future__ import annotations

from autosched._lib.allowed import is_storage
from autosched._lib.gc_pause import without_collecting
from autosched.costs.costs import Costs
from autosched.graph.graph import Graph
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Free, Program, Record, Run, Stream, Wait
from autosched.program.residency import Buffer, Buffers
from autosched.timeline.timeline import Timeline

__all__ = ["footprint", "memory_over_time"]

History = tuple[tuple[float, float], ...]


@without_collecting()
def footprint(
    program: Program, graph: Graph, machine: Machine, costs: Costs
) -> dict[str, tuple[float, ...]]:
    """Return the bytes that each device holds: before the first instruction, and after each.

    Storage devices hold nothing. Inputs and constants are held on their own devices, as if no two
    shared memory. Results of runs
    and copies are held until they are freed. Views and in-place writes take no memory. A value of
    unknown size counts ``default_nbytes``.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=graph.input("x") + 1)
    >>> costs = asc.Costs(default_nbytes=8)
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> footprint(schedule.program, graph, schedule.machine, schedule.costs)
    {'cpu': (8.0, 16.0)}
    """
    buffers = Buffers(graph, {graph.value(name).index: home for name, home in program.inputs})
    held = {device.name: 0.0 for device in machine.devices}
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


def memory_over_time(
    program: Program, graph: Graph, machine: Machine, costs: Costs, timeline: Timeline
) -> dict[str, History]:
    """Return for each device the (seconds, bytes) at which its memory use changes.

    Times come from a predicted or measured timeline. Results of runs and copies are held from their
    start until their stream reaches the ``free``. If streams take turns, a device never holds more
    than ``footprint`` returns; if one stream allocates and frees all its memory, it holds at most
    that much, too. Streams that run concurrently do not keep the order of issue, so then it may be
    more or less.

    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> graph.output(y=(graph.input("x") + 1) * 2)
    >>> costs = asc.Costs(default_nbytes=8, seconds={"add": 1.0, "mul": 1.0})
    >>> schedule = asc.schedule(graph, asc.Machine.emulated(gpus=0), costs=costs)
    >>> memory_over_time(schedule.program, graph, schedule.machine, costs, schedule.simulate())
    {'cpu': ((0.0, 8.0), (0.0, 16.0), (1.0, 24.0), (2.0, 16.0))}
    """
    histories = footprint(program, graph, machine, costs)
    times = _times(program, timeline)
    order = sorted(range(len(program)), key=lambda i: (times[i], i))
    return {name: _over_time(history, times, order) for name, history in histories.items()}


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
            case Wait(_, event):
                clock[stream] = max(clock[stream], events[event])
            case Run() | Copy() if span := spans.get(i):
                times[i] = span.start
                clock |= dict.fromkeys(span.streams, span.end)
    return times


def _over_time(history: tuple[float, ...], times: list[float], order: list[int]) -> History:
    held = history[0]
    points = [(0.0, held)]
    for i in order:
        if history[i + 1] != history[i]:
            held += history[i + 1] - history[i]
            points.append((times[i], held))
    return tuple(points)
