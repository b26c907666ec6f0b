"""Compute vector clocks over flat arrays, for kernels.

The arithmetic is that of ``vector_clocks``, whose docstring explains it. Streams are numbers;
streams with an entry in the clocks come first. This module knows no instruction and no program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autosched._lib.jit import Mode, kernel

__all__ = ["ClockState", "advance", "includes", "wait_for"]


class ClockState(NamedTuple):
    """The clocks while a program is walked. Row ``s`` of ``clocks`` begins at ``s * width``."""

    width: int  # the number of entries of a clock
    clocks: Any  # [stream, entry]
    count: Any  # [stream]
    last: Any  # [stream], the last wait for it if it has no entry, -1 for none
    waiter: Any  # [wait], the waiting stream
    since: Any  # [wait], the position from which it has waited
    previous: Any  # [wait], the previous wait for the same stream
    used: Any  # number of waits

    @classmethod
    def of(cls, mode: Mode, streams: int, width: int, waits: int) -> ClockState:
        """Return the initial state; ``waits`` bounds the waits if some streams have no entry."""
        waits = waits if width < streams else 0
        return cls(
            width, mode.counts(streams * width), mode.counts(streams), mode.counts(streams, -1),
            mode.counts(waits), mode.counts(waits), mode.counts(waits), mode.counts(1),
        )  # fmt: skip


@kernel
def includes(c: ClockState, clocks: Any, base: int, other: int, position: int) -> bool:
    """Whether a clock (the row at ``base``) includes a position of a stream."""
    if other < c.width:
        return bool(clocks[base + other] >= position)
    w = c.last[other]
    while w >= 0:
        if clocks[base + c.waiter[w]] >= c.since[w]:
            return True
        w = c.previous[w]
    return bool(position == 0)


@kernel
def advance(c: ClockState, own: int, also: int) -> None:
    """Advance the clocks by a run or copy; one on two streams (else -1) orders both."""
    c.count[own] += 1
    if also >= 0:
        a = own * c.width
        b = also * c.width
        for k in range(c.width):
            c.clocks[a + k] = c.clocks[b + k] = max(c.clocks[a + k], c.clocks[b + k])
        c.clocks[a + own] = c.clocks[b + own] = c.count[own]
        c.clocks[a + also] = c.clocks[b + also] = c.count[also]


@kernel
def wait_for(c: ClockState, own: int, other: int, position: int, clocks: Any, base: int) -> None:
    """Order the next instruction of a stream after a stamp of another, and after its clock."""
    a = own * c.width
    for k in range(c.width):
        c.clocks[a + k] = max(c.clocks[a + k], clocks[base + k])
    if other < c.width:
        c.clocks[a + other] = max(c.clocks[a + other], position)
    elif not includes(c, c.clocks, a, other, position):
        c.count[own] += 1
        c.clocks[a + own] = c.count[own]
        w = c.used[0]
        c.waiter[w] = own
        c.since[w] = c.count[own]
        c.previous[w] = c.last[other]
        c.last[other] = w
        c.used[0] = w + 1
