"""Divide a program that spans several ranks into the parts of the ranks.

A copy between ranks becomes a send and a receive. This module knows no graph and no machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from autosched.errors import ProgramError
from autosched.program.program import (
    Copy,
    Instruction,
    Program,
    Receive,
    Send,
    excerpt,
)


def crosses(instruction: Instruction, rank: Mapping[str, int]) -> bool:
    """Whether an instruction is a copy between ranks."""
    if type(instruction) is not Copy or not rank:
        return False
    return rank.get(instruction.source) != rank.get(instruction.destination)


def halves(copy: Copy) -> tuple[Send, Receive]:
    """Return the send and the receive of a copy between ranks, which names a stream of each."""
    assert copy.also is not None, copy
    sent = Send(copy.stream, copy.value, copy.version, copy.destination)
    return sent, Receive(copy.also, copy.value, copy.version, copy.source, copy.overwrite)


def whole_of(sent: Send, received: Receive) -> Copy:
    """Return the copy of a send and its receive.

    >>> from autosched.program.program import Stream
    >>> copy = Copy(Stream("cpu:0", "o"), "x", 0, "cpu:0", "cpu:1", Stream("cpu:1", "i"))
    >>> whole_of(*halves(copy)) == copy
    True
    """
    return Copy(
        sent.stream,
        sent.value,
        sent.version,
        sent.stream.device,
        received.stream.device,
        received.stream,
        received.overwrite,
    )


def parts_of(program: Program) -> dict[int, Program]:
    """Return the part of each rank; ``Program.part`` caches them.

    Raises ProgramError for an instruction that stands on streams of the wrong ranks.
    """
    rank = dict(program.ranks)
    found: dict[int, list[Instruction]] = {number: [] for _, number in program.ranks}
    for at, instruction in enumerate(program.instructions if found else ()):
        try:
            for half in halves_of(instruction, rank):
                found[rank[half.stream.device]].append(half)
        except KeyError as error:
            what = f"device {error} is of no rank"
            raise ProgramError(excerpt(program, at, "rank", what, None)) from None
        except ValueError as error:
            raise ProgramError(excerpt(program, at, "rank", str(error), None)) from None
    own: dict[int, Program] = {}
    for number, instructions in found.items():
        own[number] = replace(
            program,
            instructions=tuple(instructions),
            inputs=_of_rank(program.inputs, rank, number),
            outputs=_of_rank(program.outputs, rank, number),
            ranks=tuple(item for item in program.ranks if item[1] == number),
        )
    return own


def halves_of(instruction: Instruction, rank: Mapping[str, int]) -> Iterable[Instruction]:
    """Return an instruction, or the halves of a copy between ranks.

    Raises ValueError if it does not name a stream of each end.
    """
    if not crosses(instruction, rank):
        return (instruction,)
    assert isinstance(instruction, Copy)
    ends = instruction.stream.device, instruction.also and instruction.also.device
    if ends != (instruction.source, instruction.destination):
        raise ValueError("a copy between ranks is on a stream of its source and of its destination")
    return halves(instruction)


def _of_rank(
    places: Iterable[tuple[str, str]], rank: Mapping[str, int], number: int
) -> tuple[tuple[str, str], ...]:
    return tuple((name, device) for name, device in places if rank.get(device) == number)
