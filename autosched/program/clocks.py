"""Compute vector clocks over the streams of a program, and what happens before what.

Source: Fidge; Mattern, 1988. ``clocks[s, t] = k`` means that the next instruction of stream ``s``
happens after the first ``k`` runs and copies of stream ``t``. A stream always happens after its own
earlier instructions; that is not stored. Streams are numbers here. The functions are kernels over
flat arrays, also called by lowering, which decides what must be ordered. ``ordered`` walks a whole
program, for all who ask which of its instructions are.

Streams of which nobody asks what happens after them have no entry in the clocks. They come last.
Without contention each copy has a stream of its own, so that planning takes quadratic time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel, mode
from autosched.program.arrays import CARRIED, COPY, RECORD, RUN, WAIT
from autosched.program.program import Program, Stream

Ints = NDArray[np.int64]
Stamp = tuple[int, int, list[int]]
"""A stream, a position on it, and the clock there."""


class Clocks(NamedTuple):
    """The clocks while a program is walked. Row ``s`` of ``clocks`` begins at ``s * width``."""

    width: int  # streams from this number on have no entry
    clocks: Any  # [stream, entry]
    count: Any  # [stream], its runs and its copies so far

    @classmethod
    def of(cls, how: Mode, streams: int, width: int) -> Clocks:
        """Return the initial state."""
        return cls(width, how.counts(streams * width), how.counts(streams))


@kernel
def advance(c: Clocks, own: int, also: int) -> None:
    """Advance the clocks by a run or copy; one on two streams (else -1) orders both."""
    c.count[own] += 1
    if also >= 0:
        a = own * c.width
        b = also * c.width
        for k in range(c.width):
            c.clocks[a + k] = c.clocks[b + k] = max(c.clocks[a + k], c.clocks[b + k])
        if own < c.width:
            c.clocks[a + own] = c.clocks[b + own] = c.count[own]
        if also < c.width:
            c.clocks[a + also] = c.clocks[b + also] = c.count[also]


@kernel
def wait_for(c: Clocks, own: int, other: int, position: int, clocks: Any, base: int) -> None:
    """Order the next instruction of a stream after a stamp of another, and after its clock."""
    a = own * c.width
    for k in range(c.width):
        c.clocks[a + k] = max(c.clocks[a + k], clocks[base + k])
    if other < c.width:
        c.clocks[a + other] = max(c.clocks[a + other], position)


def numbered(
    streams: Iterable[Stream], unasked: Collection[Stream] = ()
) -> tuple[dict[Stream, int], int]:
    """Return the numbers of streams, those in ``unasked`` last, and how many the others are."""
    known = dict.fromkeys(streams)
    entries = [stream for stream in known if stream not in unasked]
    order = dict.fromkeys([*entries, *known])
    return {stream: i for i, stream in enumerate(order)}, len(entries)


# ---- whole programs


class _Lines(NamedTuple):
    """The instructions of a program. Streams are numbers as ``Clocks`` has them."""

    kind: Any
    own: Any
    also: Any
    event: Any
    ago: Any
    apart: Any


class _State(NamedTuple):
    """The pairs in question, and the positions and events so far. A *line* is defined below."""

    before: Any  # [pair], a line,
    at: Any  # and one that is to follow it, in the order in which they are walked
    found: Any  # whether it does
    own: Any  # [line], its stream
    position: Any  # [line], its position on its stream
    event_own: Any  # [event of a run], its stream, -1 until it is recorded
    event_position: Any
    event_clocks: Any  # [event of a run, entry]


def ordered(
    program: Program, before: Ints, at: Ints, runs: int = 1, how: Mode | None = None
) -> NDArray[np.bool_]:
    r"""Return for each pair of lines whether the first has surely ended before the second begins.

    The line of an instruction of run r is ``r * len(program)`` more than its position. A copy
    between ranks has a second line, for its receive, which is ``len(program)`` more; ranks execute one
    run. The first line of a pair is that of a run or copy. Pairs are in the order of the list by
    their second lines.

    >>> lines = ["cpu/a run x", "cpu/a record e0", "cpu/b wait e0", "cpu/b run y", "cpu/a run z"]
    >>> ordered(Program.parse("\n".join(lines)), np.array([0, 3]), np.array([3, 4])).tolist()
    [True, False]
    """
    p = program.columns
    count = len(program)
    total = runs * count
    streams = len(program.streams)
    # 1. The streams with entries, and those of which nobody asks.
    line = before % total % count
    unasked = np.ones(streams, bool)
    unasked[np.where(before < total, p.stream[line], p.also[line])] = False
    rank = np.argsort(np.argsort(unasked, kind="stable"))
    width = int((~unasked).sum())
    own = rank[p.stream]
    also = np.where(p.also >= 0, rank[p.also], -1)
    # 2. The walk.
    work = runs * count * (1 + width / 16) + len(at)
    how = how or mode(work, _walk)
    lines = _Lines(p.kind, own, also, p.event, p.ago, p.apart)
    of_line = np.concatenate([own, also]) if p.apart.any() else np.tile(own, runs)
    state = _State(
        how.whole(before), how.whole(at), how.counts(len(at)), how.whole(of_line),
        how.counts(len(of_line)), how.counts(runs * p.records, -1), how.counts(runs * p.records),
        how.small(runs * p.records * width),
    )  # fmt: skip
    how(_walk)(how.of(lines), state, Clocks.of(how, streams, width), runs)
    return np.array(state.found, np.bool_)


@kernel
def _walk(p: _Lines, s: _State, c: Clocks, runs: int) -> None:
    """Fill ``found``, until there are no more pairs."""
    count = len(p.kind)
    events = len(s.event_own) // runs
    width = c.width
    pair = 0
    for i in range(runs * count):
        if pair == len(s.at):
            return
        at = i % count
        kind = p.kind[at]
        own = p.own[at]
        if kind == RECORD:
            event = i // count * events + p.event[at]
            s.event_own[event] = own
            s.event_position[event] = c.count[own]
            for k in range(width):
                s.event_clocks[event * width + k] = c.clocks[own * width + k]
        elif kind in (WAIT, CARRIED):
            run = i // count - p.ago[at]
            event = run * events + p.event[at]
            if run >= 0 and p.event[at] >= 0 and s.event_own[event] >= 0:
                other = s.event_own[event]
                position = s.event_position[event]
                wait_for(c, own, other, position, s.event_clocks, event * width)
        elif kind in (RUN, COPY):
            advance(c, own, -1 if p.apart[at] else p.also[at])
            s.position[i] = c.count[own]
        pair = _answer(s, c, pair, i, own)
        if p.apart[at]:
            # The receive follows the send from its end on, and the send nothing of the receiver.
            received = count + i
            other = p.also[at]
            advance(c, other, -1)
            s.position[received] = c.count[other]
            pair = _answer(s, c, pair, received, other)
            wait_for(c, other, own, s.position[i], c.clocks, own * width)


@kernel
def _answer(s: _State, c: Clocks, pair: int, line: int, own: int) -> int:
    """Answer the pairs of a line, which is the next of its stream; return the next pair."""
    while pair < len(s.at) and s.at[pair] == line:
        before = s.before[pair]
        other = s.own[before]
        if other == own or c.clocks[own * c.width + other] >= s.position[before]:
            s.found[pair] = 1
        pair += 1
    return pair
