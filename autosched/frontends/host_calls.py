"""Warn about calls that a graph does not repeat: time, files, print.

Such a call is executed once, when the step is captured, and its user is warned. Knows functions in
common use, by the names of their modules. It does not know ``datetime``, nor functions that write
to files that are already open. Knows no graph.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from autosched._lib.replacing import replaced
from autosched.frontends.capture_lock import is_capturing
from autosched.frontends.reachability import is_installed

__all__ = ["Call", "observing_calls", "warn_of_calls"]

_CLOCKS = "time perf_counter monotonic process_time"
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((builtins, name) for name in ("print", "input", "open")),
    (io, "open"),
    *((time, f"{name}{ending}") for name in _CLOCKS.split() for ending in ("", "_ns")),
    (time, "sleep"),
    *((os, name) for name in ("urandom", "write", "system")),
    # Of SystemRandom, and of secrets.
    *((random, name) for name in ("_urandom",) if hasattr(random, name)),
    (logging.Logger, "handle"),
)
_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows each line once


class Call(NamedTuple):
    """A call of a Python function by a line of the user."""

    name: str
    file: str
    line: int


@contextlib.contextmanager
def observing_calls() -> Iterator[list[Call]]:
    """Collect calls by the user's code in this capture."""
    found: list[Call] = []
    with replaced(
        *((home, name, _observed(getattr(home, name), found)) for home, name in _FUNCTIONS)
    ):
        yield found


def _observed(fn: Callable[..., Any], found: list[Call]) -> Callable[..., Any]:
    is_builtin = fn.__module__ in ("builtins", "_io", "io")
    name = fn.__qualname__ if is_builtin else f"{fn.__module__}.{fn.__qualname__}"

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_capturing() and (line := _users_line()) is not None:
            found.append(Call(name, *line))
        return fn(*args, **kwargs)

    return call


def _users_line() -> tuple[str, int] | None:
    """Return the line of the caller, through the standard library only."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    if is_installed(frame.f_globals.get("__name__")):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def warn_of_calls(calls: Iterable[Call], step: str) -> None:
    """Warn of each line that makes such a call."""
    for (file, line), name in {(call.file, call.line): call.name for call in calls}.items():
        warnings.warn_explicit(
            f"{name} is called when {step!r} is captured, and not when its graph runs; call it "
            "outside of the step, and pass its result as a tensor",
            RuntimeWarning,
            file,
            line,
            registry=_WARNED,
        )
