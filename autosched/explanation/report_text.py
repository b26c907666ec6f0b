"""Write explanations for a terminal of about 100 columns.

Formats facts and remedies, and computes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from autosched._lib.text import amount, count, duration, percent, ranges, shortened, wrapped
from autosched.explanation.facts import Idle, Step

if TYPE_CHECKING:
    from autosched.explanation.periods import PeriodFacts
    from autosched.explanation.report import Explanation, Late

__all__ = ["report_text"]

_INDENT = 15  # of the facts, after their headings
_MOST_STEPS = 8
_MOST_CAUSES = 4
_MOST_DEVICES = 8  # whose idle time has all its causes
_MOST_IN_CYCLE = 6  # tasks of a cycle

_BOUNDS = {
    "critical_path": "the longest chain of tasks and copies takes that long",
    "work": "the devices need that long for all tasks together",
    "interval": "there is a span of time in which devices must do that much",
    "copies": "copy streams need that long for what must go through them",
    "memory": "what does not fit in memory must be fetched, or made, again",
    "host": "threads of the host need that long to issue all tasks",
}
_PATH = {
    "compute": "computing",
    "copy": "copies",
    "device": "devices busy with other tasks",
    "link": "copies in line behind others",
    "order": "waiting for memory or order",
    "gap": "nothing (gaps)",
    "host": "waiting for the host to issue work",
}
_WAITS = {
    "copy": "for copies",
    "link": "for copies in line",
    "gap": "in gaps",
    "end": "with nothing left to do",
}
_PERIODS = {
    "device": "{stream} is never idle",
    "copies": "{stream} copies without a pause",
    "carried": "each run needs what the run before leaves, in a cycle of {cycle}",
    "order": "streams are in order, and one waits within a run for work that depends on its own: "
    "{cycle}",
    "in_flight": "no run begins before one of those in flight has ended",
    "host": "threads of the host need that long to issue {cycle}",
}
_ORDER = {"device": "device busy with", "link": "in line behind", "order": "after"}


def report_text(found: Explanation) -> str:
    """Return an explanation as text."""
    how = "measured" if found.measured else "predicted"
    also = f" ({duration(found.predicted)} predicted)" if found.measured else ""
    devices = ", ".join(name for name, _ in ranges((name, "") for name in found.devices))
    tasks = count(found.tasks, "task")
    head = wrapped(
        f"{found.name}: {duration(found.makespan)} {how}{also}, {tasks} on {devices or 'no device'}"
    )
    if not found.makespan:
        return "\n".join([*head, "", "It takes no time, so there is nothing to explain."])
    return "\n".join([*head, "", *_advice(found), "", *_facts(found)])


def _advice(found: Explanation) -> Iterator[str]:
    if found.advice:
        yield "What would help, each alone, as simulated"
    else:
        yield "Nothing that was tried would make it faster."
    for number, advice in enumerate(found.advice, 1):
        head = f"{number:>3}. -{percent(advice.share)}  "
        yield from wrapped(f"{advice.words} -> {duration(advice.makespan)}", head, len(head))
    for note in found.notes:
        begins_with_name = ":" in note.split()[0]
        yield from wrapped(f"{note if begins_with_name else note[0].upper() + note[1:]}.")


def _facts(found: Explanation) -> Iterator[str]:
    if found.efficiency.seconds:
        yield from _fact("Efficiency", _efficiency(found))
    if found.copies:
        moved = f"{found.copies:,}"
        if found.copied_bytes:
            moved = f"{amount(found.copied_bytes, 'B')} in {moved}"
        hidden = percent(found.copies_hidden)
        yield f"{'Copies':<{_INDENT}}{moved}, {hidden} of their time hidden behind compute"
    words = _idle if len(found.idle) <= _MOST_DEVICES else _mostly_idle
    idle = ((device.device, words(device, found.makespan)) for device in found.idle)
    for heading, text in ranges(idle):
        yield from _fact(heading, text)
    if found.twice_as_fast:
        saved = (_saved(name, part) for name, part in found.twice_as_fast.items())
        yield f"{'Twice as fast':<{_INDENT}}{', '.join(saved)}"
    if found.late:
        yield from _fact("Late", "; ".join(map(_late, found.late)))
    if found.period is not None:
        lines = _period_lines(found.period)
        yield from _fact("Period", next(lines))
        for line in lines:
            yield from _fact("", line)
    if found.makespan:
        yield from _critical_path(found)


def _efficiency(found: Explanation) -> str:
    best = found.efficiency
    bound = f", {count(found.bound, 'task')} bound as they are," if found.bound > 1 else ""
    bound = ", 1 task bound as it is," if found.bound == 1 else bound
    least = f"no schedule{bound} takes less than {duration(best.seconds)}"
    return f"{percent(best.share)}: {least}: {_BOUNDS[best.bound]}"


def _idle(found: Idle, makespan: float) -> str:
    if found.causes.keys() == {"end"} and found.seconds >= makespan:
        return "not used"
    causes = _longest_first(found.causes)
    parts = [
        f"{duration(seconds)} {_WAITS.get(cause, f'for {cause}')}"
        for cause, seconds in causes[:_MOST_CAUSES]
    ]
    if rest := sum(seconds for _, seconds in causes[_MOST_CAUSES:]):
        parts.append(f"{duration(rest)} else")
    if found.seconds > 1e-9 * makespan:
        return f"idle {percent(found.seconds / makespan)}: {', '.join(parts)}"
    return "never idle"


def _mostly_idle(found: Idle, makespan: float) -> str:
    """Write the same in so few words that many devices share them."""
    if found.causes.keys() <= {"end"} or found.seconds <= 1e-9 * makespan:
        return _idle(found, makespan)
    cause, _ = _longest_first(found.causes)[0]
    why = _WAITS.get(cause, "for another device")
    return f"idle {percent(found.seconds / makespan)}, mostly {why}"


def _saved(name: str, part: float) -> str:
    return f"{name} {'nothing' if part < 0.005 else f'-{part:.0%}'}"


def _late(late: Late) -> str:
    more = duration(late.measured - late.predicted)
    if late.kind == "gaps":
        return f"{more} of gaps in which nothing held anything up"
    if late.kind == "pauses":
        return f"{more} of garbage collection"
    kind = "task" if late.kind == "run" else "copy of"
    return f"{kind} {late.name!r} {duration(late.measured)} instead of {duration(late.predicted)}"


def _critical_path(found: Explanation) -> Iterator[str]:
    """Yield the longest steps of the critical path, in order."""
    parts = [
        f"{percent(seconds / found.makespan)} {_PATH[cause]}"
        for cause, seconds in _longest_first(found.path_seconds)
    ]
    yield from _fact("Critical path", ", ".join(parts))
    steps = list(_lasting(found.critical_path))
    shown = _shown(steps)
    width = max((len(_step(steps[i])) for i in shown), default=0)
    skipped = list[Step]()
    for i, step in enumerate(steps):
        if i not in shown:
            skipped.append(step)
            continue
        yield from _skipped(skipped)
        skipped = []
        times = f"{duration(step.start):>11}  {duration(step.end - step.start):>8}"
        yield f"{times}  {_step(step):<{width}}  {_why(step)}".rstrip()
    yield from _skipped(skipped)


def _shown(steps: Sequence[Step]) -> set[int]:
    """Return the positions of the longest steps, and of single steps between."""
    everything = range(len(steps))
    if len(steps) <= _MOST_STEPS:
        return set(everything)
    longest = sorted(everything, key=lambda i: -float(f"{steps[i].end - steps[i].start:.3g}"))
    shown = set(longest[:_MOST_STEPS])
    # A single step is as short as "... 1 step".
    return shown | {i for i in everything if {i - 1, i + 1} <= shown | {-1, len(steps)}}


def _lasting(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps of nonzero duration.

    Waits for steps of duration 0, such as views, are omitted.
    """
    for before, step in pairwise((None, *steps)):
        if step is not None and step.end > step.start:
            after_zero = before is not None and before.end <= before.start
            yield replace(step, cause="data") if after_zero else step


