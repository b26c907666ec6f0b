"""Decide which accesses some legal execution reverses, by vector clocks.

Source: Fidge; Mattern, 1988; that a later access stands for those before it: FastTrack, Flanagan and
Freund, 2009. Each stream, the host, and each stream within a captured graph is an *actor*. The clock
of an actor says up to which position of each other its next work surely comes after it:

* Work comes after what was put on its stream before, and after what the host had done or waited
  for when it was issued.
* A record keeps the clock of its stream; a wait joins it, and so does the host that synchronises.
* Work in a replayed graph comes after the stream of the replay, and that after all of the graph.

Two accesses to a common byte, one of them a write, must be ordered by clocks. New memory may be any
that was freed on its stream. So what accesses it must come after all accesses to memory that was
freed there. If the stream itself does not come after one of these, memory was freed too early; if
only what accesses the new memory does not, that comes too early. So no answer depends on what really
ran first, nor on which memory the allocator really gave.

All threads of the host are one actor, in the order in which they issue their work. ``program.clocks``
computes the same relation for programs, whose streams are known from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autosched.sanitizer.findings import Line
from autosched.sanitizer.regions import NOTHING, Region, overlap

HOST = "host"  # the actor
Lines = tuple[Line, ...]
Clock = dict[int, int]  # by actor: a position


@dataclass(eq=False)
class Memory:
    """A block of a GPU's memory, or page-locked memory of the host, from its allocation on."""

    made: str
    lines: Lines
    queue: Any = None  # its owner; None: the host
    key: Any = None  # memory with the same key may be given to each other
    names: tuple[str, ...] = ()
    freed: Lines | None = None
    block: Any = None  # a weak reference

    @property
    def name(self) -> str:
        """What the user calls it, or how it was made."""
        return self.names[0] if self.names else f"the {self.made}"


@dataclass(slots=True)
class Touch:
    """An access: by whom, where in its order, to which bytes."""

    actor: int
    position: int
    queue: Any  # None: the host
    what: str
    lines: Lines
    phase: str  # "", "backward", "replay" or "caller"
    number: int  # in the order of issue
    region: Region = NOTHING
    writes: bool = False


class Open(NamedTuple):
    """Memory that was freed, and accesses that its owner does not come after."""

    memory: Memory
    touches: list[Touch]
    lines: Lines


class Step(NamedTuple):
    """Something that was issued: see the methods of ``Order`` for the kinds and their facts."""

    kind: str
    actor: Any
    facts: tuple[Any, ...]
    lines: Lines
    number: int


@dataclass
class _Known:
    """What is known of memory at a moment."""

    touches: list[Touch] = field(default_factory=list)
    former: Sequence[Open] = ()  # memory that this may be, and that was freed too early
    past: Sequence[Touch] = ()  # the last of each actor to memory that this may be


