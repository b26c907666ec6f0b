"""Random numbers of several ranks in one process, which torch gives one generator.

Each rank has a state of its own, which stands in that generator while a task of the rank draws. All
ranks begin in the state in which the generator is found, as processes do that are seeded alike, and
begin again where it is found in another state than the last draw left: it was seeded, or something
else drew from it. It is left in the state of the first rank that draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from autosched._lib.forks import rlock
from autosched.graph.graph import Graph, Task


class _Generators:
    """The states of all ranks."""

    def __init__(self) -> None:
        self._lock = rlock()
        self._states: dict[int, torch.Tensor] = {}
        self._begin = self._left = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def of(self, rank: int, leaves: bool) -> Iterator[None]:
        """Let this thread draw for a rank; ``leaves``: torch's generator is left in its state."""
        with self._lock:
            found = torch.get_rng_state()
            if not torch.equal(found, self._left):
                self._states.clear()
                self._begin = found
            torch.set_rng_state(self._states.get(rank, self._begin))
            try:
                yield
            finally:
                self._states[rank] = torch.get_rng_state()
                self._left = self._states[rank] if leaves else found
                torch.set_rng_state(self._left)


_GENERATORS = _Generators()


class Drawing:
    """Lets tasks draw from the generators of their ranks; ``devices`` are those of tasks, by name.

    >>> graph = Graph(generators={"cpu:0": "rank 0", "cpu:1": "rank 1"})
    >>> tasks = [graph.add(torch.rand, 1, on=device) for device in ("cpu:0", "cpu:1")]
    >>> drawing = Drawing(graph, {"rand": "cpu:0", "rand_1": "cpu:1"}, {"cpu:0": 0, "cpu:1": 1})
    >>> _ = torch.manual_seed(0)
    >>> found = []
    >>> for task in graph.tasks:
    ...     with drawing(task):
    ...         found.append(torch.rand(1))
    >>> found[0] == found[1]
    tensor([True])
    """

    def __init__(self, graph: Graph, devices: Mapping[str, str], ranks: Mapping[str, int]):
        self._ranks = {
            task.name: ranks[devices[task.name]]
            for task in graph.tasks
            if task.random and task.name in devices
        }
        self._first = min(self._ranks.values(), default=0)

    def __call__(self, task: Task) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a task is called."""
        rank = self._ranks.get(task.name)
        if rank is None:
            return contextlib.nullcontext()
        return _GENERATORS.of(rank, rank == self._first)