def _skipped(steps: Sequence[Step]) -> Iterator[str]:
    if steps:
        seconds = sum(step.end - step.start for step in steps)
        yield f"{'':11}  {duration(seconds):>8}  ... {count(len(steps), 'step')}"


def _step(step: Step) -> str:
    return f"{'copy ' if step.kind == 'copy' else ''}{shortened(step.name)}, {step.where}"


def _why(step: Step) -> str:
    """Write what a step waited for, unless it is the previous result."""
    parts = []
    if step.cause in _ORDER:
        parts.append(f"{_ORDER[step.cause]} {shortened(step.behind)!r}")
    if step.gap > 0.05 * (step.end - step.start) and step.gap > 0:
        parts.append(f"{duration(step.gap)} late")
    return ", ".join(parts)


def _period_lines(found: PeriodFacts) -> Iterator[str]:
    """Yield sentences about a period, without indentation."""
    names = [repr(name) for name in found.cycle[:_MOST_IN_CYCLE]]
    names += ["..."] * (len(found.cycle) > _MOST_IN_CYCLE)
    reason = _PERIODS[found.limit].format(stream=found.stream, cycle=", ".join(names))
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


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _fact(heading: str, text: str) -> list[str]:
    return wrapped(text, f"{heading:<{_INDENT}}", _INDENT)
