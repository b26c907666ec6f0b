"""Run any machine in virtual time, one instruction after another.

The calling thread executes the instructions of all streams, and a chooser decides which stream
continues. Every choice respects the program's events, and gives the same modelled times, because
these depend only on which instruction waits for which. So runs explore the legal interleavings of a
program, and each has the simulator's timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autosched.codegen.threads import Yields
from autosched.machine.machine import Machine
from autosched.program.program import Program, Stream
from autosched.runtime.backends import Backend, Step
from autosched.runtime.backends.emulated import Emulated
from autosched.runtime.threads.interleaver import Choose, Interleaver
from autosched.runtime.threads.team import ThreadTeam


class Virtual(Emulated):
    """See ``autosched.runtime.backends``.

    ``choose`` gets the names of the streams that can continue, and returns the one that does:
    ``random.Random(1).choice`` explores. Default: the stream with the earliest modelled clock.
    """

    yields: Yields = "instruction"

    def __init__(self, choose: Choose | None = None) -> None:
        super().__init__()
        self.choose = choose or self._behind
        self.named: dict[str, Stream] = {}
        self.ended = 0.0  # the latest end of an instruction

    def open(self, program: Program, machine: Machine) -> None:
        """Create a clock for each stream."""
        super().open(program, machine)
        self.named = {str(stream): stream for stream in program.streams}

    def team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team that executes the functions of all threads in one, interleaved."""
        return Interleaver(threads, self.choose, self.prepare)

    def slot(self) -> Backend:
        """Return a backend with the same clocks, and with events of its own."""
        return _Slot(self)

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Set all clocks to zero."""
        self.clock.update(dict.fromkeys(self.clock, 0.0))
        self.ended = 0.0
        self.events.clear()

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call a function, and advance the clocks."""

        def step() -> None:
            call()
            end = max(self.begun, *(self.clock[stream] for stream in streams)) + seconds
            self.clock.update(dict.fromkeys(streams, end))
            self.ended = max(self.ended, end)

        return step

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Read the modelled clock."""
        return lambda: max((self.clock[stream] for stream in streams), default=0.0)

    def _behind(self, ready: list[str]) -> str:
        return min(ready, key=lambda name: self.clock[self.named[name]])


class _Slot(Virtual):
    """The machine for one of several runs in flight, in virtual time.

    A run begins when the last run ended that had ended when it was submitted.
    """

    def __init__(self, whole: Virtual) -> None:
        super().__init__(whole.choose)
        self.whole = whole
        self.clock = whole.clock

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Note the time, as far as it has come."""
        self.begun = self.ended = self.whole.ended
        self.events.clear()

    def join(self) -> None:
        """Note the end of the run."""
        self.whole.ended = max(self.whole.ended, self.ended)
