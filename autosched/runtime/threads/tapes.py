"""Lists of steps by thread, and the protocol of a thread team.

A tape is the list of steps that one thread executes in a run. A step is a function without
arguments with a position in the program, which names the instruction if the step fails. Also
defines how a run ends. Knows no program and no device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

__all__ = ["Call", "Fault", "Late", "Place", "Step", "Stretch", "Tape", "Team", "lock_awaited"]

Step = Callable[[], Any]


class Fault(NamedTuple):
    """The step (its position) that raised, and the exception."""

    position: int
    error: BaseException


class Place(NamedTuple):
    """The position of a thread: it is in this step, waiting there for another thread, or before it.

    Position -1 is before the first step; a thread that has ended has no place.
    """

    position: int
    how: Literal["in", "waiting", "before"] = "in"


class Late(NamedTuple):
    """A run that has not ended in time: the place of each thread, None if it has ended.

    ``elsewhere`` are lines about other processes.
    """

    places: Mapping[str | None, Place | None]
    elsewhere: str = ""


# Position, function, and slots: of the result, of one or two arguments (-1: no second), and of the
# value that is dropped afterwards.
Call = tuple[int, Callable[..., Any], int, int, int, int]


@dataclass(eq=False)
class Stretch:
    """Consecutive calls, on slots of ``data``, as one step.

    A small task costs less as a tuple here than as a function of its own, because it needs fewer
    memory accesses.

    >>> data = [None, 2, 3, None, None]
    >>> Stretch(data, [(7, pow, 3, 1, 2, 1), (8, str, 4, 3, -1, 0)])()
    >>> data
    [None, None, 3, 8, '8']
    """

    data: list[Any]
    calls: list[Call]

    def __call__(self) -> None:
        """Execute them all."""
        data = self.data
        for _, fn, target, first, second, dropped in self.calls:
            data[target] = fn(data[first]) if second < 0 else fn(data[first], data[second])
            data[dropped] = None


@dataclass
class Tape:
    """Steps by thread (None is the calling one), and the locks between threads.

    Each lock is released once and acquired once in a run, so all are ready for the next.
    """

    steps: dict[str | None, list[tuple[int, Step]]] = field(default_factory=dict)
    locks: list[threading.Lock] = field(default_factory=list)
    quick: bool = False  # whether no step takes long, because steps only issue work to devices
    runs: int = 0
    straight: Step | None = None  # all steps as one

    def lock(self) -> threading.Lock:
        """Create a lock: its ``release`` and ``acquire`` are steps."""
        lock = threading.Lock()
        lock.acquire()
        self.locks.append(lock)
        return lock

    def add(self, thread: str | None, position: int, *steps: Step | None) -> None:
        """Add steps to a thread; None is no step. Adjacent stretches are combined."""
        line = self.steps.setdefault(thread, [])
        for step in steps:
            last = line[-1][1] if line else None
            if isinstance(step, Stretch):
                if isinstance(last, Stretch) and last.data is step.data:
                    last.calls.extend(step.calls)
                else:
                    line.append((position, Stretch(step.data, step.calls.copy())))
            elif step is not None:
                line.append((position, step))


class Team(Protocol):
    """Executes tapes. Deadlines are moments of ``time.perf_counter``."""

    @property
    def stopped(self) -> bool:
        """Whether the run was aborted."""

    @property
    def threads(self) -> frozenset[int]:
        """The identities of its own threads."""

    def settle(self, deadline: float | None = None) -> Late | None:
        """Wait for threads that an earlier run abandoned, then be ready.

        To be called before each run.
        """

    def run(self, tape: Tape, deadline: float | None = None) -> Fault | Late | None:
        """Execute a tape; return the first fault, if any, or all places when it was late."""

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread is working: now (True), or in the thread that returns last."""

    def close(self) -> None:
        """End all threads."""


def lock_awaited(step: Any) -> bool:
    """Whether a step waits for a lock that another thread has yet to release."""
    lock: Any = getattr(step, "__self__", None)
    return hasattr(lock, "locked") and step == lock.acquire and lock.locked()
