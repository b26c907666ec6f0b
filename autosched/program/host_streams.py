"""Find the streams that wait for a CPU.

Each of these is issued by a thread of its own, so that it does not delay other streams. All others
are issued by the calling thread.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import product

from autosched.program.program import Copy, Program, Record, Run, Stream, Wait, occupied

__all__ = ["waiting_for_host"]


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
