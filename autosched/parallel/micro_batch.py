"""Merge the operators of a micro-batch into tasks: forward and backward of each stage.

Tasks have roles, named as in ``torch.distributed.pipelining``: F, forward; B, backward; or,
separately, I, the part of backward that earlier stages wait for, and W, gradients of weights, which
is the rest of a stage's backward. R generates the random numbers of a stage and waits for nothing.
With several stages, the name of a task has the number of its stage: ``F0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autosched import Costs, Graph, Machine, Task, merge
from autosched.parallel.costs import tabulated
from autosched.parallel.template import Template, producer_of

Size = tuple[int, bool]  # the rows of a micro-batch, and whether it is the first of a step


@dataclass(frozen=True)
class Role:
    """The role of a task: a stage's forward (F), backward (B or I and W) or random numbers (R).

    ``part`` numbers the parts into which buckets divide it.
    """

    stage: int
    kind: Literal["F", "B", "I", "W", "R"]
    part: int = 0

    def label(self, several_stages: bool, several_parts: bool) -> str:
        """Return the name of its task."""
        has_part = self.part or (several_parts and self.kind not in "FR")
        stage = str(self.stage) if several_stages else ""
        part = f".{self.part}" if has_part else ""
        return f"{self.kind}{stage}{part}"


@dataclass(frozen=True)
class MicroBatch:
    """A template with merged tasks.

    ``roles`` has the role of each task, by name, and ``parts`` those of the operators, which have
    ``costs``; ``seconds`` and ``nbytes`` are the costs of tasks and values.
    """

    template: Template
    graph: Graph
    roles: Mapping[str, Role]
    seconds: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, int]
    parts: Mapping[str, Role]
    costs: Costs

    def costing(self, costs: Costs, machine: Machine) -> MicroBatch:
        """Return it with other costs of its operators."""
        seconds, nbytes = tabulated(self.graph, costs, machine)
        return replace(self, seconds=seconds, nbytes=nbytes, costs=costs)

    def apart(self, machine: Machine) -> MicroBatch:
        """Return it with a task for each operator, so that some can be repeated.

        Sums of gradients follow as soon as these are there.
        """
        graph = self.template.graph

        def when(name: str) -> float:
            task = graph.task(name)
            if not name.startswith("sum."):
                return task.index
            return max(before.task for before in task.dependencies) + 0.5

        roles = {name: self.parts[name] for name in sorted(self.parts, key=when)}
        return replace(self, graph=graph, roles=roles).costing(self.costs, machine)

    @cached_property
    def input_stages(self) -> dict[str, int]:
        """The stage of each input: the first that reads it, 0 where none does."""
        values = self.graph.values
        found: dict[str, int] = {}
        for task in self.graph.tasks:
            for use in task.reads if task.name in self.roles else ():
                found.setdefault(values[values[use.value].root].name, self.roles[task.name].stage)
        return {name: found.get(name, 0) for name in self.graph.input_names}

    def output_stage(self, label: str) -> int:
        """Return the stage that computes an output, 0 where none does."""
        values = self.graph.values
        value = values[values[self.graph.outputs[label]].root]
        if value.producer is None:
            return self.input_stages[value.name]
        role = self.roles.get(self.graph.tasks[value.producer].name)
        return 0 if role is None else role.stage

    @cached_property
    def whole(self) -> frozenset[str]:
        """The 0-dimensional inputs of the batch, which all micro-batches read."""
        template = self.template
        return frozenset(name for name in template.batch if not template.examples[name].dim())


def micro_batch_of(
    template: Template,
    stage: Mapping[str, int],
    machine: Machine,
    *,
    split_backward: bool = False,
    buckets: Sequence[Iterable[str]] = (),
) -> MicroBatch:
    """Merge a template's tasks; ``stage`` is the stage of each task, by name.

    With ``split_backward``, backward is I and W; with ``buckets`` of parameters, it is cut where
    the gradients of each are ready.
    """
    graph, costs = template.graph, template.estimate.costs
    roles = _roles(template, stage, split_backward, buckets)
    several = len({role.stage for role in roles.values()}) > 1
    merged = merge(graph, {n: role.label(several, len(buckets) > 1) for n, role in roles.items()})
    of_merged = {
        task.name: roles[next(part.name for part in (*task.parts, task) if not part.view)]
        for task in merged.tasks
        if not task.view
    }
    return MicroBatch(template, merged, of_merged, *tabulated(merged, costs, machine), roles, costs)


def _roles(
    template: Template,
    stage: Mapping[str, int],
    split_backward: bool,
    buckets: Sequence[Iterable[str]],
) -> dict[str, Role]:
    """Return the role of each task that is no view."""
    graph = template.graph
    backward = {task.index for task in graph.tasks if _is_backward(task)}
    stage = {task.name: _stage_of(graph, task, stage) for task in graph.tasks if not task.view}
    inner = _input_gradients(graph, stage, backward) if split_backward else backward
    part: dict[int, int] = {}
    for number, bucket in enumerate(buckets):
        for name in bucket:
            for index in _ancestors(graph, _gradient_task(template, name), part.keys(), backward):
                part[index] = number
    random = _random_tasks(graph)
    roles = {}
    for task in graph.tasks:
        i = task.index
        if task.view:
            continue
        if i not in backward:
            roles[task.name] = Role(stage[task.name], "R" if i in random else "F")
            continue
        kind: Literal["B", "I", "W"] = "B" if not split_backward else "I" if i in inner else "W"
        cut = part.get(i, max(len(buckets) - 1, 0))
        roles[task.name] = Role(stage[task.name], kind, cut)
    return roles


def _random_tasks(graph: Graph) -> set[int]:
    """Return the random tasks that depend on nothing, and those that allocate memory for them."""
    sources = {value.index for value in graph.sources}
    found: set[int] = set()
    for task in graph.tasks:
        before = [d.task for d in task.dependencies if d.kind == "data"]
        others = [graph.tasks[i] for i in before if i not in found]
        is_free = not any(other.reads or other.random for other in others)
        if task.random and is_free and sources.isdisjoint(use.value for use in task.reads):
            found.update((*before, task.index))
    return found


def _is_backward(task: Task) -> bool:
    return task.origin.phase == "backward" or task.name.startswith("sum.")


def _stage_of(graph: Graph, task: Task, stage: Mapping[str, int]) -> int:
    """Return the stage of a task; of an accumulation, that of the gradient's producer."""
    if task.name in stage:
        return stage[task.name]
    root = graph.values[graph.values[task.reads[-1].value].root]
    assert root.producer is not None
    return stage[graph.tasks[root.producer].name]