class Order:
    """The clocks, and the accesses that later ones may conflict with.

    ``raced`` is told of memory and two accesses; ``reused`` of old memory, None if it was not freed
    too early, an access to it, a later access, and the new memory that this is to. Waits and
    synchronisations of the line ``without`` are left out.
    """

    def __init__(
        self,
        raced: Callable[[Memory, Touch, Touch], object],
        reused: Callable[[Open | None, Touch, Touch, Memory], object],
        without: Line | None = None,
    ):
        self.raced, self.reused, self.without = raced, reused, without
        self.actors: dict[Any, int] = {}
        self.clocks: list[Clock] = []
        self.stamps: dict[Any, Clock] = {}  # by mark
        self.known: dict[Memory, _Known] = {}
        self.open: dict[Any, list[Open]] = {}  # by key of memory
        self.past: dict[Any, dict[int, Touch]] = {}  # by key of memory, and actor
        self.graphs: dict[Any, list[Step]] = {}
        self.implied = False  # whether the last wait ordered nothing new
        self.host = self.clock(HOST)

    def clock(self, key: Any) -> Clock:
        """Return the clock of an actor."""
        if key not in self.actors:
            self.actors[key] = len(self.clocks)
            self.clocks.append({})
        return self.clocks[self.actors[key]]

    def issued(self, key: Any) -> Clock:
        """Return the clock of an actor for what the host issues now."""
        clock = self.clock(key)
        join(clock, self.host)
        return clock

    def take(self, step: Step) -> None:
        """Take the next step."""
        getattr(self, step.kind)(step, step.actor, *step.facts)

    # ---- kinds of steps

    def touch(
        self, step: Step, key: Any, queue: Any, what: str, touched: Sequence[Any], phase: str
    ) -> None:
        """Work accesses memory: regions, and whether each is written."""
        clock = self.issued(key)
        actor = self.actors[key]
        position = clock[actor] = clock.get(actor, 0) + 1
        first = Touch(actor, position, queue, what, step.lines, phase, step.number)
        for memory, region, writes in touched:
            touch = replace(first, region=region, writes=writes)
            known = self._check(memory, touch, clock)
            known.touches = [
                other for other in known.touches if not _stands_for(touch, other, clock)
            ]
            known.touches.append(touch)

    def used(self, step: Step, key: Any, queue: Any, memory: Memory, region: Region) -> None:
        """The caller uses memory, after the function."""
        clock = self.issued(key)
        actor = self.actors[key]
        facts = ("the caller, after the function,", (), "caller", step.number, region)
        self._check(memory, Touch(actor, clock.get(actor, 0), queue, *facts), clock)

    def following(self, step: Step, key: Any, queue: Any, memory: Memory) -> None:
        """The caller allocates on a stream, after the function."""
        for pending in [pending for pending in self.open if pending[0] is queue]:
            self.known[memory] = _Known([], self._left(pending, self.issued(key)))
            self.used(step, key, queue, memory, NOTHING)

    def record(self, _: Step, key: Any, mark: Any) -> None:
        """A mark keeps the clock of a stream."""
        self.stamps[mark] = dict(self.issued(key))

    def wait(self, step: Step, key: Any, mark: Any) -> None:
        """A stream waits for a mark."""
        if not step.lines or step.lines[0] != self.without:
            clock, stamp = self.issued(key), self.stamps.get(mark, {})
            self.implied = _includes(clock, stamp)
            join(clock, stamp)

    def synchronize(self, step: Step, _: Any, mark: Any, device: int | None) -> None:
        """The host waits for a mark, or for all streams of a device."""
        if step.lines and step.lines[0] == self.without:
            return
        stamps = [self.stamps.get(mark, {})]
        if device is not None:
            stamps = [
                self.clocks[actor]
                for key, actor in self.actors.items()
                if getattr(key, "device", None) == device
            ]
        self.implied = all(_includes(self.host, stamp) for stamp in stamps)
        for stamp in stamps:
            join(self.host, stamp)

    def allocate(self, _: Step, key: Any, memory: Memory) -> None:
        """New memory may be any that is open."""
        left = self._left(memory.key, self.issued(key))
        past = self.past.get(memory.key, {}).values()
        self.known[memory] = _Known([], left, [t for t in past if not _before(t, self.host)])

    def free(self, step: Step, key: Any, memory: Memory, users: Iterable[Any]) -> None:
        """Memory goes back, behind the streams that ``record_stream`` named."""
        clock = dict(self.issued(key))
        for user in users:
            join(clock, self.clock(user))
        known = self.known.pop(memory, None) or _Known()
        touches = known.touches
        if users:  # their events, which the host has seen, come after what they come after
            touches = [touch for touch in touches if not _before(touch, clock)]
        self.open.setdefault(memory.key, []).append(Open(memory, touches, step.lines))

    def replay(self, step: Step, key: Any, queue: Any, graph: Any) -> None:
        """A graph runs on a stream.

        It does not overlap itself: its lanes go on where the last replay, which they all joined, ended.
        """
        outer = self.issued(key)
        begin = dict(outer)
        lanes = {each.actor: (graph, each.actor) for each in self.graphs.get(graph, ())}
        for lane in lanes.values():
            join(self.clock(lane), begin)
        for each in self.graphs.get(graph, ()):
            facts = each.facts
            if each.kind == "touch":
                facts = (queue, *facts[1:3], "replay")
            where = step.lines[:1] + each.lines if each.kind == "touch" else each.lines
            self.take(Step(each.kind, lanes[each.actor], facts, where, step.number))
        for lane in lanes.values():
            join(outer, self.clock(lane))

    # ---- memory

    def _left(self, key: Any, clock: Clock) -> Sequence[Open]:
        """Return what is open for those with a clock; forget what is not any more."""
        left = [
            old._replace(touches=touches)
            for old in self.open.get(key, ())
            if (touches := [t for t in old.touches if not self._is_past(key, t, clock)])
        ]
        self.open[key] = left
        return tuple(left)

    def _is_past(self, key: Any, touch: Touch, clock: Clock) -> bool:
        """Whether an access to freed memory comes before what its owner does now; note the last of each actor."""
        if not _before(touch, clock):
            return False
        last = self.past.setdefault(key, {})
        if touch.actor not in last or last[touch.actor].position < touch.position:
            last[touch.actor] = touch
        return True

    def _check(self, memory: Memory, touch: Touch, clock: Clock) -> _Known:
        known = self.known.setdefault(memory, _Known())
        for old in known.former:
            for other in old.touches:
                if not _before(other, clock):
                    self.reused(old, other, touch, memory)
        raced = False
        for other in known.touches:
            conflict = (other.writes or touch.writes) and other.actor != touch.actor
            if conflict and not _before(other, clock) and overlap(other.region, touch.region):
                self.raced(memory, other, touch)
                raced = True
        early = [other for other in known.past if not _before(other, clock)]
        if early and not raced:  # else the same order is missing
            self.reused(None, early[0], touch, memory)
        return known


def join(own: Clock, other: Clock) -> None:
    """Come behind all that another has come behind."""
    for actor, position in other.items():
        if own.get(actor, 0) < position:
            own[actor] = position


def _includes(own: Clock, other: Clock) -> bool:
    return all(own.get(actor, 0) >= position for actor, position in other.items())


def _before(touch: Touch, clock: Clock) -> bool:
    """Whether an access surely comes before what has a clock."""
    return clock.get(touch.actor, 0) >= touch.position


def _stands_for(touch: Touch, other: Touch, clock: Clock) -> bool:
    """Whether what conflicts with another access, and comes after it, does so with this one, too."""
    stronger = touch.writes or not other.writes
    return stronger and _before(other, clock) and touch.region.covers(other.region)
