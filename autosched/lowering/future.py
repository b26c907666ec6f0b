"""Predict the next reads of values while runs are walked.

Belady's rule (IBM Systems Journal 5, 1966) needs this: it evicts the block whose next use is
latest. Positions are those of runs in issue order. A value that is needed at the end has a next use
at ``len(runs)``. This module knows no bytes and no copies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from autosched.graph.graph import Graph, Task, Use
from autosched.program.program import Run

__all__ = ["Future"]


class Future:
    """The remaining reads of each version by device, and all uses of memory written by regions."""

    def __init__(
        self, graph: Graph, tasks: Sequence[Task], runs: Sequence[Run], outputs: Mapping[str, str]
    ):
        self.graph = graph
        self.reads: dict[Use, dict[str, deque[int]]] = {}
        self.touches: dict[tuple[int, str], deque[int]] = {}  # by root and device
        self.runs: dict[str, deque[Task]] = {}  # by device
        self.anywhere: set[Use] = set()  # outputs that may be on any device at the end
        self.partial = {
            value.root
            for value in graph.values
            if graph.in_parts(value.index)
            and any(map(graph.last_version, graph.members(value.index)))
        }
        for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
            self._add(i, task, run.stream.device)
        for label, index in graph.outputs.items():
            use = Use(index, graph.last_version(index))
            if label in outputs:
                self.reads.setdefault(use, {}).setdefault(outputs[label], deque()).append(len(runs))
            else:
                self.anywhere.add(use)

    def _add(self, i: int, task: Task, device: str) -> None:
        self.runs.setdefault(device, deque()).append(task)
        for use in self.needs(task):
            self.reads.setdefault(use, {}).setdefault(device, deque()).append(i)
        for root in self._roots(task):
            if root in self.partial:
                self.touches.setdefault((root, device), deque()).append(i)

    def needs(self, task: Task) -> Iterator[Use]:
        """Yield the versions that a task needs; any will do of memory written by regions."""
        for use in task.reads:
            if self.graph.touched(task, use.value) is None:
                yield use
            elif self.graph.values[use.value].root not in self.partial:
                yield Use(use.value, 0)

    def done(self, task: Task, device: str) -> None:
        """Remove the reads of a task that has been issued on its device."""
        self.runs[device].popleft()
        for use in self.needs(task):
            self.reads[use][device].popleft()
        for root in self._roots(task):
            touches = self.touches.get((root, device))
            if touches:
                touches.popleft()

    def _roots(self, task: Task) -> dict[int, None]:
        return dict.fromkeys(
            self.graph.values[use.value].root for use in (*task.reads, *task.outputs)
        )

    def next_read(self, use: Use, device: str) -> float:
        """Return when a device reads a version next; infinity if it does not."""
        positions = self.reads.get(use, {}).get(device)
        return positions[0] if positions else math.inf

    def next_touch(self, root: int, device: str) -> float:
        """Return when a device next touches memory written by regions; infinity if it does not."""
        positions = self.touches.get((root, device))
        return positions[0] if positions else math.inf

    def readers(self, use: Use) -> list[str]:
        """Return the devices that still read a version."""
        return [device for device, positions in self.reads.get(use, {}).items() if positions]
