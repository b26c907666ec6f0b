"""Insert events and frees rank by rank, where a program spans several ranks.

Memory belongs to one rank, and everything that uses it has a stream there. So each hazard is local:
events are inserted for each rank by itself, as if it were alone. The same would take clocks over
the streams of all ranks, whose size is quadratic in them.

1. Each copy between ranks becomes two lines, a send that reads and a receive that makes.
2. Hazards are found, between lines of one rank.
3. A receive *tells* that sends of its rank have ended: those before which its own send could not
   begin, since the values came back. The sender of a message learns nothing from its end, because a
   message may be buffered. Without step 3 memory that was sent would be freed too late: at the end.
4. Events and frees are inserted into the lines of each rank.
5. The parts are joined in the order of issue; a send and its receive become one copy again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import kernel, mode
from autosched.errors import ScheduleError
from autosched.graph.flow import offsets, rows_of, starts
from autosched.graph.graph import Graph
from autosched.lowering.events import insert_events
from autosched.lowering.hazards import Hazards, Line, find_hazards, single_copy_streams
from autosched.machine.machine import Machine
from autosched.program.parts import crosses, halves, numbered, whole_of
from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Receive,
    Record,
    Run,
    Send,
    Stream,
)

__all__ = ["insert_by_rank"]

Ints = NDArray[np.int64]
_LOCAL, _SEND, _RECEIVE = range(3)


def insert_by_rank(
    graph: Graph,
    machine: Machine,
    instructions: Sequence[Run | Copy | Free],
    outputs: Mapping[str, str],
    ends: bool,
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that every hazard is ordered.

    With ``ends``, what cannot be freed earlier is freed at the end. Raises ScheduleError if tasks of
    different ranks share anything but values.
    """
    # 1. Divide copies between ranks.
    ranks = machine.ranks
    lines: list[Line] = []
    for instruction in instructions:
        if isinstance(instruction, Copy) and crosses(instruction, ranks):
            lines += halves(instruction)
        else:
            lines.append(instruction)
    of = np.array([ranks[line.stream.device] for line in lines], np.int64)
    # 2. Find hazards, and what receives tell.
    hazards = find_hazards(graph, machine, lines, outputs)
    _check_local(lines, hazards, of)
    known_ended = _known_ended(lines, hazards, of)
    # 3. Insert events for each rank by itself.
    parts: dict[int, list[Instruction]] = {}
    for rank, own in enumerate(_Ranks(lines, hazards, of, ranks, known_ended)):
        if not own.lines:
            continue
        single = frozenset() if machine.contention else single_copy_streams(own.lines, own.hazards)
        parts[rank] = insert_events(own.lines, own.hazards, single, own.known_ended, ends)
    return _joined(lines, of.tolist(), parts)


def _check_local(lines: Sequence[Line], hazards: Hazards, of: Ints) -> None:
    """Raise ScheduleError for a hazard between ranks, which only tasks can have."""
    rows = rows_of(hazards.after_at)
    apart = (of[rows] != of[hazards.after]).nonzero()[0]
    if len(apart):
        later, before = (lines[at[apart[0]]] for at in (rows, hazards.after))
        assert isinstance(later, Run)
        assert isinstance(before, Run)
        raise ScheduleError(
            f"task {later.task!r} on {later.stream.device!r} must run after {before.task!r} on "
            f"{before.stream.device!r}, because of after= or of state that they share; only values "
            f"can be exchanged between ranks, so the two must be on one rank"
        )


# ---- what receives tell


class Talk(NamedTuple):
    """The lines of all ranks as arrays; a receive is the line after its send."""

    own: Any  # [line], its stream
    also: Any  # and its second, -1 if it has none
    rank: Any  # [line]
    kind: Any  # [line]
    after_at: Any
    after: Any  # [line], the lines that it must follow
    sender: Any  # [sender], a stream that sends
    sender_rank: Any  # and its rank
    first: Any  # and its first send


@kernel
def listen(t: Talk, known: Any, last: Any, receive: Any, send: Any) -> int:
    """Find the pairs (receive, latest send of a stream that has ended by then); return how many.

    ``known`` has for each line the latest send of one stream that happens before its end, and
    ``last`` the last line of each stream.
    """
    found = 0
    for s in range(len(t.sender)):
        for k in range(len(last)):
            last[k] = -1
        for i in range(t.first[s], len(t.own)):
            own = t.own[i]
            latest = -1
            if last[own] >= 0:
                latest = known[last[own]]
            also = t.also[i]
            if also >= 0 and last[also] >= 0:
                latest = max(latest, known[last[also]])
            for k in range(t.after_at[i], t.after_at[i + 1]):
                if t.after[k] >= t.first[s]:
                    latest = max(latest, known[t.after[k]])
            if t.kind[i] == _RECEIVE and i > t.first[s] and known[i - 1] > latest:
                latest = known[i - 1]
                if t.rank[i] == t.sender_rank[s]:
                    receive[found] = i
                    send[found] = latest
                    found += 1
            if own == t.sender[s] and t.kind[i] == _SEND:
                latest = i
            known[i] = latest
            last[own] = i
            if also >= 0:
                last[also] = i
    return found


