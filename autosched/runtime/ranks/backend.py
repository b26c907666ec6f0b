"""Run one rank's part of a program.

All work is issued by threads, and the calling one waits at a lock: gloo holds Control-C back while
a thread waits in it. One thread issues all that belongs to a compute stream of a CPU, so that a copy
costs no change of threads. A stream that sends on what it receives has a thread of its own: it would
hold up computing.

A copy between accelerators of two ranks goes by way of their hosts, unless NCCL joins them. Lowering
makes three copies of it, and events and waits order these:

    device -> host      on the accelerator's copy stream, into page-locked memory
    host -> host        the send waits on the host for the event of the copy before it
    host -> device      issued when the receive has ended, from page-locked memory

Each stream of a host then has a thread, as have the streams that wait for one, so no wait for another
rank delays what an accelerator can do meanwhile.

Over NCCL, copies are work of the accelerators' copy streams, as copies within a rank are. One thread
issues all streams of accelerators, in the order of the program, as NCCL demands. NCCL does not notice
that a process was killed, so a host that waits for an accelerator looks whether a run has failed: then
what it waits for may never happen, or have no meaning. None of this has run on several GPUs yet.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from autosched._lib.allowed import is_cpu
from autosched._lib.process_group import ProcessGroup
from autosched.codegen.threads import Emitted
from autosched.errors import AutoschedError, MachineError
from autosched.machine.cluster import joined
from autosched.machine.machine import Machine
from autosched.program.program import (
    Copy,
    Program,
    Receive,
    Record,
    Run,
    Send,
    Stream,
    Wait,
)
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.backends.accelerator import Accelerator
from autosched.runtime.backends.threads import Threads
from autosched.runtime.ranks.exchange import Exchange
from autosched.runtime.threads.runs import Fault, Late
from autosched.runtime.threads.runs import Run as TeamRun
from autosched.runtime.threads.team import ThreadTeam

_NAP = 5e-5
_ISSUING = "accelerators"  # a thread


class Ranks(Threads):
    """See ``autosched.runtime.backends``: the CPUs of a rank, and copies over gloo."""

    group: ProcessGroup
    exchanges: Exchange
    part: Program
    threads: dict[Stream, str | None]

    def open(self, program: Program, machine: Machine) -> None:
        """Divide the part of a rank among threads. Raises MachineError outside of a cluster."""
        self.attach(program, machine)
        super().open(program, machine)
        computing = [s for s in program.streams if s.name.startswith("compute")]
        first = str(computing[0]) if computing else f"rank {machine.rank}"
        passing_on = relays(program)
        self.threads = {
            stream: str(stream) if stream in computing or stream in passing_on else first
            for stream in program.streams
        }
        self.exchanges = Exchange(program, machine.ranks, self.threads, self.group, {}, set())

    def attach(self, program: Program, machine: Machine) -> None:
        """Note the part of this rank. Raises MachineError outside of a cluster."""
        if machine.rank is None:
            raise MachineError("the ranks backend needs a machine of Machine.cluster()")
        self.group = joined()
        self.part = program

    def thread(self, stream: Stream) -> str | None:
        """Return the thread that issues a stream."""
        return self.threads[stream]

    def team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team that tells other ranks when it stops."""
        team = _Team(threads, self.prepare, self)
        held = weakref.ref(team)

        def abandon(thread: int, position: int, cause: AutoschedError) -> None:
            if (found := held()) is not None:
                found.abandon(thread, Fault(position, cause))

        self.exchanges.give_up = abandon
        return team

    def exchange(self, half: Send | Receive) -> Transfer:
        """Return the function that starts to send or to receive a value."""
        return self.exchanges.transfer(half)

    def record(self, stream: Stream, event: int) -> Step | None:
        """Do nothing for copies between ranks: it is known which an event stands for."""
        return None if self.exchanges.is_copied(event) else super().record(stream, event)

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Wait for copies between ranks."""
        if self.exchanges.is_copied(event):
            return self.exchanges.wait(stream, event)
        return super().wait(stream, event)

    def free(self, stream: Stream) -> Callable[[Any], None]:
        """Let the sends of a value go with it.

        Before, wait for the copies of the stream: that one of them has ended may show that other
        threads do not use the memory any more. One thread knows by its order.
        """
        is_alone = len({*self.threads.values()}) == 1
        return self.exchanges.freeing(() if is_alone else (stream,))

    def ending(self, thread: str | None) -> Step | None:
        """Return what a thread does at the end of a run: wait for its copies."""
        return self.exchanges.ending([s for s, name in self.threads.items() if name == thread])

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Begin a run."""
        super().begin(stopped)
        self.exchanges.begin()

    def tell(self, fault: Fault | None) -> str:
        """Tell the other ranks that this run has failed here; return what this one waits for."""
        awaited = self.exchanges.awaited
        group = self.group
        me = group.named(group.rank)
        error = sys.exc_info()[1] if fault is None else fault.error
        if fault is None and isinstance(error, KeyboardInterrupt):
            group.fail("rank", f"{me} was interrupted")
        elif fault is None:
            group.fail("rank", f"{me} gave up a run, which was late or closed")
        else:
            at = self.part.instructions[fault.position]
            where = f"instruction {fault.position + 1} of {len(self.part)}"
            what = f"{type(error).__name__}: {error}"
            is_task = isinstance(at, Run) and not isinstance(error, AutoschedError)
            name = f"task {at.task!r} on {at.stream.device} raised" if is_task else f"{at}:"  # type: ignore[union-attr]
            is_error = is_task and isinstance(error, Exception)
            group.fail("task" if is_error else "rank", f"{me}: {name} {what}, {where}")
        return awaited


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
    """A team that tells other ranks when a run stops before its end."""

    def __init__(self, names: Sequence[str | None], prepare: Step, backend: Ranks):
        self._backend = weakref.ref(backend)
        self._awaited = ""
        super().__init__(names, prepare)

    def run(self, emitted: Emitted, deadline: float | None = None) -> Fault | Late | None:
        """Execute functions; where that takes too long, say what this rank waited for."""
        end = super().run(emitted, deadline)
        if not isinstance(end, Late):
            return end
        return Late(end.places, f"\n    this rank waited: {self._awaited}" if self._awaited else "")

    def _new_call(self, emitted: Emitted) -> TeamRun:
        run = super()._new_call(emitted)
        run.tell = self._tell
        return run

    def _tell(self, fault: Fault | None) -> None:
        if not self.closed and (backend := self._backend()) is not None:
            self._awaited = backend.tell(fault)


