"""Explain what bounds the period of a loop, and which changes would shorten it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from autosched._lib.text import duration
from autosched.bounds.periods import period_bounds
from autosched.errors import ScheduleError
from autosched.explanation.case import SMALL, Case
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Placement
from autosched.policies import Policy
from autosched.policies.candidates import splits
from autosched.program.program import Program, Stream, occupied
from autosched.simulation.footprint import needs_of_runs
from autosched.simulation.issuing import issuing
from autosched.simulation.periods import Period, fewest_in_flight, period
from autosched.simulation.simulate import durations

__all__ = ["Better", "PeriodFacts", "in_flight_note", "period_facts"]

Limit = Literal["device", "copies", "carried", "order", "in_flight", "host"]

_LEAST = 0.02  # of the period; changes that gain less are not listed
_NOTED = 0.1  # of the makespan, from which a shorter period is mentioned
_MOST = 64  # runs in flight that are tried


@dataclass(frozen=True)
class Better:
    """A change in words, and the period with it, in seconds."""

    words: str
    period: float


@dataclass(frozen=True)
class PeriodFacts:
    """The period of a loop, in seconds, and what bounds it.

    ``limit`` is the reason: a ``device`` that computes, or a stream that ``copies``, without a
    pause; a cycle of ``carried`` dependencies; the ``order`` of streams, if a device waits within a
    run for work that depends on its own; ``in_flight``, if a run must end before another begins; or
    the ``host``, which issues work. ``cycle`` has the tasks and copied values of the cycle that
    takes so long, ``stream`` the stream if it is a single one. ``busy`` has the seconds per run of
    each stream. ``enough`` is the fewest runs in flight with nearly this period. ``memory`` is the
    device whose memory has no room for another run, if any.
    """

    seconds: float
    bound: float
    bound_name: str
    in_flight: int
    limit: Limit
    cycle: tuple[str, ...]
    stream: str
    busy: Mapping[str, float]
    enough: int
    memory: str
    better: tuple[Better, ...]


def period_facts(case: Case) -> PeriodFacts | None:
    """Return what bounds the period of a loop; None for a program of one run at a time."""
    program = case.program
    if program.in_flight == 1:
        return None
    found = period(program, case.seconds, case.issuing)
    bounds = period_bounds(case.graph, case.machine, case.costs, program.in_flight)
    name = max(bounds, key=lambda each: bounds[each])
    limit, stream = _limit(program, found)
    return PeriodFacts(
        seconds=found.seconds,
        bound=bounds[name],
        bound_name=name,
        in_flight=program.in_flight,
        limit=limit,
        cycle=tuple(dict.fromkeys(_name(program, at) for at, _ in found.cycle)),
        stream="" if stream is None else str(stream),
        busy={str(stream): seconds for stream, seconds in _busy(case).items()},
        enough=fewest_in_flight(program, case.seconds, case.issuing, program.in_flight),
        memory=_full(case),
        better=tuple(sorted(_better(case, found, limit), key=lambda each: each.period)),
    )


def in_flight_note(case: Case) -> tuple[str, ...]:
    """Note the period of a loop with two runs in flight, if it is well below the makespan."""
    if case.program.in_flight > 1 or case.machine.ranks or len(case.graph) > SMALL:
        return ()
    two = replace(case, program=replace(case.program, in_flight=2))
    then = _period_of(two, case.placement, case.machine)
    if then > (1 - _NOTED) * case.makespan:
        return ()
    took = f"{duration(then)} per run instead of {duration(case.makespan)}"
    return (f"in a loop, in_flight=2 takes {took}, since runs overlap",)


def _limit(program: Program, found: Period) -> tuple[Limit, Stream | None]:
    """Return the reason for a period, and the stream of its cycle if it is a single one."""
    if found.gated:
        return "in_flight", None
    if found.issued:
        return "host", None
    steps = [(occupied(program.instructions[at]), apart) for at, apart in found.cycle]
    common = [s for s in steps[0][0] if all(s in streams for streams, _ in steps)] if steps else []
    if common:
        return ("device" if common[0].name.startswith("compute") else "copies"), common[0]
    following = [*steps[1:], *steps[:1]]
    over_runs = [
        (streams, after)
        for (streams, apart), (after, _) in zip(steps, following, strict=True)
        if apart
    ]
    in_order = all({*streams} & {*after} for streams, after in over_runs)
    return ("order" if in_order else "carried"), None


def _name(program: Program, at: int) -> str:
    instruction = program.instructions[at]
    return str(getattr(instruction, "task", None) or getattr(instruction, "value", ""))


def _busy(case: Case) -> dict[Stream, float]:
    """Return the seconds per run of each stream, the busiest first."""
    found = dict.fromkeys(case.program.streams, 0.0)
    for instruction, seconds in zip(case.program, case.seconds, strict=True):
        for stream in occupied(instruction):
            found[stream] += seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _full(case: Case) -> str:
    needs = needs_of_runs(case.program, case.graph, case.machine, case.costs)
    name = min(needs, key=lambda device: needs[device].most)
    return name if needs[name].most <= case.program.in_flight else ""


def _better(case: Case, found: Period, limit: Limit) -> Iterator[Better]:
    program = case.program
    least = (1 - _LEAST) * found.seconds
    if limit == "in_flight":
        needs = needs_of_runs(program, case.graph, case.machine, case.costs)
        most = int(min([_MOST, *(need.most for need in needs.values())]))
        count = fewest_in_flight(program, case.seconds, case.issuing, max(most, program.in_flight))
        then = period(replace(program, in_flight=count), case.seconds, case.issuing).seconds
        if count > program.in_flight and then < least:
            yield Better(f"in_flight={count} instead of {program.in_flight}", then)
    if limit == "order":
        for name in dict.fromkeys(program.instructions[at].stream.device for at, _ in found.cycle):
            more = case.machine.device(name).streams + 1
            then = _period_of(case, case.placement, _with_streams(case.machine, name, more))
            if then < least:
                yield Better(f"{more} compute streams on {name}", then)
    if len(case.graph) <= SMALL:
        policies = splits(case.machine, program.in_flight)
        then = min(_periods_of(case, policies), default=found.seconds)
        if then < least:
            yield Better('plan with objective="period"', then)


def _with_streams(machine: Machine, name: str, streams: int) -> Machine:
    """Return a machine of which one device has so many compute streams."""
    devices = [replace(d, streams=streams) if d.name == name else d for d in machine.devices]
    return Machine(devices, machine.links, contention=machine.contention, imagined=machine.imagined)


def _periods_of(case: Case, policies: Iterable[Policy]) -> Iterator[float]:
    """Yield the periods of placements by policies, as far as there are any."""
    for policy in policies:
        with suppress(ScheduleError):
            yield _period_of(case, policy(case.graph, case.machine, case.costs), case.machine)


def _period_of(case: Case, placement: Placement, machine: Machine) -> float:
    """Return the period of a placement; infinity if so many runs in flight do not fit."""
    count = case.program.in_flight
    loop = lower(case.graph, machine, placement, case.outputs, in_flight=count)
    parts = loop, case.graph, machine, case.costs
    if min(need.most for need in needs_of_runs(*parts).values()) < count:
        return math.inf
    return period(loop, durations(*parts), issuing(*parts)).seconds
