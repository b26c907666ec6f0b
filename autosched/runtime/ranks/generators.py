"""Random numbers of several ranks in one process, which torch gives one generator.

Each rank has a state of its own, which stands in that generator while a task of the rank draws. All
ranks begin in the state in which the generator is found, as processes do that are seeded alike, and
begin again where it is found in another state than the last draw left: it was seeded, or something
else drew from it. It is left in the state of the first rank that draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch

from autosched._lib.forks import rlock
from autosched.graph.graph import Graph, Task


class Drawing:
    """Lets tasks draw from the generators of their ranks; ``devices`` are those of tasks, by name."""

    _lock = rlock()
    _states: ClassVar[dict[int, torch.Tensor]] = {}  # of all ranks
    _begin = _left = torch.empty(0, dtype=torch.uint8)

    def __init__(self, graph: Graph, devices: Mapping[str, str], ranks: Mapping[str, int]):
        self._ranks = {
            task.name: ranks[devices[task.name]]
            for task in graph.tasks
            if task.random and task.name in devices
        }
        self._first = min(self._ranks.values(), default=0)

    @contextlib.contextmanager
    def __call__(self, task: Task) -> Iterator[None]:
        """Let this thread draw for the rank of a task, which is called meanwhile."""
        rank = self._ranks.get(task.name)
        if rank is None:
            yield
            return
        known = Drawing
        with known._lock:
            found = torch.get_rng_state()
            if not torch.equal(found, known._left):
                known._states.clear()
                known._begin = found
            torch.set_rng_state(known._states.get(rank, known._begin))
            try:
                yield
            finally:
                known._states[rank] = torch.get_rng_state()
                known._left = known._states[rank] if rank == self._first else found
                torch.set_rng_state(known._left)