def _gradient_task(template: Template, name: str) -> int:
    """Return the task (its index) that computes a gradient, or adds it to a sum."""
    graph = template.graph
    output = template.gradients[name]
    accumulates = output not in graph.outputs
    return graph.task(f"sum.{name}.add").index if accumulates else producer_of(graph, output)


def _input_gradients(graph: Graph, stage: Mapping[str, int], backward: Set[int]) -> set[int]:
    """Return the backward tasks that earlier stages need; of the first stage, its first ones."""
    first = [graph.tasks[i] for i in sorted(backward) if stage.get(graph.tasks[i].name) == 0]
    own = [_call(task) for task in first if task.origin.phase == "backward" and not task.view]
    last_call = own[-1] if own else None  # the call that forward began with
    found: set[int] = set()
    for i in sorted(backward, reverse=True):
        task = graph.tasks[i]
        own_stage = stage.get(task.name, 0)
        for user in graph.users[i]:
            other = graph.tasks[user]
            leads_on = stage.get(other.name, own_stage) < own_stage
            enters_last = own_stage == 0 and _call(other) == last_call != _call(task)
            if user in found or leads_on or enters_last:
                found.add(i)
    return found


def _call(task: Task) -> object:
    """Return a key that a backward task shares with its forward task."""
    return task.origin._replace(phase="")


def _ancestors(graph: Graph, task: int, known: Set[int], among: Set[int]) -> list[int]:
    """Return a task and all its predecessors among some tasks, except the known ones."""
    found: dict[int, None] = {}
    pending = [task] if task in among else []
    while pending:
        i = pending.pop()
        if i not in found and i not in known:
            found[i] = None
            pending += [d.task for d in graph.tasks[i].dependencies if d.task in among]
    return list(found)
