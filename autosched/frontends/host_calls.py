"""Warn about calls that a graph does not repeat: files, print. Refuse clocks.

Such a call is executed once, when the step is captured, and its user is warned. Python reports all
calls to a profile function (``sys.setprofile``), so nothing is replaced. That takes time, and is
done only for code that names such a function. Does not know ``datetime``, nor functions that write
to files that are already open. A profiler of the user takes precedence. Knows no graph.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from autosched.errors import CaptureError
from autosched.frontends.reachability import Reach, is_installed

_CLOCKS = "time perf_counter monotonic process_time"
_FUNCTIONS = frozenset(
    (
        *(print, input, open, io.open, time.sleep),
        *(getattr(time, f"{name}{ending}") for name in _CLOCKS.split() for ending in ("", "_ns")),
        *(os.urandom, os.write, os.system),
        getattr(random, "_urandom", os.urandom),  # of SystemRandom, and of secrets
    )
)
_LOGGED = logging.Logger.handle.__code__
# Code that calls one of these functions, directly or by the standard library, has one of these names.
_NAMES = frozenset(
    (
        *(fn.__name__ for fn in _FUNCTIONS),
        *"SystemRandom secrets uuid1 uuid4 logging getLogger".split(),
        *"read_text read_bytes write_text write_bytes".split(),  # of paths
    )
)
_READ = frozenset((*(f"time.{name}" for name in dir(time) if name != "sleep"), "posix.urandom"))
_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows each line once


class Call(NamedTuple):
    """A call of a Python function by a line of the user."""

    name: str
    file: str
    line: int


@contextlib.contextmanager
def observing_calls(reach: Reach) -> Iterator[list[Call]]:
    """Collect calls by the user's code, which is that of ``reach``, in this thread.

    Raises CaptureError for what would be another value in the next call.
    """
    found: list[Call] = []
    if sys.getprofile() is not None or not _may_call(reach):
        yield found
        return

    def profile(frame: FrameType, event: str, fn: Any) -> None:
        if event == "c_call" and fn in _FUNCTIONS:
            known = fn.__module__ in ("builtins", "io", "_io")
            name = fn.__name__ if known else f"{fn.__module__}.{fn.__qualname__}"
        elif event == "call" and frame.f_code is _LOGGED:
            name = "logging.Logger.handle"
        else:
            return
        if (line := _users_line(frame)) is not None:
            found.append(Call(name, *line))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
    warned = {call[1:] for call in found if call.name not in _READ}  # logging reads the time
    for call in found:
        if call[1:] not in warned:
            raise CaptureError(
                f"{call.name} is called at {call.file}:{call.line}, and a graph would contain what "
                "it returns now; call it outside of the step, and pass its result as a tensor"
            )


def _may_call(reach: Reach) -> bool:
    """Whether code has such a function, or its name."""
    named = {name for _, name in reach.entries} | reach.mentioned
    return not _NAMES.isdisjoint(named) or any(
        isinstance(item, logging.Logger) or (isinstance(item, type(print)) and item in _FUNCTIONS)
        for item in reach.found()
    )


def _users_line(frame: FrameType) -> tuple[str, int] | None:
    """Return the line of the caller, through the standard library only."""
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
