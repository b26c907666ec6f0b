"""Run each CPU stream in a thread of its own.

The threads wait for each other only where the program says so. If several compute streams are in
use, they share torch's intra-op threads, so that the cores are not oversubscribed.

The calling thread executes the stream that computes first, instead of waiting: a thread that is
woken begins later, and on a core that has slept. No mode of torch that the calling thread is in,
such as autocast, applies to its tasks, as none does in the other threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autosched._lib.allowed import is_storage
from autosched.errors import MachineError
from autosched.machine.machine import Machine
from autosched.program.program import Program, Run, Stream
from autosched.runtime.backends.host import Host
from autosched.runtime.threads.runs import Run as TeamRun
from autosched.runtime.threads.team import ThreadTeam


class Threads(Host):
    """See ``autosched.runtime.backends``."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_threads = torch.get_num_threads()
        self.shared = False
        self.first: Stream | None = None  # the stream that computes first

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
        runs = (item for item in program if isinstance(item, Run))
        self.first = next((run.stream for run in runs if run.stream in computing), None)

    def thread(self, stream: Stream) -> str | None:
        """Return a separate thread for each stream but the first one."""
        return str(stream) if self.shared and stream != self.first else None

    def team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team of these threads."""
        if not threads:
            return super().team(threads)
        team = _Team(threads, self.prepare)
        team.intra_op_threads = self.intra_op_threads
        return team

    def prepare(self) -> None:
        """Set this thread's number of intra-op threads, and disable autograd."""
        super().prepare()
        if self.shared:
            torch.set_num_threads(self.intra_op_threads)


class _Team(ThreadTeam):
    """A team in whose runs the calling thread has its share of the intra-op threads, too."""

    intra_op_threads = 1  # of each thread

    def _begin(self, workers: Iterable[Any]) -> None:
        """Start threads; torch applies to this one each number that another thread sets."""
        before = torch.get_num_threads()
        super()._begin(workers)
        torch.set_num_threads(before)

    def suits(self) -> bool:
        """Whether the calling thread can leave the modes that it is in."""
        functions, operators = (
            torch._C._len_torch_function_stack,
            torch._C._len_torch_dispatch_stack,
        )
        return functions() == operators() == 0

    def execute(self, run: TeamRun) -> None:
        """Execute the calling thread's part with its share of the intra-op threads."""
        before = torch.get_num_threads()
        with contextlib.ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            if torch._C._is_any_autocast_enabled():
                modes.enter_context(torch._C._DisableAutocast())
            try:
                torch.set_num_threads(self.intra_op_threads)
                super().execute(run)
            finally:
                torch.set_num_threads(before)
