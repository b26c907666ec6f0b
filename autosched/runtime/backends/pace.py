"""Warn when emulation repeatedly takes much longer than modelled."""

from __future__ import annotations

import math
import sys
import warnings

__all__ = ["Pace", "rounded_up"]

_LATE = 2.0  # times as long as modelled; less may be due to delays of the operating system
_RUNS = 3  # in a row: the first run is checked, and one may be late by chance


class Pace:
    """Warns once if a stream worked much longer than modelled in several runs in a row."""

    def __init__(self) -> None:
        self._warned = False
        self._late: list[float] = []

    def judge(self, modelled: float, measured: float) -> None:
        """Note for how many seconds the busiest stream of a run worked."""
        if self._warned or modelled <= 0.0 or measured <= _LATE * modelled:
            self._late.clear()
            return
        self._late.append(measured / modelled)
        if len(self._late) == _RUNS:
            self._warned = True
            message = (
                "this CPU cannot keep up with the emulated machine: the busiest stream in a run is "
                f"predicted to take {modelled * 1e3:.3g} ms and took {measured * 1e3:.3g} ms, so "
                "what is measured says little of the machine; with "
                f"machine.slower({rounded_up(min(self._late))}), or machine.slower('auto'), all "
                "ratios stay and it can (costs that are given as seconds, or by default, stay as "
                "they are: examples= estimates them)"
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
