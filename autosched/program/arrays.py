"""Represent a program as arrays of integers for kernels.

The arrays have one entry per instruction. They are computed from the instructions alone and cached
with the program. This module knows no graph and no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Wait,
)

# CARRIED is a wait for an earlier run, HALF a send or a receive of the part of a rank.
RUN, COPY, RECORD, WAIT, FREE, CARRIED, HALF = range(7)
_KIND: Mapping[type[Instruction], int] = {
    Run: RUN,
    Copy: COPY,
    Record: RECORD,
    Wait: WAIT,
    Free: FREE,
    Send: HALF,
    Receive: HALF,
}

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Columns:
    r"""The kind and the stream of each instruction, as numbers: positions in ``program.streams``.

    >>> lines = ["cuda:0/compute run h", "cuda:0/compute record e7"]
    >>> lines += ["cpu/compute wait e7", "cpu/compute run y"]
    >>> Program.parse("\n".join(lines)).columns.event.tolist()
    [-1, 0, 0, -1]
    """

    kind: Ints
    stream: Ints
    also: Ints  # second stream of a copy; -1 if there is none
    # Number of the record, also for its waits (of any run); -1 for other instructions and unknown
    # events.
    event: Ints
    ago: Ints  # how many runs ago the event of a wait is
    apart: Ints  # 1 for a copy between ranks
    records: int


def columns_of(program: Program) -> Columns:
    """Return the arrays of a program; ``Program.columns`` caches them."""
    instructions = program.instructions
    number = {stream: i for i, stream in enumerate(program.streams)}
    kind = _numbers(map(type, instructions), _KIND.__getitem__, len(instructions))
    carried = [(k, i.ago) for k, i in enumerate(instructions) if type(i) is Wait and i.ago]
    copies = [i for i in instructions if type(i) is Copy]
    events = [i.event for i in instructions if type(i) is Record]
    first: dict[int, int] = {}
    for k, name in enumerate(events):
        first.setdefault(name, k)
    also = np.full(len(kind), -1)
    event = np.full(len(kind), -1)
    also[kind == COPY] = [-1 if i.also is None else number[i.also] for i in copies]
    event[kind == RECORD] = _numbers(events, first.__getitem__, len(events))
    waits = [first.get(i.event, -1) for i in instructions if type(i) is Wait]
    event[kind == WAIT] = np.array(waits, np.int64)
    ago = np.zeros_like(kind)
    for k, runs in carried:
        kind[k] = CARRIED
        ago[k] = runs
    apart = np.zeros_like(kind)
    if rank := dict(program.ranks):
        apart[kind == COPY] = [rank.get(i.source) != rank.get(i.destination) for i in copies]
    return Columns(
        kind=kind,
        stream=_numbers([i.stream for i in instructions], number.__getitem__, len(instructions)),
        also=also,
        event=event,
        ago=ago,
        apart=apart,
        records=len(events),
    )


def _numbers(items: Iterable[Any], number: Callable[[Any], int], count: int) -> Ints:
    return np.fromiter(map(number, items), np.int64, count)
