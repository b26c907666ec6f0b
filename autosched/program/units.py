"""Find the parts of a program that can be issued as a whole, such as a CUDA graph.

Two instructions on one physical device share a unit if they have the same predecessors and the same
successors among the instructions that are not on their device. So beginning a unit as a whole and
ending it as a whole delays no other instruction: no copy and no host task waits for more of a unit
than it needs. Where copies are many, units are small.

Units never wait for each other in a cycle. (Suppose that a unit A had to wait for an instruction B
of another device, which has to wait for A. Then B would be a successor of some instructions of A
and a predecessor of others, so these would not be in one unit.)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autosched.program.program import Copy, Instruction, Program, Record, Stream, Wait, occupied

__all__ = ["Before", "predecessors", "units", "where_is"]

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
