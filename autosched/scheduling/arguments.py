"""Check the types of arguments of ``schedule`` and of runs.

An error names the argument that is wrong. The contents of arguments are checked where they are
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosched._lib.allowed import is_number
from autosched.costs.costs import Costs
from autosched.errors import ScheduleError, shown
from autosched.graph.graph import Graph
from autosched.runtime.backends import Backend, check_name

__all__ = ["check_kinds", "checked_count", "checked_timeout"]


def check_kinds(
    graph: Any,
    costs: Any = None,
    examples: Any = None,
    inputs: Any = None,
    outputs: Any = None,
    backend: Any = None,
    check: Any = False,
    place: Any = None,
    seconds: Any = None,
    seed: Any = 0,
    progress: Any = None,
    nvtx: Any = False,
    replay: Any = False,
) -> None:
    """Raise ScheduleError for arguments of a type that ``schedule`` does not accept.

    >>> check_kinds(Graph(), inputs=["cuda:0"])
    Traceback (most recent call last):
    autosched.errors.ScheduleError: inputs must be a device, or a mapping with one for each input, got ['cuda:0']
    """
    for name, item, kinds, what in (
        ("graph", graph, Graph, "a Graph"),
        ("costs", costs, Costs | None, "Costs, or None for a guess"),
        ("examples", examples, Mapping | None, "an input of each name, as a mapping"),
        ("inputs", inputs, str | Mapping | None, "a device, or a mapping with one for each input"),
        (
            "outputs",
            outputs,
            str | Mapping | None,
            "a device, or a mapping with one for each output",
        ),
        ("place", place, Mapping | None, "a mapping of patterns to devices"),
        (
            "backend",
            backend,
            str | Backend | None,
            "a name, or an object with the methods of autosched.runtime.backends.Backend",
        ),
    ):
        if not isinstance(item, kinds) or isinstance(
            item, type
        ):  # a class has the methods, but is not an instance
            is_function = name == "graph" and callable(item) and not isinstance(item, type)
            hint = "; autosched.capture(fn, *args) makes one of it" if is_function else ""
            raise ScheduleError(
                f"{name} must be {what}, got {_summary(item) if hint else shown(item)}{hint}"
            )
    if isinstance(backend, str):
        check_name(backend)
    if seconds is not None and not is_number(seconds):
        raise ScheduleError(f"seconds must be a number, 0 or more, or None, got {shown(seconds)}")
    checked_count(seed, "seed", 0)
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        what = "True, False, None, or a function of the part that is done and the makespan"
        raise ScheduleError(f"progress must be {what}, got {shown(progress)}")
    if not isinstance(nvtx, bool):
        raise ScheduleError(f"nvtx must be True or False, got {shown(nvtx)}")
    if not isinstance(replay, bool):
        raise ScheduleError(f"replay must be True or False, got {shown(replay)}")
    if check not in (False, True, "bytes"):
        raise ScheduleError(f"check must be False, True or 'bytes', got {shown(check)}")


def _summary(item: Any) -> str:
    """Return a function's name, or a module's class, which is shorter than its repr."""
    return getattr(item, "__qualname__", type(item).__name__)


def checked_timeout(timeout: Any) -> float | None:
    """Return the ``timeout`` of a run in seconds, or None. Raises ScheduleError for other types."""
    if timeout is None:
        return None
    if not is_number(timeout, infinite=True):
        raise ScheduleError(
            f"timeout must be a number of seconds, 0 or more, or None for no limit; got {shown(timeout)}"
        )
    return float(timeout)


def checked_count(count: Any, name: str, least: int) -> int:
    """Return a number of runs. Raises ScheduleError, with the argument's name, if invalid."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ScheduleError(f"{name} must be a whole number, {least} or more, got {shown(count)}")
    return count
