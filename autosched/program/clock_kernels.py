"""Compute vector clocks over flat arrays, for kernels.

The arithmetic is that of ``vector_clocks``, whose docstring explains it. Streams are numbers;
streams with an entry in the clocks come first. This module knows no instruction and no program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autosched._lib.jit import Mode, kernel

__all__ = ["Moments", "advance", "catch_up", "reaches"]


class Moments(NamedTuple):
    """The clocks while a program is walked. Row ``s`` of ``behind`` begins at ``s * places``."""

    places: int
    behind: Any  # [stream, place]
    count: Any  # [stream]
    last: Any  # [stream], the last wait for it if it has no entry, -1 for none
    waiter: Any  # [wait], the waiting stream
    since: Any  # [wait], the position from which it has waited
    before: Any  # [wait], the previous wait for the same stream
    used: Any  # number of waits

    @classmethod
    def of(cls, mode: Mode, streams: int, places: int, waits: int) -> Moments:
        """Return the initial state; ``waits`` bounds the waits if some streams have no entry."""
        waits = waits if places < streams else 0
        return cls(
            places,
            mode.counts(streams * places),
            mode.counts(streams),
            mode.counts(streams, -1),
            mode.counts(waits),
            mode.counts(waits),
            mode.counts(waits),
            mode.counts(1),
        )


@kernel
def reaches(m: Moments, row: Any, base: int, other: int, position: int) -> bool:
    """Whether a clock (the row at ``base``) includes a position of a stream."""
    if other < m.places:
        return bool(row[base + other] >= position)
    w = m.last[other]
    while w >= 0:
        if row[base + m.waiter[w]] >= m.since[w]:
            return True
        w = m.before[w]
    return bool(position == 0)


@kernel
def advance(m: Moments, own: int, also: int) -> None:
    """Advance the clocks by a run or copy; one on two streams (else -1) orders both."""
    m.count[own] += 1
    if also >= 0:
        a = own * m.places
        b = also * m.places
        for k in range(m.places):
            m.behind[a + k] = m.behind[b + k] = max(m.behind[a + k], m.behind[b + k])
        m.behind[a + own] = m.behind[b + own] = m.count[own]
        m.behind[a + also] = m.behind[b + also] = m.count[also]


@kernel
def catch_up(m: Moments, own: int, other: int, position: int, row: Any, base: int) -> None:
    """Order the next instruction of a stream after a stamp of another, and after its clock."""
    a = own * m.places
    for k in range(m.places):
        m.behind[a + k] = max(m.behind[a + k], row[base + k])
    if other < m.places:
        m.behind[a + other] = max(m.behind[a + other], position)
    elif not reaches(m, m.behind, a, other, position):
        m.count[own] += 1
        m.behind[a + own] = m.count[own]
        w = m.used[0]
        m.waiter[w], m.since[w], m.before[w], m.last[other] = own, m.count[own], m.last[other], w
        m.used[0] = w + 1
