"""Measure runs of all ranks on one clock, that of rank 0.

Each rank asks rank 0 for its time, many times. In the shortest round trip the answer was given half
way, up to half of its length: that is the doubt. Positions of instructions are those of the whole
program, in which a copy between ranks lasts from when it is sent until it has been received.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from autosched.errors import ScheduleError
from autosched.program.parts import positions
from autosched.program.program import Copy, Program, Receive, Run, Send, occupied
from autosched.runtime.ranks.backend import Ranks
from autosched.runtime.ranks.session import Session, session
from autosched.runtime.ranks.wire import Wire
from autosched.timeline.timeline import Span, Timeline, what

if TYPE_CHECKING:
    from autosched.runtime.execute import Executor

__all__ = ["RankProfiler", "offset"]

_TRIPS = 50
_TAG = 2**31 - 2  # that no program has

# Position, start, end and bytes. Of a copy the sender knows the start, the receiver the rest.
Times = tuple[int, float | None, float | None, float | None]
Pause = tuple[float, float]
OneRun = tuple[list[Times], list[Pause]]


class RankProfiler:
    """Profiles ``count`` runs of a program together with the other ranks.

    Raises ScheduleError where they profile other counts.
    """

    def __init__(self, executor: Executor, program: Program, hosts: Mapping[str, str], count: int):
        assert isinstance(executor.backend, Ranks)
        self.executor = executor
        self.backend = executor.backend
        self.program = program
        self.hosts = hosts
        self.session = session()
        self.places = positions(program, self.session.rank)
        self.runs: list[OneRun] = []  # by the clock of this rank
        self.session.meeting.agree("profile()", str(count), _same_count)

    def run(self, inputs: Mapping[str, Any], timeout: float | None) -> None:
        """Run once, and keep the times of this rank."""
        exchanges = self.backend.exchanges
        exchanges.is_watched = True
        try:
            found = self.executor.profile(inputs, timeout)
        finally:
            exchanges.is_watched = False
        begun = self.backend.begun
        times = [self._times(span, begun, exchanges.arrivals) for span in found.spans]
        self.runs.append((times, [(begun + start, begun + end) for start, end in found.pauses]))

    def _times(self, span: Span, begun: float, arrivals: Mapping[int, float]) -> Times:
        place = self.places[span.instruction]
        half = self.executor.program.instructions[span.instruction]
        if isinstance(half, Send):
            return place, begun + span.start, None, None
        if isinstance(half, Receive):
            return place, None, arrivals[span.instruction], span.nbytes
        return place, begun + span.start, begun + span.end, span.nbytes

    def timelines(self) -> list[Timeline]:
        """Return the timelines of all runs, with the spans of all ranks. Collective."""
        shift, doubt = offset(self.session)
        mine = json.dumps([doubt, [_shifted(run, shift) for run in self.runs]])
        ranks = json.loads(
            self.session.meeting.agree(
                "times of profile()", mine, lambda texts: f"[{','.join(texts)}]"
            )
        )
        doubt = max(each for each, _ in ranks)
        return [
            self._timeline(run, doubt) for run in zip(*(runs for _, runs in ranks), strict=True)
        ]

    def _timeline(self, run: Sequence[OneRun], doubt: float) -> Timeline:
        """Return the timeline of one run, from the times of all ranks."""
        found: dict[int, list[float]] = {}
        for place, *times in chain.from_iterable(times for times, _ in run):
            known = found.setdefault(place, [0.0, 0.0, 0.0])
            known[:] = [old if new is None else new for old, new in zip(known, times, strict=True)]
        begun = min((start for start, _, _ in found.values()), default=0.0)
        spans = []
        for place, (start, end, nbytes) in sorted(found.items()):
            item = self.program.instructions[place]
            assert isinstance(item, (Run, Copy))
            seconds = start - begun, max(start, end) - begun  # clocks may disagree a little
            spans.append(Span(*what(item), occupied(item), *seconds, place, nbytes))
        made = Timeline.of(spans, self.program.arrows)
        pauses = sorted(
            (max(start - begun, 0.0), min(end - begun, made.makespan))
            for _, some in run
            for start, end in some
        )
        pauses = [(start, end) for start, end in pauses if start < end]
        return Timeline(made.spans, made.arrows, tuple(pauses), doubt=doubt, hosts=self.hosts)


def _shifted(run: OneRun, shift: float) -> OneRun:
    """Return a run by the clock of rank 0."""
    times, pauses = run
    moved = [
        (place, start and start + shift, end and end + shift, nbytes)
        for place, start, end, nbytes in times
    ]
    return moved, [(start + shift, end + shift) for start, end in pauses]


def offset(own: Session) -> tuple[float, float]:
    """Return what to add to this rank's clock to get that of rank 0, and its doubt. Collective."""
    row = torch.zeros(1, dtype=torch.float64)
    wire = own.wire()
    try:
        if own.rank:
            return min(_trips(wire, row), key=itemgetter(1))
        for rank in range(1, own.size):
            for _ in range(_TRIPS):
                wire.receive(row.view(torch.uint8), rank, _TAG).wait()
                row[0] = time.perf_counter()
                wire.send(row.view(torch.uint8), rank, _TAG).wait()
    except RuntimeError as error:
        raise own.cause("to compare clocks with rank 0") from error
    return 0.0, 0.0


def _trips(wire: Wire, row: torch.Tensor) -> Iterator[tuple[float, float]]:
    """Yield the offset and the doubt of each round trip to rank 0."""
    for _ in range(_TRIPS):
        asked = time.perf_counter()
        wire.send(row.view(torch.uint8), 0, _TAG).wait()
        wire.receive(row.view(torch.uint8), 0, _TAG).wait()
        answered = time.perf_counter()
        yield float(row[0]) - (asked + answered) / 2, (answered - asked) / 2


def _same_count(counts: Sequence[str]) -> str:
    """Raise ScheduleError unless all ranks profile as many runs."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            what = f"rank {rank} profiles {count} runs, and rank 0 {counts[0]}"
            raise ScheduleError(f"{what}; all ranks must make the same calls, in one order")
    return ""
