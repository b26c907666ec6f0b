"""Run each CPU stream in a thread of its own.

The threads wait for each other only where the program says so. If several compute streams are in
use, they share torch's intra-op threads, so that the cores are not oversubscribed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from autosched._lib.allowed import is_storage
from autosched.errors import MachineError
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends.host import Host
from autosched.runtime.threads.loop_runs import LoopTeam
from autosched.runtime.threads.tapes import Team

__all__ = ["Threads"]

_Made = TypeVar("_Made")


class Threads(Host):
    """See ``autosched.runtime.backends``."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_threads = torch.get_num_threads()
        self.shared = False

    def open(self, program: Program, machine: Machine) -> None:
        """Divide the intra-op threads. Raises MachineError for devices that are not CPUs."""
        for stream in program.streams:
            if machine.device(stream.device).is_accelerator:
                raise MachineError(
                    f"the threads backend runs CPU streams, and {stream.device!r} is no CPU; "
                    "backend='emulated' can emulate it"
                )
        computing = [stream for stream in program.streams if stream.name.startswith("compute")]
        self.intra_op_threads = max(1, torch.get_num_threads() // max(1, len(computing)))
        self.shared = len(computing) > 1 or any(is_storage(s.device) for s in program.streams)

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for each stream, unless there is only one stream."""
        return str(stream) if self.shared else None

    def team(self, threads: Sequence[str]) -> Team:
        """Return a team of these threads."""
        return _restoring(lambda: super(Threads, self).team(threads))

    def loop_team(self, threads: Sequence[str | None]) -> LoopTeam:
        """Return a team with these threads."""
        return _restoring(lambda: super(Threads, self).loop_team(threads))

    def prepare(self) -> None:
        """Set this thread's number of intra-op threads, and disable autograd."""
        super().prepare()
        if self.shared:
            torch.set_num_threads(self.intra_op_threads)


def _restoring(make: Callable[[], _Made]) -> _Made:
    """Return what a function makes, and restore the calling thread's number of intra-op threads.

    Torch applies to it each number that another thread sets.
    """
    before = torch.get_num_threads()
    made = make()
    torch.set_num_threads(before)
    return made
