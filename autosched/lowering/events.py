"""Insert records and waits: every hazard between two streams gets one, unless it is implied by those before.

Vector clocks tell what is implied; asking for the latest producer first leaves out the most. On a plan from
``streams`` this reaches the fewest waits there can be (Nimble's theorem; Kwon et al., NeurIPS 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

from autosched.clocks import Clocks, Stamp
from autosched.program import Copy, Free, Instruction, Record, Run, Wait, occupied

__all__ = ["insert_events"]


def insert_events(instructions: Sequence[Run | Copy | Free], after: Sequence[Sequence[int]]) -> list[Instruction]:
    """Return the instructions with records and waits, so that each comes behind the positions in ``after``."""
    waits = _needed_waits(instructions, after)
    event: dict[int, int] = {}
    result: list[Instruction] = []
    waited = {producer for producers in waits.values() for producer in producers}
    for i, instruction in enumerate(instructions):
        result += [Wait(instruction.stream, event[producer]) for producer in waits.get(i, ())]
        result.append(instruction)
        if i in waited:
            event[i] = len(event)
            result.append(Record(instruction.stream, event[i]))
    return result


def _needed_waits(instructions: Sequence[Run | Copy | Free], after: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for instructions that must wait the positions they must wait for, those left out that are implied."""
    clocks = Clocks(dict.fromkeys(stream for instruction in instructions for stream in occupied(instruction)))
    stamps: list[Stamp] = []
    waits: dict[int, list[int]] = {}
    for i, instruction in enumerate(instructions):
        for producer in reversed(after[i]):
            if not clocks.seen(stamps[producer], instruction):
                clocks.catch_up(instruction.stream, stamps[producer])
                waits.setdefault(i, []).append(producer)
        stamps.append(clocks.advance(instruction))
    return waits
