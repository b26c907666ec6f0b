"""Detect deadlocks of schedules that call each other.

A run waits for its tasks. A task that calls a schedule waits for that call, and the call waits for
the run of that schedule that is in progress. If these waits form a cycle, none of them ends. Knows
no program: a schedule is identified by a name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

from autosched._lib.forks import in_child
from autosched.errors import ScheduleError

__all__ = ["CALLS", "Called", "Calls"]


class Called(Protocol):
    """A schedule, which runs tasks in the calling thread and in threads of its own."""

    @property
    def name(self) -> str:
        """The name for error messages."""

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""

    def is_run_by(self, thread: int) -> bool:
        """Whether a run of it is in progress that this thread called."""


class Calls:
    """The calls in progress or waiting to begin, by the thread that made them, innermost last."""

    def __init__(self) -> None:
        self._forget()
        in_child(self._forget)

    def _forget(self) -> None:
        self._guard = threading.Lock()
        self._stacks: dict[int, list[Called]] = {}

    def enter(self, called: Called) -> None:
        """Register a call in this thread.

        Raises ScheduleError if it would wait for itself to end.
        """
        me = threading.get_ident()
        with self._guard:
            # An interrupt may have prevented the removal of a call: keep only those in progress.
            stack = [item for item in self._stacks.get(me, ()) if item.is_run_by(me)]
            if self._stacks:
                self._check(called, me, stack)
            self._stacks[me] = [*stack, called]

    def leave(self, called: Called) -> None:
        """Remove a call of this thread that has ended."""
        me = threading.get_ident()
        with self._guard:
            stack = self._stacks.pop(me, [])
            if called in stack and stack[0] is not called:
                self._stacks[me] = stack[: stack.index(called)]

    def _check(self, called: Called, me: int, stack: list[Called]) -> None:
        if stack[-1:] == [called] or (not stack and me in called.threads):
            raise ScheduleError(
                "a task calls the schedule that it is part of, and would wait for itself"
            )
        in_stack = called in stack
        path = stack[stack.index(called) :] if in_stack else self._path(me, stack, [called])
        if path is not None:
            first, *_, last = names = [repr(item.name) for item in path]
            calls = [f"a task of {a} calls {b}" for a, b in pairwise(names)]
            raise ScheduleError(
                f"a task of schedule {last} calls schedule {first}, and {', and '.join(calls)}: "
                "each would wait for the other for ever; call one of them after the other has ended"
            )

    def _path(self, me: int, stack: list[Called], path: list[Called]) -> list[Called] | None:
        """Return a chain of waits from the path's end to a run of this thread, None if none."""
        for other in self._waited_for(path[-1]):
            if (other is stack[-1]) if stack else (me in other.threads):
                return [*path, other]
            if other not in path:
                found = self._path(me, stack, [*path, other])
                if found is not None:
                    return found
        return None

    def _waited_for(self, called: Called) -> Iterator[Called]:
        """Yield the schedules that are called by tasks of a run in progress."""
        for thread, stack in self._stacks.items():
            if thread in called.threads:
                yield stack[0]
            elif called in stack[:-1] and called.is_run_by(thread):
                yield stack[stack.index(called) + 1]


CALLS = Calls()
