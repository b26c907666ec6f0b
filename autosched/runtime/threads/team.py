"""How a run of emitted functions ends, and the protocol of a team of threads that executes them.

Knows no program and no device: positions name instructions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from autosched.codegen.threads import Emitted

__all__ = ["Fault", "Late", "Place", "Step", "Stoppable", "Team", "execute", "place_of"]

Step = Callable[[], Any]


class Fault(NamedTuple):
    """The instruction (its position) that raised, and the exception."""

    position: int
    error: BaseException


class Place(NamedTuple):
    """The position of a thread: it is in this instruction, waiting there for another, or before it.

    Position -1 is before the first one; a thread that has ended has no place.
    """

    position: int
    how: Literal["in", "waiting", "before"] = "in"


class Late(NamedTuple):
    """A run that has not ended in time: the place of each thread, None if it has ended.

    ``elsewhere`` are lines about other processes.
    """

    places: Mapping[str | None, Place | None]
    elsewhere: str = ""


class Stoppable(Protocol):
    """A run of emitted functions."""

    aborted: list[bool]  # has an item when the run was aborted

    def stop(self, fault: Fault | None = None) -> None:
        """Abort the run."""


class Team(Protocol):
    """Executes emitted functions. Deadlines are moments of ``time.perf_counter``."""

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

    def run(self, emitted: Emitted, deadline: float | None = None) -> Fault | Late | None:
        """Execute functions; return the first fault, if any, or all places when it was late."""

    def afterwards(self, step: Step) -> bool:
        """Call a step when no thread is working: now (True), or in the thread that returns last."""

    def close(self) -> None:
        """End all threads."""


def execute(run: Stoppable, emitted: Emitted, name: str | None) -> None:
    """Execute a thread's function in this thread, until it raises or the run is aborted."""
    function = emitted.threads.get(name)
    if function is None:
        return
    try:
        function(run.aborted)
    except BaseException as error:
        run.stop(Fault(emitted.fault(error), error))


def place_of(thread: threading.Thread, emitted: Emitted) -> Place:
    """Return where a thread is in the functions of a run that it has not left."""
    frame = sys._current_frames().get(thread.ident or 0)
    line = emitted.place(frame)
    return Place(-1, "before") if line is None else Place(line.position, line.how)
