"""Join the steps of a plan where waiting for another stream costs more than it gains.

A step between two waits may be shorter than a wait. It is joined with its neighbour on a stream, or
with a step of another stream of its device that it waits for or that waits for it, if the makespan
does not become longer: so there are fewer waits, and fewer regions to compile. This is the
clustering of Sarkar ("Partitioning and Scheduling Parallel Programs for Multiprocessors", 1989),
begun with the clusters of a plan, and with waits for what he calls communication.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from autosched._lib.topological import topological_order
from autosched.program.program import Stream

__all__ = ["Step", "joined", "makespan"]

_ROUNDING = 1 + 1e-9


class Step(NamedTuple):
    """A task or a copy of a plan.

    ``before`` are the numbers of the steps that must come before it. It starts ``wait_seconds``
    after those of them that are on other streams. ``joinable`` says whether it can become a part of
    a region; each that does saves ``launch_seconds``, or its ``seconds`` if these are fewer.
    """

    streams: tuple[Stream, ...]
    seconds: float
    before: Collection[int]
    joinable: bool = True
    wait_seconds: float = 0.0
    launch_seconds: float = 0.0


def makespan(steps: Sequence[Step]) -> float:
    """Return the seconds of a plan, of which each stream executes its steps in the order given.

    >>> a, b = (Stream("cpu", name) for name in ("compute", "compute1"))
    >>> makespan([Step((a,), 1, []), Step((b,), 2, [0], wait_seconds=0.5), Step((a,), 3, [])])
    4.0
    """
    return _plan_of(steps).makespan


def joined(steps: Sequence[Step]) -> list[list[int]]:
    """Return which steps to join, as numbers, in groups of two or more.

    ``steps`` are in the order of their starts. All groups can be executed as one step each without
    a cycle.

    >>> a, b = (Stream("cpu", name) for name in ("compute", "compute1"))
    >>> steps = Step((a,), 9, []), Step((b,), 9, []), Step((a,), 1, [0, 1], wait_seconds=2)
    >>> joined([*steps, Step((b,), 1, [2], wait_seconds=2)])
    [[2, 3]]
    """
    plan = _plan_of(steps)
    improved = True
    while improved:
        improved = False
        for part, whole in plan.joins():
            if part in plan.parts and whole in plan.parts:
                made = plan.joined(part, whole)
                if made.makespan <= plan.makespan * _ROUNDING:
                    plan, improved = made, True
    return [sorted(parts) for parts in plan.parts.values() if len(parts) > 1]


def _plan_of(steps: Sequence[Step]) -> _Plan:
    order: dict[Stream, list[int]] = {}
    for i, step in enumerate(steps):
        for stream in step.streams:
            order.setdefault(stream, []).append(i)
    return _Plan(steps, order, {i: [i] for i in range(len(steps))})


class _Plan:
    """Steps, some of them joined: ``parts`` has the numbers of those that are executed as one.

    The keys of ``parts`` are those in whose place they are executed, and are what ``order`` has in
    the order of each stream. ``makespan`` is infinite if there is a cycle.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        order: Mapping[Stream, Sequence[int]],
        parts: Mapping[int, Sequence[int]],
    ):
        self._steps = steps
        self._order = order
        self.parts = parts
        self._seconds = [0.0] * len(steps)
        self._before: list[set[int]] = [set() for _ in steps]
        place = {i: key for key, joined in parts.items() for i in joined}
        for key, numbers in parts.items():
            launches = [min(steps[i].launch_seconds, steps[i].seconds) for i in numbers]
            saved = sum(launches) - max(launches)
            self._seconds[key] = sum(steps[i].seconds for i in numbers) - saved
            self._before[key] = {place[j] for i in numbers for j in steps[i].before} - {key}
        for row in order.values():
            for i, j in pairwise(row):
                self._before[j].add(i)
        self._topological = topological_order(self._before, range(len(steps)))
        self._end = [0.0] * len(steps)
        for j in self._topological:
            start = max((self._end[i] + self._gap(i, j) for i in self._before[j]), default=0.0)
            self._end[j] = start + self._seconds[j]
        is_cyclic = len(self._topological) < len(steps)
        self.makespan = math.inf if is_cyclic else max(self._end, default=0.0)

    def joins(self) -> list[tuple[int, int]]:
        """Return what can be joined: first what is on the shortest paths.

        Of each pair the first step would be executed in the place of the second one.
        """
        rest = [0.0] * len(self._steps)
        for j in reversed(self._topological):
            for i in self._before[j]:
                rest[i] = max(rest[i], self._gap(i, j) + self._seconds[j] + rest[j])

        def path(pair: tuple[int, int]) -> float:
            i, j = sorted(pair, key=self._end.__getitem__)
            return self._end[i] + self._seconds[j] + rest[j]

        return sorted(self._pairs(), key=path)

    def joined(self, part: int, whole: int) -> _Plan:
        """Return the plan in which a step is executed in the place of another one, with it."""
        order = {stream: [i for i in row if i != part] for stream, row in self._order.items()}
        parts = {key: numbers for key, numbers in self.parts.items() if key != part}
        parts[whole] = [*parts[whole], *self.parts[part]]
        return _Plan(self._steps, order, parts)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for row in self._order.values():
            for i, j in pairwise(row):
                if self._is_joinable(i) and self._is_joinable(j):
                    yield j, i
        for j in self.parts:
            (own, *others) = self._steps[j].streams
            for i in sorted(self._before[j]) if self._is_joinable(j) and not others else ():
                (stream, *_) = self._steps[i].streams
                if self._is_joinable(i) and stream != own and stream.device == own.device:
                    yield j, i
                    yield i, j

    def _is_joinable(self, i: int) -> bool:
        return self._steps[i].joinable and len(self._steps[i].streams) == 1

    def _gap(self, i: int, j: int) -> float:
        """Return the seconds between two steps of which the second one needs the first."""
        own = self._steps[j].streams
        together = any(stream in own for stream in self._steps[i].streams)
        return 0.0 if together else self._steps[j].wait_seconds
