"""Rewrite templates: split gradients of convolutions, recompute the forward pass.

A convolution's gradients are one operator; for zero bubbles it becomes two. For checkpointing, the
forward pass is computed a second time. Each function takes and returns a template and the stage of
each task. Knows no device and no order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from autosched import Graph, Here, Task, Value
from autosched.parallel.template import Template, inputs_like

__all__ = ["checkpointed", "drawn_ahead", "halved"]

Stages = Mapping[str, int]  # of tasks, by name


def drawn_ahead(one: Template) -> Template:
    """Draw random numbers before anything else, where they depend only on a shape.

    Masks of dropout are drawn into memory "like" an activation. It is replaced by memory of the
    same shape, which depends on no task. Otherwise all tasks that draw, on all devices, would be
    ordered one after another together with their predecessors.
    """
    graph = one.graph
    drawing = {use.value for task in graph.tasks if task.random for use in task.writes}
    like = [
        t
        for t in graph.tasks
        if _name(t).startswith("empty_like") and t.outputs[0].value in drawing
    ]
    if not like:
        return one
    copy = _Copy(one)
    looks = _looks(one, {task.outputs[0].value for task in like})
    for task in graph.tasks:
        if task not in like:
            copy.take(task)
            continue
        look = looks[task.outputs[0].value]
        copy.flush()
        copy.values[graph.values[task.outputs[0].value].name] = copy.graph.record(
            torch.empty_strided, (tuple(look.shape), look.stride()),
            {"dtype": look.dtype, "device": Here(look.device)}, name=task.name, origin=task.origin,
        )  # fmt: skip
    return copy.done(one)


def _looks(one: Template, wanted: Set[int]) -> dict[int, torch.Tensor]:
    """Return fake tensors for some values (by index), by running all tasks on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        data: dict[int, Any] = {
            v.index: mode.from_tensor(one.examples[v.name] if v.tensor is None else v.tensor)
            for v in one.graph.sources
        }
        found: dict[int, torch.Tensor] = {}
        for task in one.graph.tasks:
            args, kwargs = tree_map(lambda leaf: _known(leaf, data), (task.args, dict(task.kwargs)))
            assert task.fn is not None
            for value, item in task.results(task.fn(*args, **kwargs)):
                data[value] = item
                if value in wanted:
                    found[value] = item
    return found


def _known(leaf: Any, data: Mapping[int, Any]) -> Any:
    return (
        data[leaf.index]
        if isinstance(leaf, Value)
        else leaf.usual
        if isinstance(leaf, Here)
        else leaf
    )


def _name(task: Task) -> str:
    """Return the name of a task without its module's."""
    return task.name.rpartition(".")[2]


def halved(one: Template, stage: Stages) -> tuple[Template, Stages]:
    """Split the gradients of convolutions: by the input, which others wait for, and by the weights."""
    copy = _Copy(one)
    found = dict(stage)
    for task in one.graph.tasks:
        mask = _convolution(task)
        if len(mask) == 3 and mask[0] and any(mask[1:]):
            for half, needs in (("input", (True, False, False)), ("weight", (False, *mask[1:]))):
                made = copy.call(task, (*task.args[:-1], needs), f"{task.name}.{half}")
                copy.note(
                    {use.value for use, need in zip(task.outputs, needs, strict=True) if need},
                    task,
                    made,
                )
                found[f"{task.name}.{half}"] = stage[task.name]
        else:
            copy.take(task)
    return copy.done(one), found


def _convolution(task: Task) -> tuple[bool, ...]:
    """Return which gradients the backward of a convolution computes; nothing for other tasks."""
    return tuple(task.args[-1]) if _name(task).startswith("convolution_backward") else ()


def checkpointed(one: Template, stage: Stages) -> tuple[Template, Stages]:
    """Recompute the forward of each stage in its backward, so that only the stage's inputs are kept between them.

    Tasks that draw random numbers, or write values that existed before, are not repeated, and their
    results are kept. Of batch norms, all but writing the running statistics is repeated.
    """
    graph = one.graph
    copy = _Copy(one)
    found = dict(stage)
    backward = {task.index for task in graph.tasks if task.origin.phase == "backward"}
    for task in graph.tasks:
        if task.index not in backward:
            copy.take(task)
    order = list(dict.fromkeys(stage[graph.tasks[i].name] for i in sorted(backward)))
    for number in order:
        own = [i for i in sorted(backward) if stage[graph.tasks[i].name] == number]
        again = _again(
            graph,
            own,
            {i for i, t in enumerate(graph.tasks) if i not in backward and stage[t.name] == number},
        )
        names = copy.repeat(again)
        found.update((f"again.{name}", number) for name in names)
        for i in own:
            copy.take(graph.tasks[i])
        copy.forget()
    return copy.done(one), found