def _known_ended(lines: Sequence[Line], hazards: Hazards, of: Ints) -> tuple[Ints, Ints]:
    """Return for each line the sends that it tells to have ended, as a ragged table."""
    number: dict[Stream, int] = {}
    own = np.array([number.setdefault(line.stream, len(number)) for line in lines], np.int64)
    second = [line.also if type(line) is Copy else None for line in lines]
    also = [-1 if it is None else number.setdefault(it, len(number)) for it in second]
    kinds = {Send: _SEND, Receive: _RECEIVE}
    kind = np.array([kinds.get(type(line), _LOCAL) for line in lines], np.int64)
    sender, first = np.unique(own[kind == _SEND], return_index=True)
    first = (kind == _SEND).nonzero()[0][first]
    how = mode(float(len(sender) * len(lines)), listen)
    talk = Talk(
        own,
        np.array(also, np.int64),
        of,
        kind,
        hazards.after_at,
        hazards.after,
        sender,
        of[first],
        first,
    )
    senders = np.bincount(of[first], minlength=int(of.max(initial=0)) + 1)
    most = int(senders[of[kind == _RECEIVE]].sum())
    receive, send = how.counts(most), how.counts(most)
    known, last = how.counts(len(lines)), how.counts(len(number))
    count = how(listen)(how.of(talk), known, last, receive, send)
    rows, sends = (np.array(found[:count], np.int64) for found in (receive, send))
    order = np.argsort(rows, kind="stable")
    return starts(rows, len(lines)), sends[order]


# ---- the lines of each rank


class _Own(NamedTuple):
    """The lines of one rank, their hazards, and what they tell; positions count these lines."""

    lines: list[Line]
    hazards: Hazards
    known_ended: tuple[Ints, Ints]


class _Ranks:
    """The lines of all ranks."""

    def __init__(
        self,
        lines: Sequence[Line],
        hazards: Hazards,
        of: Ints,
        ranks: Mapping[str, int],
        known_ended: tuple[Ints, Ints],
    ):
        self.lines = lines
        self.hazards = hazards
        self.known_ended = known_ended
        count = max(ranks.values()) + 1
        owners = np.array([ranks[stream.device] for stream in hazards.owners], np.int64)
        self.rows = _by_rank(of, count)
        self.blocks = _by_rank(owners, count)
        self.position = np.empty_like(of)  # of each line among those of its rank
        for rows in self.rows:
            self.position[rows] = np.arange(len(rows))

    def __iter__(self) -> Iterator[_Own]:
        h = self.hazards
        for rows, blocks in zip(self.rows, self.blocks, strict=True):
            numbers = blocks.tolist()
            local = Hazards(
                *self._taken(h.after_at, h.after, rows),
                [h.values[block] for block in numbers],
                [h.versions[block] for block in numbers],
                [h.owners[block] for block in numbers],
                *self._taken(h.uses_at, h.uses, blocks),
            )
            lines = [self.lines[row] for row in rows.tolist()]
            yield _Own(lines, local, self._taken(*self.known_ended, rows))

    def _taken(self, at: Ints, items: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Return some rows of a ragged table of lines, as positions in one rank."""
        lengths = at[rows + 1] - at[rows]
        new = offsets(lengths)
        chosen = np.repeat(at[rows] - new[:-1], lengths) + np.arange(new[-1])
        return new, self.position[items[chosen]]


def _by_rank(of: Ints, count: int) -> list[Ints]:
    """Return the numbers of the items of each rank, in order."""
    order = np.argsort(of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(of, minlength=count))[:-1])


# ---- joining parts


class _Part:
    """The instructions of one rank, taken line by line."""

    def __init__(self, instructions: Sequence[Instruction], lines: Sequence[Line]):
        self.items = instructions
        self.lines = lines
        self.at = 0
        self.next = 0  # the next line

    def before(self) -> list[Instruction]:
        """Return what stands before the next line: waits, and frees that these permit."""
        line = self.lines[self.next]
        found = []
        while self.items[self.at] is not line:
            found.append(self.items[self.at])
            self.at += 1
        return found

    def after(self) -> list[Instruction]:
        """Pass the next line, and return what belongs to it: records and frees."""
        self.at += 1
        self.next += 1
        line = self.lines[self.next] if self.next < len(self.lines) else None
        found: list[Instruction] = []
        while self.at < len(self.items) and self.items[self.at] is not line:
            item = self.items[self.at]
            if not isinstance(item, Record | Free):
                break
            found.append(item)
            self.at += 1
        return found

    def rest(self) -> Sequence[Instruction]:
        return self.items[self.at :]


def _joined(
    lines: Sequence[Line], of: Sequence[int], parts: Mapping[int, Sequence[Instruction]]
) -> list[Instruction]:
    """Return the parts of all ranks as one list, in the order of the lines."""
    own: dict[int, list[Line]] = {rank: [] for rank in parts}
    for line, rank in zip(lines, of, strict=True):
        own[rank].append(line)
    taken = {rank: _Part(part, own[rank]) for rank, part in parts.items()}
    found: list[tuple[int, Instruction]] = []
    for i, line in enumerate(lines):
        if isinstance(line, Receive):
            continue
        ranks = [of[i]]
        whole: Instruction = line
        if isinstance(line, Send):
            other = lines[i + 1]
            assert isinstance(other, Receive)
            ranks.append(of[i + 1])
            whole = whole_of(line, other)
        for rank in ranks:
            found += [(rank, item) for item in taken[rank].before()]
        found.append((ranks[0], whole))
        for rank in ranks:
            found += [(rank, item) for item in taken[rank].after()]
    for rank, part in taken.items():
        found += [(rank, item) for item in part.rest()]
    return numbered(found)
