"""Define the exceptions of the package.

There is one class for each kind of mistake. Each also inherits from the built-in class that a
reader would expect, so ``except ValueError`` works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "AutoschedError",
    "CaptureError",
    "ChartError",
    "GradientError",
    "GraphError",
    "HazardError",
    "InterleavingError",
    "MachineError",
    "MemoryLimitError",
    "ProgramError",
    "RunTimeoutError",
    "ScheduleError",
    "TaskError",
    "TimelineError",
    "UnknownMethodError",
    "UsageError",
    "listed",
    "shown",
]


class AutoschedError(Exception):
    """Any error raised by autosched."""


class CaptureError(AutoschedError, RuntimeError):
    """A function does what no graph can say."""


class ChartError(AutoschedError, ValueError):
    """A chart is asked to draw what it cannot: no finite number, an error bar with one end."""


class GradientError(AutoschedError, RuntimeError):
    """A gradient would be lost: it reached what a schedule computed, which autograd did not follow."""


class GraphError(AutoschedError, ValueError):
    """A graph was built or used wrongly: an unknown name, a value of another graph, a missing input."""


class UnknownMethodError(GraphError, AttributeError):
    """A value is asked for a method that tensors do not have; to ``hasattr`` it is a missing attribute."""


class MachineError(AutoschedError, ValueError):
    """A machine is malformed, or is asked for a device or a link that it does not have."""


class ScheduleError(AutoschedError, ValueError):
    """No schedule can be made from this graph, machine, costs and policy."""


class MemoryLimitError(ScheduleError):
    """No schedule was found that keeps to the memory of each device; the message says whether that is proved."""


class ProgramError(AutoschedError, ValueError):
    """A program breaks a law of ``verify``: it would race, hang, or read what is not there."""


class HazardError(AutoschedError, RuntimeError):
    """A task touched memory in a way that it did not declare."""


class InterleavingError(AutoschedError, AssertionError):
    """A graph does not do what its serial run does, when scheduled or when run again."""


class RunTimeoutError(AutoschedError, TimeoutError):
    """A run did not end in time; the message says what each thread was doing, and who waited for whom."""


class TaskError(AutoschedError, RuntimeError):
    """A task raised while running; the original error is its ``__cause__``."""


class TimelineError(AutoschedError, ValueError):
    """A text is no trace of a schedule, or a timeline is asked for what it cannot know."""


class UsageError(AutoschedError, ValueError):
    """A command line asks for what is not there, or for what does not go together."""


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for an error message: the first few, and how many more.

    >>> listed("abc", most=2)
    "'a', 'b' and 1 more"
    """
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "none") + more


def shown(item: Any) -> str:
    """Return what an error message shows of an object: its repr, or its type where Python refuses to write that.

    >>> shown(1.5), shown(10**5000)
    ('1.5', 'a int that cannot be shown')
    """
    try:
        return repr(item)
    except Exception:
        return f"a {type(item).__name__} that cannot be shown"