class AcceleratorRanks(Ranks, Accelerator):
    """See ``autosched.runtime.backends``: the accelerators of a rank, its CPUs, and its copies."""

    direct: bool

    def open(self, program: Program, machine: Machine) -> None:
        """Take streams and threads. Raises MachineError outside of a cluster."""
        self.attach(program, machine)
        own = {name for name, rank in machine.ranks.items() if rank == self.group.rank}
        Accelerator.open(self, program, machine.part(own))
        halves = [half for half in program if isinstance(half, (Send, Receive))]
        self.direct = any(half.stream in self.streams for half in halves)
        self.threads = {stream: self._issuing(stream) for stream in program.streams}
        direct = {s.device: self.devices[s.device] for s in self.streams}
        copies = [i for i in program if isinstance(i, Copy) and i.stream in self.streams]
        onward = {(copy.value, copy.version) for copy in copies}
        parts = machine.ranks, self.threads, self.group, direct, onward
        self.exchanges = Exchange(program, *parts)

    def _issuing(self, stream: Stream) -> str | None:
        if self.direct:
            return _ISSUING if stream in self.streams else str(stream)
        return str(stream) if stream in self.own_thread else None

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Wait for copies between ranks, or for an accelerator."""
        made = self.events[event]
        if not self.direct or made is None or stream in self.streams:
            return super().wait(stream, event)

        def step() -> None:
            self._until(made, f"event {event} of an accelerator")
            self.staging.unstage()

        return step

    def ending(self, thread: str | None) -> Step | None:
        """Return what a thread does at the end of a run: wait for its copies."""
        if not self.direct or thread != _ISSUING:
            return super().ending(thread)
        return partial(self._finish, "its copies between accelerators to end")

    def _finish(self, pending: str) -> None:
        for stream in self.streams.values():
            self._until(stream.record_event(), pending)

    def _until(self, event: Any, pending: str) -> None:
        """Wait until an event has happened. Raises the cause if a run has failed by then."""
        while not event.query() and self.group.why is None:
            time.sleep(_NAP)
        if self.group.why is not None:
            raise self.group.lost(pending)


def backend_of(part: Program) -> Ranks:
    """Return the backend for a rank's part of a program."""
    on_cpus = all(is_cpu(stream.device) for stream in part.streams)
    return Ranks() if on_cpus else AcceleratorRanks()
