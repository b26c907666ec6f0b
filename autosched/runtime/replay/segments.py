"""Divide a program into segments that can be recorded and replayed whole.

Work on the host, copies between physical devices, and frees of host memory remain outside segments.
Everything else is on one physical device. Two such instructions share a segment if they have the
same predecessors and the same successors among the instructions that are not on their device. So
beginning a segment as a whole and ending it as a whole delays no other instruction: no copy and no
host task waits for more of a graph than it needs. Where copies are many, segments are small.

Segments never wait for each other in a cycle. (Suppose that a segment A had to wait for an
instruction B of another device, which has to wait for A. Then B would be a successor of some
instructions of A and a predecessor of others, so these would not be in one segment.)

Knows no function and no tensor, and not how a segment is recorded.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from autosched.lowering.events import insert_events
from autosched.lowering.hazards import Hazards
from autosched.machine.machine import Machine
from autosched.program.program import (
    Copy,
    Free,
    Instruction,
    Program,
    Record,
    Run,
    Stream,
    Wait,
    occupied,
)

__all__ = ["Segment", "Segmented", "physical", "segmented"]

_Before = dict[int, list[int]]  # of each run, copy and free (its position), those right before it


@dataclass(frozen=True)
class Segment:
    """A part of a program that is on one physical ``device``. It begins and ends on ``stream``.

    Its ``program`` forks from that stream to its others, and joins them to it. ``positions`` are
    those that its runs, copies and frees have in the whole program, in the order of ``program``.
    """

    device: str
    stream: Stream
    program: Program
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Segmented:
    """A program in which each segment is one run, and the meaning of its runs, copies and frees.

    That is a segment, or an instruction of the whole program, by its position. Events have numbers
    that neither the whole program nor another segment uses.
    """

    whole: Program
    program: Program
    parts: tuple[Segment | int, ...]

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in issue order."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @cached_property
    def everything(self) -> Program:
        """All instructions, for creating streams and events."""
        programs = [self.whole, self.program, *(segment.program for segment in self.segments)]
        return Program(
            tuple(instruction for program in programs for instruction in program.instructions)
        )


def physical(machine: Machine) -> dict[str, str | None]:
    """Return the physical device of each name; None for the host's.

    >>> physical(Machine.emulated(gpus=1))
    {'cpu': None, 'cuda:0': 'cuda:0'}
    """
    return {
        each.name: None if each.kind == "cpu" else each.physical or each.name
        for each in machine.devices
    }


def segmented(program: Program, device: Mapping[str, str | None]) -> Segmented:
    r"""Divide a program into segments.

    ``device`` is the physical one of each name; None for the host.

    >>> program = Program.parse("cuda:0/compute run a\ncuda:0/compute run b\ncuda:0/compute record e0\n"
    ... "cuda:0/copy-out wait e0\ncuda:0/copy-out copy b -> cpu\ncuda:0/compute run c")
    >>> cut = segmented(program, {"cuda:0": "cuda:0", "cpu": None})
    >>> cut.parts[0].positions, cut.parts[1], cut.parts[2].positions
    ((0, 1), 4, (5,))
    """
    before = _before(program)
    where = {i: _where(program.instructions[i], device) for i in before}
    units = _units(program, before, where)
    unit = {i: number for number, members in enumerate(units) for i in members}
    needs = [
        sorted({unit[p] for i in members for p in before[i]} - {n})
        for n, members in enumerate(units)
    ]
    fresh = count(1 + max((i.event for i in program if isinstance(i, Record)), default=-1))
    works: list[Run | Copy | Free] = []
    parts: list[Segment | int] = []
    order = _topological([members[0] for members in units], needs)
    for number in order:
        members = units[number]
        inside = where[members[0]]
        part = members[0] if inside is None else _segment(program, inside, members, before, fresh)
        parts.append(part)
        works.append(
            _work(program, part)
            if isinstance(part, int)
            else Run(part.stream, f"segment-{len(works)}")
        )
    at = {number: position for position, number in enumerate(order)}
    after = [sorted(at[p] for p in needs[number]) for number in order]
    between = _with_events(works, after, fresh)
    return Segmented(
        program, Program(tuple(between), program.inputs, program.outputs), tuple(parts)
    )


def _before(program: Program) -> dict[int, list[int]]:
    """Return the direct predecessors of each run, copy and free: on its streams, and by events."""
    last: dict[Stream, list[int]] = {}
    recorded: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    for i, instruction in enumerate(program):
        match instruction:
            case Record(stream, event):
                recorded[event] = last.get(stream, [])
            case Wait(stream, event):
                last[stream] = [*dict.fromkeys([*last.get(stream, ()), *recorded.get(event, ())])]
            case _:
                streams = occupied(instruction)
                found[i] = sorted({p for stream in streams for p in last.get(stream, ())})
                last.update((stream, [i]) for stream in streams)
    return found


def _where(instruction: Instruction, device: Mapping[str, str | None]) -> str | None:
    """Return the physical device that a run, copy or free is on.

    None for what remains outside segments.
    """
    if isinstance(instruction, Copy):
        source = device[instruction.source]
        destination = device[instruction.destination]
        return source if source == destination else None
    return device[instruction.stream.device]


def _units(program: Program, before: _Before, where: Mapping[int, str | None]) -> list[list[int]]:
    """Return groups to be issued as one: the instructions of a segment, or one that is outside all segments."""
    after: dict[int, list[int]] = {i: [] for i in reversed(before)}
    for i, found in before.items():
        for p in found:
            after[p].append(i)
    line = {i: (program.instructions[i].stream, there) for i, there in where.items()}
    lines = list(dict.fromkeys(line.values()))
    number = {key: at for at, key in enumerate(lines)}
    own = {i: number[key] for i, key in line.items()}
    clocks = _clocks(before, own, len(lines)), _clocks(after, own, len(lines))
    others = {
        here: [number[key] for key in lines if key[1] != here]
        for here in dict.fromkeys(where.values())
    }
    units: dict[Hashable, list[int]] = {}
    for i, there in where.items():
        known = [tuple(clock[i][other] for other in others[there]) for clock in clocks]
        units.setdefault(i if there is None else (there, *known), []).append(i)
    return list(units.values())


def _clocks(before: _Before, own: Mapping[int, int], width: int) -> dict[int, list[int]]:
    """Return for each instruction how far along each line it is.

    ``own`` is the line that it is in itself.
    """
    clocks: dict[int, list[int]] = {}
    so_far = [0] * width
    for i, found in before.items():
        clock = [*map(max, zip(*(clocks[p] for p in found), strict=True))] if found else [0] * width
        so_far[own[i]] += 1
        clock[own[i]] = so_far[own[i]]
        clocks[i] = clock
    return clocks


def _topological(first: Sequence[int], needs: Sequence[Sequence[int]]) -> list[int]:
    """Return the units in topological order, with ties broken by their first position in the program."""
    users: list[list[int]] = [[] for _ in needs]
    for number, found in enumerate(needs):
        for p in found:
            users[p].append(number)
    missing = [len(found) for found in needs]
    ready = [(first[number], number) for number, left in enumerate(missing) if not left]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for user in users[order[-1]]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (first[user], user))
    assert len(order) == len(needs), "segments wait for each other in a circle"
    return order


def _segment(
    program: Program, device: str, members: Sequence[int], before: _Before, fresh: count[int]
) -> Segment:
    streams = Counter(stream for i in members for stream in occupied(program.instructions[i]))
    runs = Counter(
        program.instructions[i].stream for i in members if isinstance(program.instructions[i], Run)
    )
    main = max(streams, key=lambda stream: (runs[stream], streams[stream]))
    others = [stream for stream in streams if stream != main]
    order = _branch_by_branch(program, members, before, [main, *others])
    at = {i: position for position, i in enumerate(order)}
    after = [sorted(at[p] for p in before[i] if p in at) for i in order]
    inner = _with_events([_work(program, i) for i in order], after, fresh)
    fork: list[Instruction] = []
    if others:
        begun = next(fresh)
        fork = [Record(main, begun), *(Wait(stream, begun) for stream in others)]
    ends = [(stream, next(fresh)) for stream in others]
    join = [
        instruction
        for stream, end in ends
        for instruction in (Record(stream, end), Wait(main, end))
    ]
    return Segment(device, main, Program((*fork, *inner, *join)), tuple(order))


def _branch_by_branch(
    program: Program, members: Sequence[int], before: _Before, streams: Sequence[Stream]
) -> list[int]:
    """Return members in an order that stays on a stream as long as possible.

    A recorded graph is replayed on the smallest number of streams only if its branches were
    recorded one by one, the main one first.
    """
    lines = {
        stream: [i for i in reversed(members) if program.instructions[i].stream == stream]
        for stream in streams
    }
    inside = set(members)
    done: set[int] = set()
    order: list[int] = []

    def is_ready(stream: Stream) -> bool:
        return bool(lines[stream]) and all(
            p in done or p not in inside for p in before[lines[stream][-1]]
        )

    while len(order) < len(members):
        stream = next(stream for stream in streams if is_ready(stream))
        while is_ready(stream):
            order.append(lines[stream].pop())
            done.add(order[-1])
    return order


def _work(program: Program, i: int) -> Run | Copy | Free:
    instruction = program.instructions[i]
    assert isinstance(instruction, (Run, Copy, Free))
    return instruction


def _with_events(
    works: Sequence[Run | Copy | Free], after: Sequence[Sequence[int]], fresh: Iterable[int]
) -> list[Instruction]:
    """Return instructions with events that order each after the positions in ``after``, with new event numbers."""
    result: list[Instruction] = []
    numbers: dict[int, int] = {}
    numbering = iter(fresh)
    for instruction in insert_events(works, Hazards.of(after, ())):
        match instruction:
            case Record(stream, event):
                numbers[event] = numbers[event] if event in numbers else next(numbering)
                result.append(Record(stream, numbers[event]))
            case Wait(stream, event):
                result.append(Wait(stream, numbers[event]))
            case _:
                result.append(instruction)
    return result
