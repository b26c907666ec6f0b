"""Assemble the explanation of a whole schedule."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from autosched._lib.gc_pause import without_collecting
from autosched._lib.text import count
from autosched.bounds import bounds
from autosched.errors import ScheduleError
from autosched.explanation.advice import Advice, Remedy, worthwhile
from autosched.explanation.case import Case
from autosched.explanation.causes import Predecessor, binding_predecessors, predecessors
from autosched.explanation.copies import add_copy_streams, pageable_note, pin_memory, spill_note
from autosched.explanation.facts import Idle, Step, critical_path, idle, idle_by_span, path_seconds
from autosched.explanation.host_reads import avoid_host_reads, host_read_note
from autosched.explanation.launches import fuse_launches, host_note, is_issued_late, replay_launches
from autosched.explanation.periods import PeriodFacts, in_flight_note, period_facts
from autosched.explanation.placements import Plans, change_placement, device_count_note
from autosched.explanation.report_text import report_text
from autosched.explanation.resident_inputs import keep_inputs
from autosched.lowering.resident_state import without_resident_state
from autosched.program.parts import crosses
from autosched.program.program import Copy, Run
from autosched.timeline.timeline import Timeline, what

__all__ = ["Efficiency", "Explanation", "Late", "explain"]

_MOST_LATE = 3


@dataclass(frozen=True)
class Efficiency:
    """The lower bound divided by the makespan, and the name of that bound."""

    share: float
    bound: str
    seconds: float


@dataclass(frozen=True)
class Late:
    """A task, a copy, gaps or GC pauses that took longer than predicted."""

    kind: str
    name: str
    predicted: float
    measured: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why a schedule takes as long as it does, and what would help. Times are seconds.

    ``bound`` is the number of tasks that must run on a certain accelerator; ``efficiency`` takes
    these bindings as given. ``path_seconds`` divides the makespan (see ``facts.path_seconds``); its
    ``host`` is predicted time in which work was not issued yet.
    ``idle`` has the accelerators, or all devices if there are none. ``twice_as_fast`` is the share
    of the makespan that links, the network, or accelerators of twice the speed would save.
    ``advice`` is predicted, the largest gain first; ``late`` refers to a measured run. ``period``
    explains the seconds per run of a loop; the rest is about a single run.
    """

    name: str
    measured: bool
    makespan: float
    predicted: float
    tasks: int
    bound: int
    copies: int
    devices: tuple[str, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    efficiency: Efficiency
    critical_path: tuple[Step, ...]
    path_seconds: Mapping[str, float]
    idle: tuple[Idle, ...]
    copied_bytes: float
    copies_hidden: float
    twice_as_fast: Mapping[str, float]
    late: tuple[Late, ...]
    period: PeriodFacts | None = None

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return report_text(self)

    def __repr__(self) -> str:
        how = "measured" if self.measured else "predicted"
        advice = count(len(self.advice), "suggestion")
        return f"<Explanation of {self.name!r}: {self.makespan:.3g} s {how}, {advice}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self)}


@without_collecting()
def explain(case: Case, measured: Timeline | None = None) -> Explanation:
    """Explain a schedule, as predicted or as ``measured``.

    Raises ScheduleError for a timeline of another program.

    >>> import autosched as asc
    >>> graph = asc.Graph("one")
    >>> graph.output(y=graph.add(abs, graph.input("x"), name="y", seconds=1.0))
    >>> asc.schedule(graph, asc.Machine.emulated(gpus=0)).explain().efficiency
    Efficiency(share=1.0, bound='critical_path', seconds=1.0)
    """
    timeline = case.predicted if measured is None else _checked(case, measured)
    before = predecessors(case, timeline)
    binding = binding_predecessors(timeline, before)
    path = critical_path(case.program, timeline, binding)
    plans = Plans.of(case)
    planned = before if measured is None else predecessors(case, case.predicted)
    waited = _idle_by_span(case, planned)
    used = set(case.placement.device.values())
    return Explanation(
        name=case.graph.name,
        measured=measured is not None,
        makespan=timeline.makespan,
        predicted=case.makespan,
        tasks=len(case.graph),
        bound=len(case.bound),
        copies=sum(isinstance(i, Copy) for i in case.program),
        devices=tuple(name for name in case.machine.names if name in used),
        advice=worthwhile(_remedies(case, plans, planned, waited), case.makespan),
        notes=(
            *_guess_note(case),
            *host_note(case),
            *device_count_note(case, plans),
            *host_read_note(case, waited),
            *pageable_note(case),
            *spill_note(case),
            *in_flight_note(case),
        ),
        efficiency=_efficiency(case, timeline.makespan),
        critical_path=path,
        path_seconds=_path_seconds(case, path, measured is not None),
        idle=tuple(idle(name, timeline, binding) for name in case.workers),
        copied_bytes=sum(span.nbytes for span in timeline.spans),
        copies_hidden=timeline.overlap().copies_hidden,
        twice_as_fast=_twice_as_fast(case),
        late=_late(case, timeline, path) if measured is not None else (),
        period=period_facts(case),
    )


def _guess_note(case: Case) -> Iterator[str]:
    if guess := case.costs.guess(case.graph):
        yield f"{guess}; a copy of what has no known size carries nothing: give examples="


def _idle_by_span(case: Case, before: Sequence[Sequence[Predecessor]]) -> Counter[int]:
    """Return for how long accelerators are predicted to wait for each span."""
    binding = binding_predecessors(case.predicted, before)
    waited: Counter[int] = Counter()
    for device in case.used:
        waited.update(idle_by_span(device, case.predicted, binding))  # Counter.update adds
    return waited


def _remedies(
    case: Case,
    plans: Plans,
    before: Sequence[Sequence[Predecessor]],
    waited: Mapping[int, float],
) -> Iterator[Remedy]:
    yield from pin_memory(case)
    yield from keep_inputs(case)
    yield from avoid_host_reads(case, waited)
    yield from fuse_launches(case)
    yield from replay_launches(case)
    yield from change_placement(case, plans)
    yield from add_copy_streams(case, before)


def _checked(case: Case, timeline: Timeline) -> Timeline:
    """Return a timeline of this program. Raises ScheduleError for any other."""
    here = {
        i: what(instruction)
        for i, instruction in enumerate(case.program)
        if isinstance(instruction, (Run, Copy))
    }
    there = {span.instruction: (span.kind, span.name) for span in timeline.spans}
    if here != there:
        raise ScheduleError(
            "measured= is a timeline of another program; schedule.profile(...) makes one of this"
        )
    return timeline


def _efficiency(case: Case, makespan: float) -> Efficiency:
    found = bounds(without_resident_state(case.graph, case.machine), case.machine, case.costs)
    name = max(found, key=lambda bound: found[bound])
    return Efficiency(found[name] / makespan if makespan else 1.0, name, found[name])


def _path_seconds(case: Case, path: Sequence[Step], measured: bool) -> dict[str, float]:
    """Return the seconds of the critical path by cause; predicted gaps are the host's."""
    found = path_seconds(path)
    if measured or not is_issued_late(case):
        return found
    return {"host" if cause == "gap" else cause: seconds for cause, seconds in found.items()}


def _twice_as_fast(case: Case) -> dict[str, float]:
    """Return the gain of links, of the network, and of accelerators of twice the speed."""
    workers = "accelerators" if case.machine.accelerators else "devices"
    copies = [isinstance(i, Copy) for i in case.program]
    on_workers = [i.stream.device in case.workers for i in case.program]
    compute = [on and not copy for on, copy in zip(on_workers, copies, strict=True)]
    ranks = dict(case.program.ranks)
    across = [crosses(i, ranks) for i in case.program]
    links = [copy and not far for copy, far in zip(copies, across, strict=True)]
    found = {}
    for name, faster in (("links", links), ("the network", across), (workers, compute)):
        if any(faster) and case.makespan:
            pairs = zip(case.seconds, faster, strict=True)
            seconds = [s / 2 if fast else s for s, fast in pairs]
            found[name] = 1 - case.timed(seconds) / case.makespan
    return found


def _late(case: Case, timeline: Timeline, path: Sequence[Step]) -> tuple[Late, ...]:
    """Return what took longer than predicted, the longest first."""
    seconds = case.seconds
    found = [Late(s.kind, s.name, seconds[s.instruction], s.seconds) for s in timeline.spans]
    found.append(Late("gaps", "", 0.0, sum(step.gap for step in path)))
    found.append(Late("pauses", "", 0.0, sum(end - start for start, end in timeline.pauses)))
    least = 0.01 * timeline.makespan
    late = [item for item in found if item.measured - item.predicted > least]
    late.sort(key=lambda item: item.predicted - item.measured)
    return tuple(late[:_MOST_LATE])
