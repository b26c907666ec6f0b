"""Insert the waits between the runs of a loop.

All runs share the memory of inputs and constants that tasks write, and the state of tasks: modules,
optimizers, random number generators. Accesses to these that conflict keep the order of the runs, by
waits for events of the run before. Nothing else is ordered between runs.

* *One run ago suffices.* Each run repeats all accesses. Let ``a`` and ``b`` conflict, and let ``a``
  be the write. If ``a`` of each run happens before ``a`` and ``b`` of the next, ``a`` happens before
  ``b`` of all later runs; the same holds if ``b`` is the write. Tasks that share state are ordered
  within a run, so it suffices that the last of a run happens before the first of the next.
* *Two runs suffice to find the waits.* In the first run, carried waits have no effect. So whatever
  is ordered between the first two runs is ordered between any run and the next, where all waits
  have an effect.
* *Each wait is necessary.* The first two runs may be in flight together, so nothing but streams and
  waits orders them. A wait is inserted only for a predecessor that does not happen before already.
  Predecessors of one instruction are considered latest first; none that follows in this order, and
  no later wait, implies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import chain

from autosched._lib.jit import Mode
from autosched.graph.graph import Graph
from autosched.graph.regions import Accesses, Region
from autosched.program.clocks import Clocks, Stamp, advance, numbered, wait_for
from autosched.program.program import Copy, Instruction, Record, Run, Stream, Wait, occupied
from autosched.program.residency import Buffer, Buffers

_Predecessors = Mapping[int, Sequence[int]]
"""By position, the positions in the run before that must have happened, the latest first."""


def insert_carried(
    instructions: Sequence[Instruction], graph: Graph, homes: Mapping[int, str]
) -> list[Instruction]:
    """Return the instructions of one run with waits for the run before, and records for these.

    ``homes`` are the devices of inputs and constants, by index. New events have new numbers.
    """
    waits = _needed(instructions, _hazards(instructions, graph, homes))
    events = _events(instructions)
    fresh = 1 + max((i.event for i in instructions if isinstance(i, Record)), default=-1)
    records: dict[int, int] = {}
    for producer in sorted({producer for found in waits.values() for producer in found}):
        if producer not in events:
            events[producer] = records[producer] = fresh + len(records)
    result: list[Instruction] = []
    for at, instruction in enumerate(instructions):
        stream = instruction.stream
        result += [Wait(stream, events[producer], 1) for producer in waits.get(at, ())]
        result.append(instruction)
        if at in records:
            result.append(Record(stream, records[at]))
    return result


def _hazards(
    instructions: Sequence[Instruction], graph: Graph, homes: Mapping[int, str]
) -> _Predecessors:
    """Return what each run or copy must follow of the run before, on other streams.

    1. Accesses to the memory of a source: predecessors of the second of two walks over the same
       memory that are in the first walk.
    2. Tasks that share state: the last of the run before.
    3. Of the predecessors on one stream, only the latest.
    """
    found: dict[int, set[int]] = {}
    # 1. The memory of inputs and constants that tasks write.
    for accesses in _of_sources(instructions, graph, homes).values():
        for at, before in _conflicts(accesses):
            found.setdefault(at, set()).update(before)
    # 2. Shared state.
    ran = {i.task: at for at, i in enumerate(instructions) if isinstance(i, Run)}
    users: dict[int, list[int]] = {}
    for task in graph.tasks:
        for item in task.shared:
            users.setdefault(id(item), []).append(ran[task.name])
    for together in users.values():
        found.setdefault(min(together), set()).add(max(together))
    # 3. The latest on each other stream.
    result: dict[int, list[int]] = {}
    for at, positions in found.items():
        latest: dict[Stream, int] = {instructions[k].stream: k for k in sorted(positions)}
        own = occupied(instructions[at])
        others = [k for k in latest.values() if not set(own) & set(occupied(instructions[k]))]
        result[at] = sorted(others, reverse=True)
    return result


def _of_sources(
    instructions: Sequence[Instruction], graph: Graph, homes: Mapping[int, str]
) -> dict[Buffer, list[tuple[int, Region, bool]]]:
    """Return the accesses to each source that tasks write: (position, region, whether it writes)."""
    written = [value for value in homes if graph.last_version(value)]
    if not written:
        return {}
    buffers = Buffers(graph, homes)
    found: dict[Buffer, list[tuple[int, Region, bool]]] = {
        buffers.sources[value]: [] for value in written
    }
    for step in buffers.walk(instructions):
        for buffer, region, writes in buffers.accesses(step):
            if buffer.block in found:
                found[buffer.block].append((step.at, region, writes))
    return found


def _conflicts(accesses: Sequence[tuple[int, Region, bool]]) -> Iterator[tuple[int, list[int]]]:
    """Yield the position of each access, and the accesses of the run before that it must follow.

    Accesses that a later write covers are left out: what follows this write also follows them.
    """
    if not any(writes for _, _, writes in accesses):
        return
    so_far = Accesses()
    for is_second in (False, True):
        for at, region, writes in accesses:
            who = ~at if not is_second else at  # positions of the first run are negative
            wrote, read = so_far.write(region, who) if writes else (so_far.read(region, who), [])
            if is_second:
                yield at, [~k for k in (*wrote, *read) if k < 0]


def _needed(instructions: Sequence[Instruction], hazards: _Predecessors) -> dict[int, list[int]]:
    """Return the predecessors for which to wait: those that do not happen before already."""
    producers = {k for found in hazards.values() for k in found}
    if not producers:
        return {}
    clocks = _TwoRuns(instructions, {instructions[k].stream for k in producers})
    done: dict[int, Stamp] = {}  # by producer, its stamp
    for at, instruction in enumerate(instructions):
        clocks.issue(instruction)
        if at in producers:
            done[at] = clocks.stamp(instruction.stream)
    clocks.begin_run()
    waits: dict[int, list[int]] = {}
    for at, instruction in enumerate(instructions):
        for producer in hazards.get(at, ()):
            if not clocks.follows(instruction, done[producer]):
                clocks.wait_for(instruction.stream, done[producer])
                waits.setdefault(at, []).append(producer)
        clocks.issue(instruction)
    return waits


class _TwoRuns:
    """Vector clocks of two runs, with entries for the streams of which somebody asks.

    A wait for an earlier run has an effect in the second run if it is for the first.
    """

    def __init__(self, instructions: Sequence[Instruction], asked: Set[Stream]):
        streams = dict.fromkeys(chain.from_iterable(map(occupied, instructions)))
        self.index, self.width = numbered(streams, streams.keys() - asked)
        self.clocks = Clocks.of(Mode(False), len(self.index), self.width)
        self.events: dict[int, Stamp] = {}
        self.before: dict[int, Stamp] = {}  # the events of the run before

    def begin_run(self) -> None:
        """Begin the second run."""
        self.before, self.events = self.events, {}

    def stamp(self, stream: Stream) -> Stamp:
        """Return the stamp of everything issued on a stream so far."""
        own = self.index[stream]
        clock = self.clocks.clocks[own * self.width : (own + 1) * self.width]
        return own, self.clocks.count[own], clock

    def wait_for(self, stream: Stream, stamp: Stamp) -> None:
        """Order the next instructions of a stream after a stamp."""
        wait_for(self.clocks, self.index[stream], *stamp, 0)

    def follows(self, instruction: Instruction, stamp: Stamp) -> bool:
        """Whether an instruction, which is to be issued next, happens after a stamp."""
        other, position, _ = stamp
        rows = (self.stamp(stream) for stream in occupied(instruction))
        return any(own == other or clock[other] >= position for own, _, clock in rows)

    def issue(self, instruction: Instruction) -> None:
        """Issue an instruction."""
        if isinstance(instruction, (Run, Copy)):
            own, also, *_ = (*map(self.index.__getitem__, occupied(instruction)), -1)
            advance(self.clocks, own, also)
        elif isinstance(instruction, Record):
            self.events[instruction.event] = self.stamp(instruction.stream)
        elif isinstance(instruction, Wait) and instruction.ago < 2:
            events = self.before if instruction.ago else self.events
            if instruction.event in events:
                self.wait_for(instruction.stream, events[instruction.event])


def _events(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return the event that is recorded directly after a run or copy, by its position."""
    found: dict[int, int] = {}
    last: dict[Stream, int] = {}  # by stream, its last run or copy, unless a wait follows
    for at, instruction in enumerate(instructions):
        stream = instruction.stream
        if isinstance(instruction, (Run, Copy)):
            last.update((other, -1) for other in occupied(instruction))
            last[stream] = at
        elif isinstance(instruction, Wait):
            last[stream] = -1
        elif isinstance(instruction, Record) and last.get(stream, -1) >= 0:
            found.setdefault(last[stream], instruction.event)
    return found
