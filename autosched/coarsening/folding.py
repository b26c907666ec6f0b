"""Determine which tasks may be merged, and which are folded into those that need their results.

A view costs nothing, and the results of a task can share memory with at most one argument. So a
merged task takes the base of a view as its argument and makes the view itself; each other task that
needs the view does so, too. This preserves the results unless a write distinguishes parts of that
memory, or changes its shape. Tasks and views of such memory are left unmerged.

This module knows dependencies and memory, no cost and no module.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from autosched.graph.constraints import by_value, released
from autosched.graph.effects import MOVE, RESHAPE, effects_of
from autosched.graph.graph import Graph, Task


class Folding:
    """Classify the tasks of a graph: tasks that may be ``merged``, and tasks that remain.

    ``remaining`` are all tasks but the views that are folded away, because each task that needs one
    makes it itself.

    >>> graph = Graph()
    >>> x, w = graph.inputs("x", "w")
    >>> graph.output(y=x @ w.t(), z=x.t())
    >>> folding = Folding(graph, {})
    >>> [graph.tasks[i].name for i in sorted(folding.remaining)], sorted(folding.merged)
    (['matmul', 't_1'], [1])
    """

    def __init__(self, graph: Graph, bound: Mapping[str, str]):
        self.graph = graph
        # Roots of memory whose views and writers are left unmerged.
        self.split_memory = self._split_memory()
        while more := self._needed_and_written() - self.split_memory:
            self.split_memory |= more
        needed = self._needed()
        self.remaining = {
            task.index for task in graph.tasks if not self.foldable(task) or task.index in needed
        }
        self.merged = {
            task.index for task in graph.tasks if not task.view and not self._is_fixed(task)
        }
        self.devices = _devices(graph, bound)  # by task, the device to which it is bound
        self.before: dict[int, list[int]] = {}  # of remaining tasks, their remaining predecessors
        # of tasks that may be folded, their remaining predecessors
        self.predecessors_of_folded: dict[int, list[int]] = {}
        self._follow()

    def foldable(self, task: Task) -> bool:
        """Whether a task is a view that may be made at any time from its argument."""
        return (
            task.view
            and len(task.reads) == 1
            and self._root(task.reads[0].value) not in self.split_memory
            and all(dependency.kind != "order" for dependency in task.dependencies)
        )

    def folded(self, task: Task) -> list[int]:
        """Return the folded tasks (indices) that a merged task runs itself for this part."""
        found: dict[int, None] = {}
        pending = [use.value for use in task.reads]
        while pending:
            producer = self.graph.values[pending.pop()].producer
            if (
                producer is not None
                and producer not in found
                and self.foldable(self.graph.tasks[producer])
            ):
                found[producer] = None
                pending += [use.value for use in self.graph.tasks[producer].reads]
        return list(found)

    def follows(self, task: int, first: int) -> list[int]:
        """Return the remaining predecessors that a dependency on ``first`` stands for.

        A merged task runs folded tasks itself, and so depends on the predecessors of these.
        """
        is_folded = first in self.predecessors_of_folded and (
            task in self.merged or first not in self.remaining
        )
        return self.predecessors_of_folded[first] if is_folded else [first]

    def _follow(self) -> None:
        """Find the remaining predecessors of each task."""
        for task in self.graph.tasks:
            first = [dependency.task for dependency in task.dependencies]
            if self.foldable(task):
                found = (self.predecessors_of_folded.get(other, [other]) for other in first)
                self.predecessors_of_folded[task.index] = list(dict.fromkeys(chain(*found)))
            if task.index in self.remaining:
                self.before[task.index] = list(
                    dict.fromkeys(chain(*(self.follows(task.index, i) for i in first)))
                )

    # ---- what is not merged

    def _root(self, value: int) -> int:
        return self.graph.values[value].root

    def _split_memory(self) -> set[int]:
        """Return the roots of memory that tasks write in part, or give another shape."""
        found = set()
        for task in self.graph.tasks:
            for use in task.writes:
                part = (
                    task.region[1]
                    if task.region and task.region[0] == use.value
                    else self.graph.values[use.value].region
                )
                if part.bounds or _reshapes(task):
                    found.add(self._root(use.value))
        return found

    def _is_fixed(self, task: Task) -> bool:
        """Whether a non-view task is never merged.

        Its result may be its argument, or it touches parts of memory. A task that makes or writes
        memory whose parts are distinguished must share a device with its views, and only with them.
        """
        touched = any(
            self._root(use.value) in self.split_memory for use in (*task.writes, *task.outputs)
        )
        return touched or task.reads_file or task.region is not None or self._may_alias(task)

    def _may_alias(self, task: Task) -> bool:
        return not task.view and any(self._root(use.value) != use.value for use in task.outputs)

    def _needed(self) -> set[int]:
        """Return the views that outputs or fixed tasks need."""
        needed = set(self.graph.outputs.values())
        found = set()
        for task in reversed(self.graph.tasks):
            if task.view:
                if self.foldable(task) and not any(use.value in needed for use in task.outputs):
                    continue
                found.add(task.index)
            elif not self._is_fixed(task):
                continue
            needed.update(use.value for use in task.reads)
        return found

    def _needed_and_written(self) -> set[int]:
        """Return the roots of written memory that two values of a merged graph would share."""
        aliases = {task.index for task in self.graph.tasks if self._may_alias(task)}
        outputs = (
            use for index in self._needed() | aliases for use in self.graph.tasks[index].outputs
        )
        return {
            root for root in (self._root(use.value) for use in outputs) if self._is_written(root)
        }

    def _is_written(self, root: int) -> bool:
        return any(self.graph.last_version(member) for member in self.graph.members(root))


def _devices(graph: Graph, bound: Mapping[str, str]) -> list[str | None]:
    """Return by task the device to which it, or a task that is kept together with it, is bound."""
    own = [bound.get(task.name, task.device) for task in graph.tasks]
    kept = released(graph, bound) if bound else graph.kept_together
    if not kept:
        return own
    import networkx

    bonds = by_value(tuple(graph.values[value].root for value in values) for values in kept)
    ties: networkx.Graph[Any] = networkx.Graph()
    for task in graph.tasks:
        roots = {graph.values[use.value].root for use in (*task.changes, *task.outputs)}
        some = [bond for root in roots if not task.view for bond in bonds.get(root, ())]
        ties.add_edges_from((task.index, bond) for bond in some)
    for members in networkx.connected_components(ties):
        tied = sorted(item for item in members if isinstance(item, int))
        device = next((own[i] for i in tied if own[i] is not None), None)
        for i in tied:
            own[i] = device if own[i] is None else own[i]
    return own


def _reshapes(task: Task) -> bool:
    return (
        task.fn is not None and effects_of(task.fn, task.args, task.kwargs).name in RESHAPE | MOVE
    )
