"""Find what is issued as a whole, such as a CUDA graph, and what by a thread of its own.

Two instructions on one physical device share a unit if they have the same predecessors and the same
successors among the instructions that are not on their device. So beginning a unit as a whole and
ending it as a whole delays no other instruction: no copy and no host task waits for more of a unit
than it needs. Where copies are many, units are small.

Units never wait for each other in a cycle. (Suppose that a unit A had to wait for an instruction B
of another device, which has to wait for A. Then B would be a successor of some instructions of A
and a predecessor of others, so these would not be in one unit.)

Each stream that waits for a CPU is issued by a thread of its own, so that it does not delay other
streams. All others are issued by the calling thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from itertools import product

from autosched.program.program import (
    Copy,
    Instruction,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    occupied,
)

Before = dict[int, list[int]]
"""The direct predecessors of each run, copy and free, by position."""


def predecessors(program: Program) -> Before:
    """Return the direct predecessors of each run, copy and free: on its streams, and by events."""
    last: dict[Stream, list[int]] = {}
    recorded: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    for i, instruction in enumerate(program):
        match instruction:
            case Record(stream, event):
                recorded[event] = last.get(stream, [])
            case Wait(_, _, ago) if ago:  # orders nothing within a run
                continue
            case Wait(stream, event):
                last[stream] = [*dict.fromkeys([*last.get(stream, ()), *recorded.get(event, ())])]
            case _:
                streams = occupied(instruction)
                found[i] = sorted({p for stream in streams for p in last.get(stream, ())})
                last.update((stream, [i]) for stream in streams)
    return found


def where_is(instruction: Instruction, device: Mapping[str, str | None]) -> str | None:
    """Return the physical device of an instruction; None for those outside units."""
    if isinstance(instruction, Copy):
        source = device[instruction.source]
        destination = device[instruction.destination]
        return source if source == destination else None
    return device[instruction.stream.device]


def units(program: Program, before: Before, where: Mapping[int, str | None]) -> list[list[int]]:
    """Return the instructions of each unit, and each one that is outside units."""
    after: dict[int, list[int]] = {i: [] for i in reversed(before)}
    for i, found in before.items():
        for p in found:
            after[p].append(i)
    # The instructions of a stream on one device are in a line, in which vector clocks count.
    line = {i: (program.instructions[i].stream, device) for i, device in where.items()}
    number = {key: at for at, key in enumerate(dict.fromkeys(line.values()))}
    own = {i: number[key] for i, key in line.items()}
    clocks = _clocks(before, own, len(number)), _clocks(after, own, len(number))
    parts: dict[Hashable, list[int]] = {}
    for i, device in where.items():
        others = [at for (_, on), at in number.items() if on != device]
        known = [tuple(clock[i][other] for other in others) for clock in clocks]
        parts.setdefault(i if device is None else (device, *known), []).append(i)
    return list(parts.values())


def _clocks(before: Before, own: Mapping[int, int], width: int) -> dict[int, list[int]]:
    """Return the vector clock of each instruction; ``own`` is the line that it is in."""
    clocks: dict[int, list[int]] = {}
    so_far = [0] * width
    for i, found in before.items():
        clock = [*map(max, zip(*(clocks[p] for p in found), strict=True))] if found else [0] * width
        so_far[own[i]] += 1
        clock[own[i]] = so_far[own[i]]
        clocks[i] = clock
    return clocks


def waiting_for_host(program: Program, gpu: Set[Stream]) -> set[Stream]:
    """Return the CPU streams, and all streams that wait, directly or not, for one of them.

    A wait for an earlier run also delays what is issued after it.
    """
    recorder = {i.event: i.stream for i in program if isinstance(i, Record)}
    pairs = [
        (i.stream, recorder[i.event])
        for i in program
        if isinstance(i, Wait) and i.event in recorder
    ]
    for streams in [occupied(i) for i in program if isinstance(i, (Run, Copy))]:
        pairs += product(streams, streams)
    waiting = {stream for stream in program.streams if stream not in gpu}
    while found := {stream for stream, other in pairs if other in waiting} - waiting:
        waiting |= found
    return waiting
