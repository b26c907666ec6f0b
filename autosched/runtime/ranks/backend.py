"""Run one rank's part of a program: on CPUs, with copies between ranks over gloo.

All work is issued by threads, and the calling one waits at a lock: gloo holds Control-C back while
a thread waits in it. One thread issues all that belongs to a compute stream, so that a copy costs no
change of threads. A stream that sends on what it receives has a thread of its own: it would hold up
computing.

Each of several runs in flight has copies with tags and memory of its own. Who waits for copies of a
stream waits for those of the run before, too, so a stream keeps its order from run to run. All runs
use one wire, and fail together if that is lost.
"""

from __future__ import annotations

import copy as copying
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from autosched.errors import AutoschedError, MachineError
from autosched.machine.machine import Machine
from autosched.program.program import Program, Receive, Record, Run, Send, Stream, Wait
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.threads import Threads
from autosched.runtime.ranks.exchange import Exchange
from autosched.runtime.ranks.session import Session, session
from autosched.runtime.ranks.wire import Wire
from autosched.runtime.threads.loop_runs import LoopTeam
from autosched.runtime.threads.tapes import Fault, Late, Place, Tape, Team
from autosched.runtime.threads.thread_team import ThreadTeam

__all__ = ["Ranks", "relays"]


class _Shared:
    """What the slots of a backend share: the wire of the last run, and their exchanges.

    ``runs`` returns what waits until all runs of the program have ended, while there is any.
    """

    def __init__(self) -> None:
        self.wire: Wire | None = None
        self.exchanges: list[Exchange] = []
        self.runs: Callable[[], Callable[[float | None], None] | None] = lambda: None

    def wait(self, deadline: float | None) -> None:
        """Wait until all runs of the program have ended."""
        if (wait := self.runs()) is not None:
            wait(deadline)


