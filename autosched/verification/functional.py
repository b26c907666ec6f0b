"""Prove programs of functional graphs race-free, over arrays.

In a functional graph, one without in-place writes, each value is made once, in memory of its own,
and never written again. Then the laws of ``verify`` are few enough for a kernel. This proof is
sound but not complete: a program that it does not prove may be correct, and ``verify`` then walks
it. It never passes a program that ``verify`` would refuse. Of a loop it proves a single run: waits
for earlier runs order nothing within one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosched._lib.jit import Mode, kernel, mode
from autosched.graph.flow import Flow, flow
from autosched.graph.graph import HOST, STORAGE, Graph
from autosched.program.arrays import COPY, FREE, RECORD, RUN, WAIT, Columns
from autosched.program.clock_kernels import ClockState, advance, includes, wait_for
from autosched.program.program import Program
from autosched.program.vector_clocks import single_copy_streams

__all__ = ["proves"]

Ints = NDArray[np.int64]

NOWHERE = -2  # maker of a place that is empty
GIVEN = -1
ANY = -1  # any stream of the device may free it
NOBODY = -2


class Lines(NamedTuple):
    """The program as arrays. A *place* is a value on a device: value * devices + device."""

    kind: Any
    # Its stream. A copy between ranks has a second number, that of its receive, which counts from
    # the number of instructions.
    own: Any
    also: Any
    subject: Any  # the task, value or event
    place: Any  # the device of a run; the place that a copy fills or a free empties
    source: Any  # the place that a copy reads
    owner: Any  # the stream that may free what a copy makes
    apart: Any  # whether a copy is between ranks


class State(NamedTuple):
    """The state of the walk."""

    ran: Any  # [task], its position in the program; -1 if it has not run
    made: Any  # [place], the instruction that made it
    owner: Any  # [place]
    used: Any  # [place], its last use; -1 if there is none
    use: Any  # [use], its position in the program
    earlier: Any  # [use], the previous use of the same place
    uses: Any  # number of uses
    position: Any  # [instruction or receive], its position on its stream
    event_own: Any  # [event], its stream
    event_position: Any  # [event], the position on that stream
    event_clocks: Any  # [event, place], its clock


def proves(
    program: Program,
    graph: Graph,
    host: str | None,
    how: Mode | None = None,
    storage: str | None = None,
) -> bool:
    """Return whether it is proved that the program cannot race; False may mean unknown.

    ``host`` is the device of tasks on ``"host"``, ``storage`` of those that read files. A small
    program is not examined, unless ``how`` gives the mode.
    """
    small = how is None and not mode(len(program), walk).fast
    if small or not graph.is_plain:
        return False
    how = how or mode(len(program), walk)
    p = program.columns
    g = flow(graph)
    if not p.is_clean:
        return False
    try:
        found = _Numbered(program, graph, p, {HOST: host, STORAGE: storage})
    except KeyError:  # an unknown name
        return False
    if not found.is_placed or not found.is_in_ranks:
        return False
    state = _state(how, graph, g, p, found)
    waits = int((p.kind == WAIT).sum())
    c = ClockState.of(how, len(program.streams), found.width, waits)
    ended = how(walk)(how.of(found.lines), how.of(g), state, c, len(found.devices))
    return bool(ended) and found.is_left(np.asarray(state.made), np.asarray(state.ran))


class _Numbered:
    """A program with names replaced by numbers of the graph. Raises KeyError for unknown names."""

    def __init__(self, program: Program, graph: Graph, p: Columns, at: Mapping[str, str | None]):
        self.graph = graph
        self.program = program
        self.at = at
        streams = program.streams
        ends = [stream.device for stream in streams] + [
            device for _, device in (*program.inputs, *program.outputs)
        ]
        self.devices = {name: i for i, name in enumerate(dict.fromkeys(ends))}
        rank = dict(program.ranks)
        self.of = np.array([rank[name] if rank else 0 for name in self.devices], np.int64)
        self.values = {value.name: value.index for value in graph.values}
        self.tasks = {task.name: task.index for task in graph.tasks}
        found = single_copy_streams(program.instructions)
        single = np.array([stream in found for stream in streams], bool)
        self.width = len(streams) - int(single.sum())
        # Of streams, of which those that hold a single copy come last.
        self.rank = np.argsort(np.argsort(single, kind="stable"))
        self.device = self._each(self.devices, [stream.device for stream in streams])
        self.copies = p.copies
        self.p = p
        self.lines = self._lines(p)
        self.given = self._places(program.inputs)
        self.wanted = self._places(
            [(graph.values[graph.outputs[name]].name, at) for name, at in program.outputs]
        )

    @staticmethod
    def _each(number: dict[str, int], names: Sequence[str]) -> Ints:
        return np.fromiter(map(number.__getitem__, names), np.int64, len(names))

    def _places(self, items: Sequence[tuple[str, str]]) -> Ints:
        values = self._each(self.values, [v for v, _ in items])
        devices = self._each(self.devices, [d for _, d in items])
        return values * len(self.devices) + devices

    def _lines(self, p: Columns) -> Lines:
        run, copy, free = (p.kind == kind for kind in (RUN, COPY, FREE))
        subject = p.event.copy()
        count = len(self.devices)
        subject[run] = self._each(self.tasks, [i.task for i in p.runs])
        subject[copy] = self._each(self.values, [i.value for i in p.copies])
        subject[free] = self._each(self.values, [i.value for i in p.frees])
        at = self.device[p.stream]
        place = at.copy()
        source = np.zeros_like(at)
        owner = np.full(len(at), ANY)
        place[free] += subject[free] * count
        self.source = self._each(self.devices, [i.source for i in p.copies])
        self.target = self._each(self.devices, [i.destination for i in p.copies])
        place[copy] = subject[copy] * count + self.target
        source[copy] = subject[copy] * count + self.source
        own = self.rank[p.stream]
        also = np.where(p.also >= 0, self.rank[p.also], -1)
        # A copy on one stream has -1 for the second, which is ANY, too.
        owner[copy] = np.where(self.device[p.also[copy]] == self.target, also[copy], ANY)
        owner[copy] = np.where(at[copy] == self.target, own[copy], owner[copy])
        apart = np.zeros_like(at)
        if self.program.ranks:
            apart[copy] = self.of[self.source] != self.of[self.target]
            own = np.concatenate([own, also])
        return Lines(p.kind, own, also, subject, place, source, owner, apart)

    @property
    def is_in_ranks(self) -> bool:
        """Whether events and copies are on streams of the ranks that they may be on."""
        p = self.p
        if not self.program.ranks:
            return True
        rank = self.of[self.device[p.stream]]
        ran = dict(zip([run.task for run in p.runs], rank[p.kind == RUN].tolist(), strict=True))
        first: dict[int, int] = {}  # by state that tasks share, a rank
        for task in self.graph.tasks:
            for item in task.shared:
                if first.setdefault(id(item), ran.get(task.name, -1)) != ran.get(task.name, -1):
                    return False
        wait = p.kind == WAIT
        local = rank[p.kind == RECORD][p.event[wait]] == rank[wait]
        copy = p.kind == COPY
        also = p.also[copy]
        second = np.where(also >= 0, self.device[also], self.device[p.stream[copy]])
        between = self.lines.apart[copy] != 0
        ends = (self.device[p.stream[copy]] == self.source) & (second == self.target) & (also >= 0)
        near = self.of[second] == rank[copy]
        return bool(local.all() and np.where(between, ends, near).all())

    @property
    def is_placed(self) -> bool:
        """Whether tasks run where they must, copies have two ends, and inputs and outputs match."""
        graph = self.graph
        program = self.program
        at = self.device[self.p.stream[self.p.kind == COPY]]
        run = self.p.kind == RUN
        where = dict(
            zip(self.lines.subject[run].tolist(), self.lines.place[run].tolist(), strict=True)
        )
        bound = [
            (task.index, self.at.get(task.device, task.device))
            for task in graph.tasks
            if task.device
        ]
        return bool(
            all(
                name is None or where.get(task, -1) == self.devices.get(name, -2)
                for task, name in bound
            )
            and (self.source != self.target).all()
            and ((at == self.source) | (at == self.target)).all()
            and not any(i.version or i.overwrite for i in self.copies)
            and not any(i.version for i in self.p.frees)
            and sorted(name for name, _ in program.inputs)
            == sorted(value.name for value in graph.sources)
            and sorted(name for name, _ in program.outputs) == sorted(graph.outputs)
        )

    def is_left(self, made: Ints, ran: Ints) -> bool:
        """Whether all tasks have run, and only inputs and outputs remain in memory.

        In a loop, other memory may remain, too, until the run has ended.
        """
        kept = np.zeros(len(made), bool)
        kept[self.given] = True
        kept[self.wanted] = True
        left = made != NOWHERE
        is_loop = self.program.in_flight > 1
        return bool((ran >= 0).all() and (left[kept].all() if is_loop else (left == kept).all()))


def _state(how: Mode, graph: Graph, g: Flow, p: Columns, found: _Numbered) -> State:
    count = len(graph.values) * len(found.devices)
    uses = len(g.reads) + len(g.makes) + 2 * len(p.copies)
    made = how.counts(count, NOWHERE)
    owner = how.counts(count, ANY)
    for place in found.given.tolist():
        made[place] = GIVEN
        owner[place] = NOBODY
    return State(
        how.counts(len(graph.tasks), -1), made, owner, how.counts(count, -1),
        how.counts(uses), how.counts(uses), how.counts(1), how.counts(len(found.lines.own)),
        how.counts(p.records), how.counts(p.records), how.counts(p.records * found.width),
    )  # fmt: skip


@kernel
def walk(p: Lines, g: Flow, s: State, c: ClockState, devices: int) -> bool:
    """Return whether every instruction satisfies the laws."""
    for i in range(len(p.kind)):
        kind = p.kind[i]
        own = p.own[i]
        subject = p.subject[i]
        if p.apart[i]:
            if not exchange(p, s, c, i):
                return False
        elif kind in (RUN, COPY):
            advance(c, own, p.also[i])
            s.position[i] = c.count[own]
            if kind == RUN and not run(p, g, s, c, i, devices):
                return False
            if kind == COPY and not (
                use(p, s, c, i, p.source[i]) and s.made[p.place[i]] == NOWHERE
            ):
                return False
            if kind == COPY:
                make(s, i, p.place[i], p.owner[i])
        elif kind == FREE:
            if not free(p, s, c, i, p.place[i]):
                return False
        elif kind == RECORD:
            s.event_own[subject] = own
            s.event_position[subject] = c.count[own]
            for k in range(c.width):
                s.event_clocks[subject * c.width + k] = c.clocks[own * c.width + k]
        elif kind == WAIT:
            other = s.event_own[subject]
            far = s.event_position[subject]
            wait_for(c, own, other, far, s.event_clocks, subject * c.width)
    return True


@kernel
def exchange(p: Lines, s: State, c: ClockState, i: int) -> bool:
    """Return whether a copy between ranks satisfies the laws.

    What its receive writes is checked before it learns from the send; its place is empty.
    """
    own = p.own[i]
    received = len(p.kind) + i
    other = p.own[received]
    advance(c, own, -1)
    s.position[i] = c.count[own]
    if not use(p, s, c, i, p.source[i]) or s.made[p.place[i]] != NOWHERE:
        return False
    advance(c, other, -1)
    s.position[received] = c.count[other]
    make(s, received, p.place[i], p.owner[i])
    wait_for(c, other, own, s.position[i], c.clocks, own * c.width)
    return True


@kernel
def run(p: Lines, g: Flow, s: State, c: ClockState, i: int, devices: int) -> bool:
    """Return whether a run satisfies the laws.

    It must be the first of its task, and come after all that it reads and its predecessors.
    """
    task = p.subject[i]
    device = p.place[i]
    if s.ran[task] >= 0:
        return False
    for k in range(g.after_at[task], g.after_at[task + 1]):
        before = s.ran[g.after[k]]
        if before < 0 or not is_earlier(p, s, c, before, p.own[i]):
            return False
    for k in range(g.reads_at[task], g.reads_at[task + 1]):
        if not use(p, s, c, i, g.reads[k] * devices + device):
            return False
    for k in range(g.makes_at[task], g.makes_at[task + 1]):
        make(s, i, g.makes[k] * devices + device, p.own[i])
    s.ran[task] = i
    return True


@kernel
def is_earlier(p: Lines, s: State, c: ClockState, before: int, own: int) -> bool:
    """Whether the current instruction of a stream happens after another, or after an input."""
    if before == GIVEN or p.own[before] == own:
        return True
    return includes(c, c.clocks, own * c.width, p.own[before], s.position[before])


@kernel
def use(p: Lines, s: State, c: ClockState, i: int, place: int) -> bool:
    """Return whether what is read is present, and its maker happens before."""
    if s.made[place] == NOWHERE or not is_earlier(p, s, c, s.made[place], p.own[i]):
        return False
    note(s, i, place)
    return True


@kernel
def make(s: State, i: int, place: int, owner: int) -> None:
    """Put a result in an empty place."""
    s.made[place] = i
    s.owner[place] = owner
    s.used[place] = -1
    note(s, i, place)


@kernel
def note(s: State, i: int, place: int) -> None:
    """Add a use of a place."""
    k = s.uses[0]
    s.use[k], s.earlier[k], s.used[place] = i, s.used[place], k
    s.uses[0] = k + 1


@kernel
def free(p: Lines, s: State, c: ClockState, i: int, place: int) -> bool:
    """Return whether a free satisfies the laws.

    The block must be present and not the caller's, and all its uses must happen before.
    """
    if s.made[place] == NOWHERE or s.owner[place] == NOBODY:
        return False
    if s.owner[place] != ANY and s.owner[place] != p.own[i]:
        return False
    k = s.used[place]
    while k >= 0:
        if not is_earlier(p, s, c, s.use[k], p.own[i]):
            return False
        k = s.earlier[k]
    s.made[place] = NOWHERE
    return True
