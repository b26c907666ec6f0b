"""Copy a graph task by task into a new one, which may have more inputs, or tasks joined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from autosched._lib.tree import flatten, transform
from autosched.graph.graph import Graph
from autosched.graph.including import repeat
from autosched.graph.task import Seconds, Task
from autosched.graph.value import Value

G = TypeVar("G", bound=Graph)


class Copying:
    """A graph that is copied: ``values`` has the new ones, by their indices in the old graph.

    The new graph is of the same class, with the same other attributes and coordinate frames. It has
    the sources of the old one from the beginning.
    """

    def __init__(self, old: Graph):
        self.old = old
        self.new = copy.copy(old)
        Graph.__init__(self.new, old.name, generators=old.generators)
        self.new.storages.frames = old.storages.frames
        self.values = {value.index: self.new.add_source(value) for value in old.sources}

    def repeat(
        self,
        task: Task,
        after: Iterable[str] | None = None,
        *,
        instead: Mapping[int, Value] | None = None,
        seconds: Seconds | None = None,
        suffix: str = "",
    ) -> None:
        """Add a task, by default after those of the old graph, and with the seconds it had.

        It reads some values ``instead`` of its own. With a ``suffix``, its names are new ones.
        """
        if after is None:
            orders = (d.task for d in task.dependencies if d.kind == "order")
            after = [self.old.tasks[before].name for before in orders]
        made = [self.old.values[use.value] for use in task.outputs]
        label = self.new.fresh(task.name + suffix) if suffix else task.name

        def name_of(leaf: Value) -> str:
            if leaf.name == task.name:
                return label
            return self.new.fresh(leaf.name + suffix) if suffix else leaf.name

        results = repeat(
            self.new,
            self.old,
            task,
            {**self.values, **instead} if instead else self.values,
            label,
            outputs=transform(name_of, task.result),
            touched=None if task.view else task.region,
            regions=[value.region for value in made],
            on=task.device,
            after=after,
            seconds=task.seconds if seconds is None else seconds,
            sizes=[value.nbytes for value in made],
        )
        self.note(made, results)

    def note(self, made: Sequence[Value], results: Any) -> None:
        """Note what stands for old values."""
        self.values.update(zip([value.index for value in made], flatten(results), strict=True))

    def finish(self) -> Graph:
        """Return the new graph, with the outputs, and what is kept together.

        There, a view that was left out is replaced by its base.
        """
        for name, index in self.old.outputs.items():
            self.new.output(**{name: self.values[index]})
        for index, region in self.old.storages.reshaped.items():
            if index in self.values:
                self.new.storages.reshaped[self.values[index].index] = region
        for bond in self.old.kept_together:
            seen = [
                index if index in self.values else self.old.values[index].root for index in bond
            ]
            if found := [self.values[index] for index in seen if index in self.values]:
                self.new.together(*found)
        return self.new


def with_seconds(graph: G, seconds: Mapping[str, Seconds]) -> G:
    """Return a copy of a graph with these seconds of tasks, by name."""
    copying = Copying(graph)
    for task in graph.tasks:
        copying.repeat(task, seconds=seconds.get(task.name))
    return cast(G, copying.finish())