class _Copy:
    """A new graph with tasks of a template's; ``values`` maps old values to new ones, by name."""

    def __init__(self, one: Template):
        self.old, self.graph = one.graph, Graph(one.graph.name)
        self.values: dict[str, Value] = dict(inputs_like(self.graph, one.graph))
        self.instead: dict[str, Value] = {}
        self.pending: list[str] = []

    def take(self, task: Task) -> None:
        """Add a task unchanged, later, together with the next ones."""
        self.pending.append(task.name)

    def flush(self) -> None:
        """Add the tasks that were taken."""
        if self.pending:
            self.values.update(
                self.graph.include(self.old, {**self.values, **self.instead}, only=self.pending)
            )
            self.pending = []

    def call(self, task: Task, args: tuple[Any, ...], name: str) -> Any:
        """Add a task with other arguments, which contain old values; return its results."""
        self.flush()
        known = {**self.values, **self.instead}
        args = tuple(known[arg.name] if isinstance(arg, Value) else arg for arg in args)
        assert task.fn is not None
        return self.graph.record(
            task.fn,
            args,
            task.kwargs,
            name=name,
            outputs=len(task.outputs),
            origin=task.origin,
        )

    def note(self, wanted: Iterable[int], task: Task, made: Any) -> None:
        """Let some results of a call replace those of the old task."""
        for use, value in zip(task.outputs, made, strict=True):
            if use.value in wanted:
                self.values[self.old.values[use.value].name] = value

    def repeat(self, tasks: Iterable[Task]) -> list[str]:
        """Add tasks again, as ``again.NAME``.

        Later tasks read their results. Return their names.
        """
        self.flush()
        names: list[str] = []
        for task in tasks:
            if _norm(task) is not None:
                made = self.call(task, _without_statistics(task), f"again.{task.name}")
                for use, value in zip(task.outputs, made, strict=True):
                    self.instead[self.old.values[use.value].name] = value
            else:
                self.instead.update(
                    self.graph.include(
                        self.old, {**self.values, **self.instead}, prefix="again.", only=[task.name]
                    )
                )
            names.append(task.name)
        return names

    def forget(self) -> None:
        """Let later tasks read the first results again."""
        self.flush()
        self.instead = {}

    def done(self, one: Template) -> Template:
        """Return the template with the new graph."""
        self.flush()
        outputs = {label: self.old.values[index].name for label, index in self.old.outputs.items()}
        self.graph.output(**{label: self.values[name] for label, name in outputs.items()})
        return replace(one, graph=self.graph)


def _norm(task: Task) -> int | None:
    """Return the positions of the running statistics among the arguments.

    None for others than batch norms in training.
    """
    if _name(task).startswith(("native_batch_norm", "cudnn_batch_norm")) and task.args[5] is True:
        return 3
    return None


def _without_statistics(task: Task) -> tuple[Any, ...]:
    return (*task.args[:3], None, None, *task.args[5:])


def _again(graph: Graph, backward: Iterable[int], forward: set[int]) -> list[Task]:
    """Return the tasks of a stage's forward to repeat for its backward, in order."""
    fixed = _fixed(graph, forward)
    found: set[int] = set()
    pending = [use.value for i in backward for use in graph.tasks[i].reads]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if value in seen or graph.values[value].root in fixed:
            continue
        seen.add(value)
        for i in _made_by(graph, value, forward):
            if i not in found:
                found.add(i)
                pending += [use.value for use in graph.tasks[i].reads]
                pending += [use.value for use in graph.tasks[i].outputs]
    return [graph.tasks[i] for i in sorted(found)]


def _made_by(graph: Graph, value: int, among: set[int]) -> list[int]:
    """Return the tasks that compute a value, or write its memory."""
    root = graph.values[value].root
    touching = {graph.values[value].producer, graph.values[root].producer}
    return [
        i for i in among
        if i in touching or any(graph.values[use.value].root == root for use in graph.tasks[i].changes)
    ]  # fmt: skip


def _fixed(graph: Graph, forward: set[int]) -> set[int]:
    """Return the memory (its root) that cannot be recomputed: it depends on random numbers, or on changed values.

    Also the memory that such tasks have accessed.
    """
    fixed: set[int] = set()
    sources = {value.index for value in graph.sources}
    tasks = [graph.tasks[i] for i in forward if _norm(graph.tasks[i]) is None]
    changed = {graph.values[use.value].root for task in tasks for use in task.changes} & sources
    for i in sorted(forward):
        task = graph.tasks[i]
        roots = [graph.values[use.value].root for use in (*task.outputs, *task.changes)]
        foreign = [
            r for r in (graph.values[use.value].root for use in task.changes) if r in sources
        ]
        stale = _norm(task) is None and any(
            graph.values[use.value].root in changed for use in task.reads
        )
        if (
            task.random
            or stale
            or (foreign and _norm(task) is None)
            or any(graph.values[r].producer not in forward for r in roots if r not in sources)
        ):
            fixed.update(roots)
    return fixed
