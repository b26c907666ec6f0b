"""Copy a graph task by task into a new one, which may have more inputs, or tasks joined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autosched._lib.tree import flatten, transform
from autosched.graph.graph import Graph
from autosched.graph.including import repeat
from autosched.graph.task import Task
from autosched.graph.value import Value


class Copying:
    """A graph that is copied: ``values`` has the new ones, by their indices in the old graph.

    The new graph is of the same class, with the same other attributes and coordinate frames. It has
    the sources of the old one from the beginning.
    """

    def __init__(self, old: Graph):
        self.old = old
        self.new = copy.copy(old)
        Graph.__init__(self.new, old.name, generators=old.builder.generators)
        self.new.builder.storages.frames = old.builder.storages.frames
        self.values = {value.index: self.new.builder.add_source(value) for value in old.sources}

    def repeat(
        self, task: Task, after: Iterable[str], instead: Mapping[int, Value] | None = None
    ) -> None:
        """Add a task after others, given by name; it reads some values ``instead`` of its own."""
        made = [self.old.values[use.value] for use in task.outputs]
        results = repeat(
            self.new,
            self.old,
            task,
            {**self.values, **instead} if instead else self.values,
            task.name,
            outputs=transform(lambda leaf: leaf.name, task.result),
            touched=None if task.view else task.region,
            regions=[value.region for value in made],
            on=task.device,
            after=after,
            seconds=task.seconds,
        )
        self.note(made, results)

    def note(self, made: Sequence[Value], results: Any) -> None:
        """Note what stands for old values."""
        for value, twin in zip(made, flatten(results), strict=True):
            twin.nbytes = value.nbytes
            self.values[value.index] = twin

    def finish(self) -> Graph:
        """Return the new graph, with the outputs, and what is kept together.

        There, a view that was left out is replaced by its base.
        """
        for name, index in self.old.outputs.items():
            self.new.output(**{name: self.values[index]})
        for bond in self.old.kept_together:
            seen = [
                index if index in self.values else self.old.values[index].root for index in bond
            ]
            if found := [self.values[index] for index in seen if index in self.values]:
                self.new.together(*found)
        return self.new
