"""Insert events and frees where a program spans several ranks.

Memory belongs to one rank, and everything that uses it has a stream there. So each hazard is local,
and so are the events that enforce it.

1. Each copy between ranks becomes two lines, a send that reads and a receive that makes.
2. Hazards are found, between lines of one rank.
3. A receive follows its send without an event: it tells that what happened before the send has ended,
   and so has the send. The sender of a message learns nothing from its end, because a message may be
   buffered. Without what receives tell, memory that was sent would be freed too late: at the end.
4. Events and frees are inserted.
5. A send and its receive become one copy again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autosched.errors import ScheduleError
from autosched.graph.flow import rows_of, starts
from autosched.lowering.events import insert_events
from autosched.lowering.hazards import Hazards, Line, find_hazards
from autosched.problem import Problem
from autosched.program.parts import crosses, halves, whole_of
from autosched.program.program import Copy, Free, Instruction, Receive, Record, Run, Send, Wait


def insert_by_rank(
    problem: Problem,
    instructions: Sequence[Run | Copy | Free],
    outputs: Mapping[str, str],
) -> list[Instruction]:
    """Return the instructions with records, waits and frees, so that every hazard is ordered.

    What cannot be freed earlier is freed at the end. Raises ScheduleError if tasks of different ranks
    share anything but values.
    """
    machine = problem.machine
    ranks = machine.ranks
    lines: list[Line] = []
    for instruction in instructions:
        if isinstance(instruction, Copy) and crosses(instruction, ranks):
            lines += halves(instruction)
        else:
            lines.append(instruction)
    hazards = find_hazards(problem, lines, outputs)
    _check_local(lines, hazards, ranks)
    received = np.array([at for at, line in enumerate(lines) if type(line) is Receive], np.int64)
    told = starts(received, len(lines)), received - 1  # its send is the line before
    return _joined(insert_events(lines, hazards, told), ranks)


def _check_local(lines: Sequence[Line], hazards: Hazards, ranks: Mapping[str, int]) -> None:
    """Raise ScheduleError for a hazard between ranks, which only tasks can have."""
    of = np.array([ranks[line.stream.device] for line in lines], np.int64)
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


def _joined(lines: Sequence[Instruction], ranks: Mapping[str, int]) -> list[Instruction]:
    """Return the lines with copies for sends and receives, and events in the order of records.

    Between a send and its receive, there are records and frees of the sender, which come after the
    copy, and waits and frees of the receiver, which come before it.
    """
    found: list[Instruction] = []
    sent: Send | None = None
    begun: list[Instruction] = []
    for line in lines:
        if isinstance(line, Send):
            sent, begun = line, []
        elif isinstance(line, Receive):
            assert sent is not None
            is_sender = [ranks[item.stream.device] == ranks[sent.stream.device] for item in begun]
            pairs = [*zip(begun, is_sender, strict=True)]
            found += [item for item, is_own in pairs if not is_own]
            found.append(whole_of(sent, line))
            found += [item for item, is_own in pairs if is_own]
            sent = None
        else:
            (found if sent is None else begun).append(line)
    records = (line.event for line in found if type(line) is Record)
    number = {event: i for i, event in enumerate(records)}
    for i, line in enumerate(found):
        if type(line) is Record:
            found[i] = Record(line.stream, number[line.event])
        elif type(line) is Wait:
            found[i] = Wait(line.stream, number[line.event])
    return found
