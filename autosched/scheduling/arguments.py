"""Check the types of arguments of ``schedule`` and of runs.

An error names the argument that is wrong. The contents of arguments are checked where they are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autosched._lib.allowed import is_number, is_whole
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.runtime.backends import Backend


def check_arguments(**arguments: Any) -> None:
    """Raise ScheduleError for arguments of a type that ``schedule`` does not accept.

    >>> check_arguments(seed=-1)
    Traceback (most recent call last):
    autosched.errors.ScheduleError: seed must be a whole number, 0 or more, got -1
    """
    for name, item in arguments.items():
        is_valid, what = _RULES[name]
        if is_valid(item):
            continue
        if name == "graph" and callable(item) and not isinstance(item, type):
            function = getattr(item, "__qualname__", type(item).__name__)  # shorter than its repr
            what += f", got {function}; autosched.capture(fn, *args) makes one of it"
            raise ScheduleError(f"{name} must be {what}")
        raise ScheduleError(f"{name} must be {what}, got {shown(item)}")


def checked_timeout(timeout: Any) -> float | None:
    """Return a timeout in seconds, or None; raises ScheduleError if invalid."""
    if timeout is None:
        return None
    if not is_number(timeout, infinite=True):
        what = "a number of seconds, 0 or more, or None for no limit"
        raise ScheduleError(f"timeout must be {what}; got {shown(timeout)}")
    return float(timeout)


def checked_count(count: Any, name: str, least: int) -> int:
    """Return a number of runs. Raises ScheduleError, with the argument's name, if invalid."""
    if not is_whole(count) or count < least:
        raise ScheduleError(f"{name} must be a whole number, {least} or more, got {shown(count)}")
    return int(count)


def _instance(kinds: Any) -> Callable[[Any], bool]:
    # A class has the methods of the protocol Backend, but it is no backend.
    return lambda item: isinstance(item, kinds) and not isinstance(item, type)


_is_flag = _instance(bool)
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "graph": (_instance(Graph), "a Graph"),
    "costs": (_instance(Costs | None), "Costs, or None for a guess"),
    "examples": (_instance(Mapping | None), "an input of each name, as a mapping"),
    "inputs": (_instance(str | Mapping | None), "a device, or a mapping with one for each input"),
    "outputs": (_instance(str | Mapping | None), "a device, or a mapping with one for each output"),
    "place": (_instance(Mapping | None), "a mapping of patterns to devices"),
    "backend": (
        _instance(str | Backend | None),
        "a name, or an object with the methods of autosched.runtime.backends.Backend",
    ),
    "seconds": (lambda item: item is None or is_number(item), "a number, 0 or more, or None"),
    "objective": (lambda item: item in ("makespan", "period"), "'makespan' or 'period'"),
    "in_flight": (
        lambda item: item is None or (is_whole(item) and item >= 1),
        "a whole number, 1 or more",
    ),
    "seed": (lambda item: is_whole(item) and item >= 0, "a whole number, 0 or more"),
    "progress": (
        lambda item: item is None or isinstance(item, bool) or callable(item),
        "True, False, None, or a function of the part that is done and the makespan",
    ),
    "replay": (_is_flag, "True or False"),
    "check": (lambda item: item in (False, True, "bytes"), "False, True or 'bytes'"),
}
