"""Write what bounds a period. Formats facts, and computes none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosched._lib.text import duration, percent

if TYPE_CHECKING:
    from autosched.explanation.periods import PeriodFacts

__all__ = ["period_lines"]

_SHOWN = 6  # tasks of a cycle
_REASONS = {
    "device": "{stream} is never idle",
    "copies": "{stream} copies without a pause",
    "carried": "each run needs what the run before leaves, in a cycle of {cycle}",
    "order": "streams are in order, and one waits within a run for work that depends on its own: "
    "{cycle}",
    "in_flight": "no run begins before one of those in flight has ended",
    "host": "threads of the host need that long to issue {cycle}",
}


def period_lines(found: PeriodFacts) -> Iterator[str]:
    """Yield sentences about a period, without indentation."""
    names = [repr(name) for name in found.cycle[:_SHOWN]]
    names += ["..."] * (len(found.cycle) > _SHOWN)
    reason = _REASONS[found.limit].format(stream=found.stream, cycle=", ".join(names))
    yield f"{duration(found.seconds)} per run, with {found.in_flight} in flight: {reason}"
    if found.bound:
        share = percent(found.bound / found.seconds) if found.seconds else "100%"
        yield f"no schedule with as many in flight takes less than {duration(found.bound)} ({share})"
    stream, seconds = next(iter(found.busy.items()), ("", 0.0))
    if found.limit not in ("device", "copies") and seconds:
        yield f"the busiest stream, {stream}, works {percent(seconds / found.seconds)} of it"
    for better in found.better:
        gain = percent(1 - better.period / found.seconds)
        yield f"-{gain}: {better.words} -> {duration(better.period)}"
    if found.memory and found.limit == "in_flight":
        yield f"the memory of {found.memory} has no room for another run"
    elif found.enough < found.in_flight:
        yield f"in_flight={found.enough} would suffice"
