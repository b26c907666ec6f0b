"""Insert records and waits: every hazard between two streams gets one, unless it is implied by those before.

Vector clocks tell what is implied; asking for the latest producer first leaves out the most. On a plan from
``streams`` this reaches the fewest waits there can be (Nimble's theorem; Kwon et al., NeurIPS 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.clocks import Clocks, Stamp
from autosched.program import Copy, Instruction, Record, Run, Wait, occupied

__all__ = ["insert_events"]


def insert_events(instructions: Sequence[Run | Copy], after: Sequence[Sequence[int]]) -> list[Instruction]:
    """Return the instructions with records and waits, so that each comes behind the positions in ``after``."""
    waits = _needed_waits(instructions, after)
    event: dict[int, int] = {}
    result: list[Instruction] = []
    waited = {producer for producers in waits for producer in producers}
    for i, instruction in enumerate(instructions):
        result += [Wait(instruction.stream, event[producer]) for producer in waits[i]]
        result.append(instruction)
        if i in waited:
            event[i] = len(event)
            result.append(Record(instruction.stream, event[i]))
    return result


def _needed_waits(instructions: Sequence[Run | Copy], after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each instruction the positions it must wait for, those left out that are implied."""
    streams = dict.fromkeys(stream for instruction in instructions for stream in occupied(instruction))
    clocks = Clocks(streams)
    stamps: list[Stamp] = []
    snapshots: list[list[int]] = []
    waits: list[list[int]] = []
    for i, instruction in enumerate(instructions):
        waits.append([])
        for producer in reversed(after[i]):
            if not clocks.seen(stamps[producer], instruction):
                clocks.catch_up(instruction.stream, snapshots[producer])
                waits[i].append(producer)
        stamps.append(clocks.advance(instruction))
        snapshots.append(clocks.snapshot(instruction.stream))
    return waits
