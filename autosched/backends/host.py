"""Everything at once, in the calling thread, in issue order: streams and events do nothing.

The least there is between a program and its functions; needs no torch. Copies between devices are copies in host
memory, since a program relies on their being apart.
"""

from __future__ import annotations

import copy as copying
import time
from collections.abc import Callable, Sequence
from typing import Any

from autosched.backends import Step, Transfer
from autosched.machine import Machine
from autosched.program import Copy, Program, Stream
from autosched.tree import transform
from autosched.workers import Crew, Team

__all__ = ["Host", "copy_in_host_memory"]


class Host:
    """See ``autosched.backends``."""

    def __init__(self) -> None:
        self.begun = 0.0

    def open(self, program: Program, machine: Machine) -> None:
        """Need nothing."""

    def place(self, device: str) -> Any:
        """Take tensors wherever they are."""
        return None

    def thread(self, stream: Stream) -> str | None:
        """Issue every stream from the calling thread."""
        return None

    def crew(self, threads: Sequence[str]) -> Team:
        """Give each thread a thread."""
        return Crew(threads, self.prepare)

    def prepare(self) -> None:
        """Set up a thread of the crew: need nothing."""

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Need nothing."""
        return None

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call at once."""
        return call

    def transfer(self, copy: Copy) -> Transfer:
        """Copy in host memory."""
        return copy_in_host_memory

    def record(self, stream: Stream, event: int) -> Step | None:
        """Need nothing: what was issued before has happened."""
        return None

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Need nothing."""
        return None

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Leave it to the reference count."""
        return None

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Read the clock."""
        return time.perf_counter

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def join(self) -> None:
        """Need nothing: all is done."""

    def seconds(self, stamp: Any) -> float:
        """Return seconds since ``begin``."""
        return float(stamp - self.begun)

    def close(self) -> None:
        """Need nothing."""


def copy_in_host_memory(source: Any, into: Any) -> Any:
    """Copy a tensor, a tree of tensors, or whatever else a task returned; over ``into`` if that is given."""
    if into is not None:
        into.copy_(source)
        return into
    return transform(_copied, source)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if hasattr(leaf, "data_ptr") else copying.deepcopy(leaf)