class Ranks(Threads):
    """See ``autosched.runtime.backends``."""

    is_slot = False

    session: Session
    exchanges: Exchange
    part: Program
    threads: dict[Stream, str | None]

    def __init__(self, whole: Program | None = None):
        super().__init__()
        self._pending = ""  # the copies that the last late run waited for
        # Those of a run that was interrupted before its first step are hardly another program's.
        self.first_tag = zlib.crc32(str(whole).encode()) >> 2
        self.tags = 0 if whole is None else len(whole)  # that each slot may use
        # Waits for copies reach back one run more than they say.
        self.reach = 1 + max((i.ago for i in whole or () if isinstance(i, Wait)), default=0)
        self._shared = _Shared()

    def open(self, program: Program, machine: Machine) -> None:
        """Divide the part of a rank among threads. Raises MachineError outside of a cluster."""
        self.attach(program, machine)
        super().open(program, machine)
        self.new_lock = threading.Lock  # other ranks may use the same cores
        computing = [s for s in program.streams if s.name.startswith("compute")]
        first = str(computing[0]) if computing else f"rank {machine.rank}"
        passing_on = relays(program)
        self.threads = {
            stream: str(stream) if stream in computing or stream in passing_on else first
            for stream in program.streams
        }
        self.ranks = machine.ranks
        self.exchanges = self._exchange()

    def _exchange(self) -> Exchange:
        """Return the copies of one of the runs in flight."""
        made = self._shared.exchanges
        tag = self.first_tag + len(made) * self.tags
        made.append(Exchange(self.part, self.ranks, self.threads, self.session, tag))
        return made[-1]

    def slot(self) -> Ranks:
        """Return a backend for one of several runs in flight, which uses the wire of the others."""
        made = copying.copy(self)
        made.exchanges = self._exchange()
        made.is_slot = True
        return made

    def attach(self, program: Program, machine: Machine) -> None:
        """Note the part of this rank. Raises MachineError outside of a cluster."""
        if machine.rank is None:
            raise MachineError("the ranks backend needs a machine of Machine.cluster()")
        self.session = session()
        self.part = program

    def thread(self, stream: Stream) -> str | None:
        """Return the thread that issues a stream."""
        return self.threads[stream]

    def team(self, threads: Sequence[str]) -> Team:
        """Return a team that tells other ranks when it stops."""
        team = _Team(threads, self.prepare, self.tell, self._elsewhere)
        self.exchanges.give_up = _abandoning(team)
        self.exchanges.where = _working(team, self.part)
        return team

    def loop_team(self, threads: Sequence[str | None]) -> LoopTeam:
        """Return a team that gives up threads which wait for a lost wire."""
        team = super().loop_team(threads)
        first, *others = self._shared.exchanges[1:]
        first.where = _working(team, self.part)
        for exchange in (first, *others):
            exchange.give_up = _abandoning(team)
        return team

    def exchange(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value."""
        return self.exchanges.transfer(half)

    def record(self, stream: Stream, event: int) -> Step | None:
        """Do nothing for copies between ranks: it is known which an event stands for."""
        on_wire = event in self.exchanges.events
        return None if on_wire else super().record(stream, event)

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Wait for copies between ranks."""
        on_wire = event in self.exchanges.events
        if not on_wire:
            return super().wait(stream, event)
        slots = self._shared.exchanges[1:]
        before = slots[slots.index(self.exchanges) - 1] if self.is_slot else None
        return self.exchanges.wait(stream, event, before)

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Wait for the copies of a stream before memory is freed there.

        One of them may show that memory is not used any more. Where one thread issues everything,
        its order shows that, too.
        """
        if len({*self.threads.values()}) == 1:
            return None
        finish = self.exchanges.freeing(stream)
        return None if finish is None else lambda _: finish()

    def ending(self, thread: str | None) -> Step | None:
        """Return what a thread does at the end of a run: wait for its copies."""
        own = [stream for stream, name in self.threads.items() if name == thread]
        return self.exchanges.ending(own)

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Begin a run, together with the other ranks if it is the first one."""
        super().begin(stopped)
        self.session.take_turn(self._shared, None)
        self._shared.wire = self.exchanges.begin(self._shared.wire if self.is_slot else None)

    def take_turn(self, wait: Callable[[float | None], None], deadline: float | None) -> None:
        """Wait until the runs of other programs have ended."""
        self._shared.runs = weakref.WeakMethod(wait)
        self.session.take_turn(self._shared, deadline)

    @property
    def is_connected(self) -> bool:
        """Whether the wire of the last run is there."""
        wire = self.session.current
        return wire is not None and wire is self._shared.wire

    def tell(self, fault: Fault | None) -> None:
        """Tell the other ranks that this run has failed here, unless they told us."""
        me = self.session.named(self.session.rank)
        if fault is None:
            error: Any = sys.exc_info()[1]
            if isinstance(error, KeyboardInterrupt):
                self.session.give_up("rank", f"{me} was interrupted")
            else:
                self._pending = " and ".join(end.name for end in self.exchanges.awaited())
                self.session.give_up("late", f"{me} gave up a run")
        elif fault.error is not self.session.told:
            self.session.give_up(*self._why(me, fault))

    def _elsewhere(self) -> str:
        """Return lines about a late run: what ranks executed, and what this one waited for."""
        found = self.session.places()
        if self._pending:
            found += f"\n    rank {self.session.rank} waited: {self._pending}"
        return found

    def _why(self, me: str, fault: Fault) -> tuple[str, str]:
        """Return the kind of a failure, and what other ranks are told."""
        at = self.part.instructions[fault.position]
        error = fault.error
        what = f"{type(error).__name__}: {error}"
        where = f"instruction {fault.position + 1} of {len(self.part)}"
        is_task = isinstance(at, Run) and isinstance(error, Exception)
        if isinstance(at, Run):
            what = f"{me}: task {at.task!r} on {at.stream.device} raised {what}, {where}"
        else:
            what = f"{me}: {at} failed with {what}, {where}"
        return "task" if is_task and not isinstance(error, AutoschedError) else "rank", what


def _abandoning(team: Any) -> Callable[[int, int, AutoschedError], None]:
    """Return what gives up a thread of a team, at a position, for a cause."""
    held = weakref.ref(team)

    def abandon(thread: int, position: int, cause: AutoschedError) -> None:
        found = held()
        if found is not None:
            found.abandon(thread, Fault(position, cause))

    return abandon


def _working(team: Any, part: Program) -> Callable[[], str]:
    """Return what names the tasks that the threads of a team execute."""
    held = weakref.ref(team)

    def where() -> str:
        found = held()
        executed = []
        for position, how in () if found is None else found.working():
            at = part.instructions[position]
            if how == "in" and isinstance(at, Run):
                where = f"instruction {position + 1} of {len(part)}"
                executed.append(f"task {at.task!r} on {at.stream.device}, {where}")
        return " and ".join(executed)

    return where


def relays(part: Program) -> set[Stream]:
    """Return the streams of copies that wait for others, and would hold up what comes later."""
    on_wire = {half.stream for half in part if isinstance(half, (Send, Receive))}
    events = {i.event for i in part if isinstance(i, Record) and i.stream in on_wire}
    working = [at for at, i in enumerate(part) if isinstance(i, (Run, Send, Receive))]
    return {
        i.stream
        for i in part.instructions[: max(working, default=0)]
        if isinstance(i, Wait) and i.stream in on_wire and i.event in events
    }


class _Team(ThreadTeam):
    """A team that calls ``give_up`` when a run stops before its end.

    ``elsewhere`` returns lines about all ranks, for a run that is late.
    """

    def __init__(
        self,
        names: Sequence[str],
        prepare: Step,
        give_up: Callable[[Fault | None], None],
        elsewhere: Callable[[], str],
    ):
        self._give_up = give_up
        self._elsewhere = elsewhere
        super().__init__(names, prepare)

    def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
        """Execute a tape; ask the other ranks what they do if that takes too long."""
        end = super().run(tape, deadline)
        return Late(end.places, self._elsewhere()) if isinstance(end, Late) else end

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run, and tell the other ranks."""
        is_first = bool(self._tape.steps) and not self.stopped
        super().stop(fault)
        if is_first and not self.closed:
            self._give_up(fault)

    def working(self) -> list[Place]:
        """Return where its threads are."""
        return [place for place in self._places().values() if place is not None]
