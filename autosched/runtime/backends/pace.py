"""Warn when emulation repeatedly takes much longer than its modelled time.

Computes the modelled time of a run, and states how much slower the machine would have to be. Knows
no task, and nothing about the machine.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence

from autosched.program.program import Stream

__all__ = ["Pace", "rounded_up"]

_LATE = 2.0  # times as long as modelled; less may be due to delays of the operating system
_RUNS = 3  # in a row: the first run is checked, and one may be late by chance


class Pace:
    """Modelled clocks of streams, which are independent of real time."""

    def __init__(self) -> None:
        self._clock: dict[Stream, float] = {}
        self._events: dict[int, float] = {}
        self._begun = False
        self._warned = False
        self._late: list[float] = []

    def begin(self) -> None:
        """Set all clocks to zero."""
        self._clock.clear()
        self._events.clear()
        self._begun = True

    def run(self, streams: Sequence[Stream], seconds: float) -> None:
        """Advance the clocks of streams."""
        start = max(self._clock.get(stream, 0.0) for stream in streams)
        self._clock.update(dict.fromkeys(streams, start + seconds))

    def record(self, stream: Stream, event: int) -> None:
        """Store a stream's clock."""
        self._events[event] = self._clock.get(stream, 0.0)

    def wait(self, stream: Stream, event: int) -> None:
        """Advance a stream's clock to an event's."""
        self._clock[stream] = max(self._clock.get(stream, 0.0), self._events.get(event, 0.0))

    def end(self, measured: float) -> None:
        """End a run that took this many seconds.

        Warn once if several runs in a row took much longer than modelled.
        """
        if self._begun:
            self._begun = False
            self.judge("a run", max(self._clock.values(), default=0.0), measured)

    def judge(self, what: str, modelled: float, measured: float) -> None:
        """Note how long something took. Warn once if that was much too long several times."""
        if self._warned or modelled <= 0.0 or measured <= _LATE * modelled:
            self._late.clear()
            return
        self._late.append(measured / modelled)
        if len(self._late) == _RUNS:
            self._warned = True
            message = (
                f"this CPU cannot keep up with the emulated machine: {what} is predicted to take "
                f"{modelled * 1e3:.3g} ms and took {measured * 1e3:.3g} ms, so what is measured "
                f"says little of the machine; with machine.slower({rounded_up(min(self._late))}), "
                "or machine.slower('auto'), all ratios stay and it can (costs that are given as "
                "seconds, or by default, stay as they are: examples= estimates them)"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=_users())


def _users() -> int:
    """Return the number of stack frames up to the nearest one outside this package."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("autosched."):
        frame = frame.f_back
        level += 1
    return level


def rounded_up(factor: float) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, ...

    >>> rounded_up(1.5), rounded_up(61.7), rounded_up(0.1)
    (2, 100, 1)
    """
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, factor))))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= factor)
