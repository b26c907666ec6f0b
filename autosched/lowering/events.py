"""Insert records and waits: every hazard between two streams gets one, unless it is implied by those before.

Vector clocks tell what is implied; asking for the latest producer first leaves out the most. On a plan from
``streams`` this reaches the fewest waits there can be (Nimble's theorem; Kwon et al., NeurIPS 2020). ``frees`` is told
how far each stream has come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from autosched.clocks import Clocks
from autosched.lowering.frees import Frees, owner_of
from autosched.lowering.hazards import Block
from autosched.program import Copy, Free, Instruction, Record, Run, Stream, Wait, occupied

__all__ = ["insert_events"]


def insert_events(
    instructions: Sequence[Run | Copy | Free],
    after: Sequence[Sequence[int]],
    blocks: Sequence[Block],
    alone: Collection[Stream] = (),
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that each comes behind the positions in ``after``.

    ``blocks`` are to be freed, beside frees that stand there and make room; ``alone`` are streams that need no place in
    clocks.
    """
    streams = chain.from_iterable(map(occupied, instructions))
    owners = (owner_of(block) for block in blocks)  # the host's may have nothing else to do
    clocks = Clocks(chain(streams, owners), alone)
    frees = Frees(clocks, blocks)
    lines = _walk(instructions, after, clocks, frees)
    waited = sorted({item for line in lines for item in line if type(item) is int})
    event = {producer: number for number, producer in enumerate(waited)}
    result: list[Instruction] = []
    for i, line in enumerate(lines):
        stream = instructions[i].stream
        for item in line:
            result.append(Wait(stream, event[item]) if type(item) is int else item)  # type: ignore[arg-type]
        if i in event:
            result.append(Record(stream, event[i]))
    frees.finish(result, event)
    return result


def _walk(
    instructions: Sequence[Run | Copy | Free], after: Sequence[Sequence[int]], clocks: Clocks, frees: Frees
) -> list[list[int | Free | Run | Copy]]:
    """Return each instruction with the positions that it must wait for before it, and frees where they may be."""
    index, behind, places, stamps = clocks.index, clocks.behind, clocks.places, frees.stamps
    lines: list[list[int | Free | Run | Copy]] = []
    for i, instruction in enumerate(instructions):
        own = index[instruction.stream]
        also = index[instruction.also] if type(instruction) is Copy and instruction.also is not None else None
        line: list[int | Free | Run | Copy] = []
        for producer in reversed(after[i]):
            stamp = stamps[producer]
            stream = stamp[0]
            if stream == own or (stream < places and behind[own][stream] >= stamp[1]):
                continue
            if clocks.passed(stamp, own) or (also is not None and clocks.passed(stamp, also)):
                continue
            clocks.catch_up(own, stamp)
            line.append(producer)
            frees.waited(own, stream, line)
        stamps.append(clocks.advance(own, also))
        line.append(instruction)
        if also is not None:
            frees.release(also, line)
        frees.ended(i, line)
        lines.append(line)
    return lines
