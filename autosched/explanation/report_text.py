"""Write explanations for a terminal of about 100 columns.

Formats facts and remedies, and computes none.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from autosched._lib.text_table import amount
from autosched.explanation.facts import Idle, Step
from autosched.explanation.words import count, share, short
from autosched.viz.paint import duration

if TYPE_CHECKING:
    from autosched.explanation.report import Explanation, Late

__all__ = ["written"]

_WIDTH = 100
_MOST_STEPS = 8
_MOST_CAUSES = 4

_BOUNDS = {
    "critical_path": "the longest chain of tasks and copies takes that long",
    "work": "the devices need that long for all tasks together",
    "interval": "there is a span of time in which devices must do that much",
    "copies": "copy streams need that long for what must go through them",
    "memory": "what does not fit in memory must be fetched, or made, again",
}
_PATH = {
    "compute": "computing",
    "copy": "copies",
    "device": "devices busy with other tasks",
    "link": "copies in line behind others",
    "order": "waiting for memory or order",
    "gap": "nothing (gaps)",
}
_WAITS = {
    "copy": "for copies",
    "link": "for copies in line",
    "gap": "in gaps",
    "end": "with nothing left to do",
}


def written(found: Explanation) -> str:
    """Return an explanation as text."""
    how = "measured" if found.measured else "predicted"
    also = f" ({duration(found.predicted)} predicted)" if found.measured else ""
    head = (
        f"{found.name}: {duration(found.makespan)} {how}{also}, {count(found.tasks, 'task')} on "
        f"{', '.join(found.devices) or 'no device'}"
    )
    if not found.makespan:
        return "\n".join(
            [*_filled(head, "", ""), "", "It takes no time, so there is nothing to explain."]
        )
    return "\n".join([*_filled(head, "", ""), "", *_advised(found), "", *_facts(found)])


def _advised(found: Explanation) -> Iterator[str]:
    """Yield the lines of the advice."""
    if not found.advice:
        yield "Nothing that was tried would make it faster."
    else:
        yield "What would help, each alone, as simulated"
    for number, advice in enumerate(found.advice, 1):
        head = f"{number:>3}. -{share(advice.share)}  "
        yield from _filled(f"{advice.words} -> {duration(advice.makespan)}", head, " " * len(head))
    for note in found.notes:
        yield from _filled(
            (note if ":" in note.split()[0] else note[0].upper() + note[1:]) + ".", "", ""
        )


def _facts(found: Explanation) -> Iterator[str]:
    """Yield the lines of the facts."""
    if found.efficiency.seconds:
        yield from _filled(_efficiency(found), f"{'Efficiency':<15}", " " * 15)
    if found.copies:
        moved = (
            f"{amount(found.copied_bytes, 'B')} in {found.copies:,}"
            if found.copied_bytes
            else f"{found.copies:,}"
        )
        yield f"{'Copies':<15}{moved}, {share(found.copies_hidden)} of their time hidden behind compute"
    for where in found.idle if found.makespan else ():
        yield from _idle(where, found.makespan)
    if found.twice_as_fast:
        yield f"{'Twice as fast':<15}{', '.join(map(_saves, found.twice_as_fast, found.twice_as_fast.values()))}"
    if found.late:
        yield from _filled("; ".join(map(_late, found.late)), f"{'Late':<15}", " " * 15)
    if found.makespan:
        yield from _path(found)


def _efficiency(found: Explanation) -> str:
    best = found.efficiency
    bound = f", {count(found.bound, 'task')} bound as they are," if found.bound > 1 else ""
    bound = ", 1 task bound as it is," if found.bound == 1 else bound
    return f"{share(best.share)}: no schedule{bound} takes less than {duration(best.seconds)}: {_BOUNDS[best.bound]}"


def _idle(found: Idle, makespan: float) -> Iterator[str]:
    """Yield the causes of idle time of a device."""
    part = share(found.seconds / makespan)
    causes = sorted(found.causes.items(), key=lambda item: -item[1])
    listed = [
        f"{duration(seconds)} {_WAITS.get(cause, f'for {cause}')}"
        for cause, seconds in causes[:_MOST_CAUSES]
    ]
    if rest := sum(seconds for _, seconds in causes[_MOST_CAUSES:]):
        listed.append(f"{duration(rest)} else")
    if found.causes.keys() == {"end"} and found.seconds >= makespan:
        yield f"{found.device:<15}not used"
        return
    text = f"idle {part}: {', '.join(listed)}" if found.seconds > 1e-9 * makespan else "never idle"
    yield from _filled(text, f"{found.device:<15}", " " * 15)


def _saves(name: str, part: float) -> str:
    return f"{name} {'nothing' if part < 0.005 else f'-{part:.0%}'}"


def _late(late: Late) -> str:
    more = duration(late.measured - late.predicted)
    if late.kind == "gaps":
        return f"{more} of gaps in which nothing held anything up"
    if late.kind == "pauses":
        return f"{more} of garbage collection"
    kind = "task" if late.kind == "run" else "copy of"
    return f"{kind} {late.name!r} {duration(late.measured)} instead of {duration(late.predicted)}"


def _path(found: Explanation) -> Iterator[str]:
    """Yield the longest steps of the critical path, in order, with the number of steps between."""
    parts = [
        f"{share(seconds / found.makespan)} {_PATH[cause]}"
        for cause, seconds in _sorted(found.path_seconds)
    ]
    yield from _filled(", ".join(parts), f"{'Critical path':<15}", " " * 15)
    steps = list(_lasting(found.critical_path))
    longest = sorted(
        range(len(steps)), key=lambda i: -float(f"{steps[i].end - steps[i].start:.3g}")
    )[:_MOST_STEPS]
    kept = set(longest if len(steps) > _MOST_STEPS else range(len(steps)))
    skipped = list[Step]()
    kept |= {
        i for i in range(len(steps)) if {i - 1, i + 1} <= kept | {-1, len(steps)}
    }  # as short as "... 1 step"
    width = max((len(_step(steps[i])) for i in kept), default=0)
    for i, step in enumerate(steps):
        if i not in kept:
            skipped.append(step)
            continue
        yield from _skipped(skipped)
        skipped = []
        times = f"{duration(step.start):>11}  {duration(step.end - step.start):>8}"
        yield f"{times}  {_step(step):<{width}}  {_why(step)}".rstrip()
    yield from _skipped(skipped)


def _lasting(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps of nonzero duration.

    Waits for steps of duration 0, such as views, are omitted.
    """
    for before, step in pairwise((None, *steps)):
        if step is not None and step.end > step.start:
            yield (
                replace(step, cause="data")
                if before is not None and before.end <= before.start
                else step
            )


def _skipped(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a line for steps that are left out."""
    if steps:
        yield f"{'':11}  {duration(sum(s.end - s.start for s in steps)):>8}  ... {count(len(steps), 'step')}"


def _step(step: Step) -> str:
    return f"{'copy ' if step.kind == 'copy' else ''}{short(step.name)}, {step.where}"


def _why(step: Step) -> str:
    """Write what a step waited for, unless it is the result of the step before it."""
    late = (
        f"{duration(step.gap)} late"
        if step.gap > 0.05 * (step.end - step.start) and step.gap > 0
        else ""
    )
    why = {"device": "device busy with", "link": "in line behind", "order": "after"}.get(
        step.cause, ""
    )
    return ", ".join(filter(None, (f"{why} {short(step.behind)!r}" if why else "", late)))


def _sorted(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _filled(text: str, first: str, other: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=other, break_on_hyphens=False
    )
