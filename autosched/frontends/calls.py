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

from autosched.frontends.exclusive import is_capturing
from autosched.frontends.reach import is_installed

__all__ = ["Call", "calls_noted", "warn_of"]

_TIMES = "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns sleep"
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((builtins, name) for name in ("print", "input", "open")),
    (io, "open"),
    *((time, name) for name in _TIMES.split()),
    *((os, name) for name in ("urandom", "write", "system")),
    *(
        (random, name) for name in ("_urandom",) if hasattr(random, name)
    ),  # that of SystemRandom, and secrets
    (logging.Logger, "handle"),
)
_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows each line once


class Call(NamedTuple):
    """A call of a Python function, and the user's line that led to it."""

    name: str
    file: str
    line: int


@contextlib.contextmanager
def calls_noted() -> Iterator[list[Call]]:
    """Record such calls by the user's code in this capture, and execute them."""
    found: list[Call] = []
    own = [(home, name, getattr(home, name)) for home, name in _FUNCTIONS]
    for home, name, fn in own:
        setattr(home, name, _noting(fn, found))
    try:
        yield found
    finally:
        for home, name, fn in own:
            setattr(home, name, fn)


def _noting(fn: Callable[..., Any], found: list[Call]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_capturing() and (where := _user()) is not None:
            name = (
                fn.__qualname__
                if fn.__module__ in ("builtins", "_io", "io")
                else f"{fn.__module__}.{fn.__qualname__}"
            )
            found.append(Call(name, *where))
        return fn(*args, **kwargs)

    return call


def _user() -> tuple[str, int] | None:
    """Return the user's line that led to a call directly or through the standard library only."""
    frame = sys._getframe(2)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names
    ):
        frame = frame.f_back
    library = is_installed(frame.f_globals.get("__name__"))
    return None if library else (frame.f_code.co_filename, frame.f_lineno)


def warn_of(calls: Iterable[Call], step: str) -> None:
    """Warn of each line that makes such a call."""
    for (file, line), name in {(call.file, call.line): call.name for call in calls}.items():
        warnings.warn_explicit(
            f"{name} is called when {step!r} is captured, and not when its graph runs; do it outside of the step, and "
            f"pass what it gives as a tensor",
            RuntimeWarning,
            file,
            line,
            registry=_WARNED,
        )
