"""Define the exceptions of the package.

There is one class for each kind of mistake. Each also inherits from the built-in class that a
reader would expect, so ``except ValueError`` works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class AutoschedError(Exception):
    """Any error raised by autosched."""


class CancelledRunError(AutoschedError, RuntimeError):
    """A run in flight was cancelled: an earlier one, whose state it needs, was aborted."""


class CaptureError(AutoschedError, RuntimeError):
    """A function does something that a graph cannot represent."""


class ChartError(AutoschedError, ValueError):
    """A picture cannot be drawn: it is too small, a time is not finite, or its format is unknown."""


class GradientError(AutoschedError, RuntimeError):
    """A gradient would be lost: it reached an output of a schedule, which autograd did not see."""


class GraphError(AutoschedError, ValueError):
    """A graph was built or used wrongly: an unknown name, a foreign value or a missing input."""


class UnknownMethodError(GraphError, AttributeError):
    """A value has no such method, since tensors have none; ``hasattr`` sees a missing attribute."""


class MachineError(AutoschedError, ValueError):
    """A machine is malformed, or does not have the requested device or link."""


class RealGPUsError(MachineError):
    """There are real GPUs, in whose place none can be simulated."""


class ScheduleError(AutoschedError, ValueError):
    """No schedule can be made from this graph, machine, costs and policy."""


class MemoryLimitError(ScheduleError):
    """No schedule was found that fits the memory of each device.

    The message says whether it is proved that none exists, with which limits a plan was made, and what
    every plan needs.
    """


class ProgramError(AutoschedError, ValueError):
    """A program breaks a law of ``verify``: it would race, hang, or read what is not present."""


class RankError(AutoschedError, ConnectionError):
    """Another rank failed, has gone, or is missing; the message says which."""


class HazardError(AutoschedError, RuntimeError):
    """A task touched memory in a way that it did not declare."""


class InterleavingError(AutoschedError, AssertionError):
    """A graph, when scheduled or run again, differs from its serial run."""


class RunTimeoutError(AutoschedError, TimeoutError):
    """A run did not end in time; the message says what each thread was doing or waiting for."""


class StorageError(AutoschedError, OSError):
    """A file is missing, malformed, or not the one for which the graph was made."""


class TaskError(AutoschedError, RuntimeError):
    """A task raised while running; the original error is its ``__cause__``."""


class TimelineError(AutoschedError, ValueError):
    """A text is not a trace of a schedule, or a timeline lacks the requested information."""


class UsageError(AutoschedError, ValueError):
    """A command line asks for something unknown, or for options that exclude each other."""


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for an error message: the first few, and the number of the others.

    >>> listed("abc", most=2)
    "'a', 'b' and 1 more"
    """
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "none") + more


def shown(item: Any) -> str:
    """Return the repr of an object for an error message, or its type if its repr raises.

    >>> shown(1.5), shown(10**5000)
    ('1.5', 'a int that cannot be shown')
    """
    try:
        return repr(item)
    except Exception:
        return f"a {type(item).__name__} that cannot be shown"
