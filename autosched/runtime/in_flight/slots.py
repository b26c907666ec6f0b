"""Slots: the memory, the events and the compiled steps of one of several runs in flight.

Runs use the slots in turn. A wait for an event of an earlier run waits for the event of an earlier
slot. Where different threads issue record and wait, a lock between the slots makes sure that the
record comes first, as within a run.

There are as many slots as runs in flight, and as many more as the longest wait reaches back. With
fewer, a run could record an event again, and release its lock again, before the run that waits for
the last record has come to its wait. That run has ended when the slot is used again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from autosched._lib.adaptive_lock import Lock
from autosched.program.program import Record, Wait
from autosched.runtime.backends import Backend, Capabilities, Looping
from autosched.runtime.compiler import Carried, Compiler
from autosched.runtime.memory import Memory
from autosched.runtime.threads.loop_runs import unlock
from autosched.runtime.threads.tapes import Step, Tape

__all__ = ["Slot", "Slots"]


class Slots:
    """The slots of a loop."""

    def __init__(self, compiler: Compiler, looping: Looping):
        program = compiler.program
        waits = [i for i in program if isinstance(i, Wait) and i.ago]
        # Streams may order accesses to memory that all runs share, without waits.
        self.carries = bool(waits) or any(
            compiler.graph.last_version(value.index) for value in compiler.graph.sources
        )
        reach = max((wait.ago for wait in waits), default=0)
        if compiler.can.connected is not None:  # others take turns with as many
            reach = compiler.can.connected.reach
        count = program.in_flight + reach
        self.all = [Slot(compiler, looping.slot(), n, self) for n in range(count)]
        self._waits = _locked(compiler)
        # Waits for earlier runs may be long, so threads sleep.
        self._locks = [{at: threading.Lock() for at in self._waits} for _ in self.all]
        self.reset()

    def reset(self) -> None:
        """Begin with slot 0, as if earlier runs had recorded all events."""
        for slot, locks in enumerate(self._locks):
            for at, lock in locks.items():
                lock.acquire(blocking=False)
                if slot < self._waits[at].ago:
                    lock.release()

    def awaited(self, slot: int) -> dict[int, threading.Lock]:
        """Return the locks that a slot's waits for earlier runs acquire, by position."""
        return self._locks[slot]

    def passed(self, slot: int) -> dict[int, list[Step]]:
        """Return the steps that let later runs go on after a slot's records, by event."""
        steps: dict[int, list[Step]] = {}
        for at, wait in self._waits.items():
            lock = self._locks[(slot + wait.ago) % len(self.all)][at]
            steps.setdefault(wait.event, []).append(partial(unlock, lock))
        return steps

    def earlier(self, slot: int, ago: int) -> Backend:
        """Return the backend of the run that many before that in a slot."""
        return self.all[(slot - ago) % len(self.all)].backend


class Slot:
    """What belongs to one run in flight. Compiled at its first run."""

    def __init__(self, compiler: Compiler, backend: Backend, number: int, slots: Slots):
        self.backend = backend
        self.number = number
        self._parent = compiler
        self._slots = slots

    @cached_property
    def _compiler(self) -> Compiler:
        return self._parent.over(self.backend)

    @property
    def is_asynchronous(self) -> bool:
        """Whether devices may work on when all steps of a run have been called."""
        return self._compiler.can.bracketed is not None

    def handing_out(self, outputs: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return what prepares outputs for the thread that asks for them, if that is needed."""
        hands_out = self._compiler.can.hands_out
        return None if hands_out is None else partial(hands_out.hand_out, outputs)

    @property
    def memory(self) -> Memory:
        """The tensors of the run."""
        return self._compiler.memory

    @cached_property
    def tape(self) -> Tape:
        """The steps of the run."""
        slots = self._slots
        number = self.number
        carried = Carried(
            slots.awaited(number), slots.passed(number), partial(slots.earlier, number)
        )
        return self._compiler.tape(carried=carried)

    @cached_property
    def locks(self) -> Sequence[Lock]:
        """The locks that threads wait for during the run."""
        return [*self.tape.locks, *self._slots.awaited(self.number).values()]

    @cached_property
    def _spoil(self) -> Callable[[Any], None] | None:
        """What the backend does to freed memory."""
        streams = self._parent.program.streams
        can = self._compiler.can
        return can.free(streams[0]) if streams and can.connected is None else None

    def clear(self, stopped: bool) -> None:
        """Release the memory of a run that has ended, and lock all locks between its threads."""
        if self._spoil is not None:
            self.memory.spoil(self._spoil)
        self.memory.clear()
        if stopped:
            for lock in self.tape.locks:
                lock.acquire(blocking=False)


def _locked(compiler: Compiler) -> dict[int, Wait]:
    """Return the waits for earlier runs, by position, that other threads issue than the records.

    One for each thread and event.
    """
    can = Capabilities(compiler.backend)
    program = compiler.program
    recorder = {i.event: can.thread(i.stream) for i in program if isinstance(i, Record)}
    found: dict[tuple[int, int, str | None], tuple[int, Wait]] = {}
    for at, instruction in enumerate(program):
        if isinstance(instruction, Wait) and instruction.ago and instruction.event in recorder:
            thread = can.thread(instruction.stream)
            if recorder[instruction.event] != thread:
                key = instruction.event, instruction.ago, thread
                found.setdefault(key, (at, instruction))
    return dict(found.values())
