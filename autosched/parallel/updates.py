"""Updates: what an optimizer does to the parameters of a stage, cut into tasks that need few gradients each.

An optimizer may update each parameter by itself, or many by one operator; what belongs together is read off the graph.
So the update of one bucket need not wait for the gradients of another. Knows no replica and no order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autosched import Costs, Graph, Machine, merge
from autosched.parallel.pieces import costs_of
from autosched.parallel.template import Place, Template

__all__ = ["Bucket", "Update", "updates_of"]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one stage whose gradients are summed in one go."""

    stage: int
    parameters: Mapping[str, torch.Tensor]

    @cached_property
    def numel(self) -> int:
        """How many elements they have in all."""
        return sum(tensor.numel() for tensor in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """The format of all of them."""
        return next(iter(self.parameters.values())).dtype


@dataclass(frozen=True)
class Update:
    """What an optimizer does with some buckets (their numbers), of one stage.

    ``graph`` takes the gradients as ``gradients.NAME``, or all of a bucket as one flat tensor ``flat.NUMBER``. ``held``
    are its inputs that live on the device, ``counted`` those that live on the host; ``places`` is where outputs are to
    be kept. What runs on the host, such as counting steps, is the same for all replicas.
    """

    stage: int
    buckets: tuple[int, ...]
    graph: Graph
    held: tuple[str, ...]
    counted: tuple[str, ...]
    places: Mapping[str, Place]
    seconds: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, int]
    state: Any  # what holds the model's tensors, and the optimizer's

    @cached_property
    def on_device(self) -> tuple[str, ...]:
        """The tasks of ``graph`` that each replica runs by itself."""
        return tuple(task.name for task in self.graph.tasks if task.device != "host")

    def output(self, name: str) -> str:
        """Return the name of the value that is an output."""
        return made_by(self.graph, name)


def updates_of(
    template: Template, buckets: Sequence[Bucket], numbers: Sequence[int], machine: Machine, flat: bool
) -> list[Update]:
    """Return the updates of one stage's buckets, which have these numbers; ``flat``: their gradients come flat."""
    graph = template.graph
    bucket_of = {name: number for number in numbers for name in buckets[number].parameters}
    together = _Together(numbers)
    component = _components(graph)
    needs: dict[int, list[int]] = {}
    for task in graph.tasks:
        for use in task.reads:
            root = graph.values[graph.values[use.value].root]
            name = root.name.removeprefix("gradients.")
            if root.producer is None and name in bucket_of:
                needs.setdefault(component[task.index], []).append(bucket_of[name])
    for found in needs.values():
        together.join(found)
    unit = {number: needs.get(number, numbers[:1])[0] for number in set(component)}
    made = []
    for first in dict.fromkeys(map(together.find, numbers)):
        tasks = [t.name for t in graph.tasks if together.find(unit[component[t.index]]) == first]
        own = [number for number in numbers if together.find(number) == first]
        made.append(_update(template, buckets, own, tasks, machine, flat))
    return made


def _update(
    template: Template, buckets: Sequence[Bucket], numbers: Sequence[int], tasks: Sequence[str],
    machine: Machine, flat: bool,
) -> Update:  # fmt: skip
    graph, old = Graph(template.graph.name), template.graph
    read = {old.values[use.value].name for name in tasks for use in old.task(name).reads}
    held = [name for name in old.input_names if name in read and not name.startswith("gradients.")]
    values = {name: graph.input(name) for name in held}
    examples = {name: template.examples[name] for name in held}
    for number in numbers:
        bucket, start = buckets[number], 0
        device = template.examples[next(iter(bucket.parameters))].device
        if flat:
            examples[f"flat.{number}"] = torch.empty(bucket.numel, dtype=bucket.dtype, device=device)
            whole = graph.input(f"flat.{number}")
        for name, tensor in bucket.parameters.items():
            label = f"gradients.{name}"
            if flat:
                values[label] = whole[start : start + tensor.numel()].view(tensor.shape)
            else:
                values[label], examples[label] = graph.input(label), template.examples[label]
            start += tensor.numel()
    found = graph.include(old, {name: value for name, value in values.items() if name in read}, only=tasks)
    left = {name: place for name, place in template.places.items() if made_by(old, name) in found}
    graph.output(**{name: found[made_by(old, name)] for name in left})
    costs = Costs.estimate(graph, examples)
    kinds = {task.name: "count" if task.device == "host" else "update" for task in graph.tasks if not task.view}
    merged = merge(graph, kinds)
    counted = _counted(merged, template, held)
    return Update(
        buckets[numbers[0]].stage, tuple(numbers), merged, tuple(name for name in held if name not in counted), counted,
        left, *costs_of(merged, costs, machine), template.state,
    )  # fmt: skip


def made_by(graph: Graph, output: str) -> str:
    """Return the name of the value that is an output."""
    return graph.values[graph.outputs[output]].name


def _components(graph: Graph) -> list[int]:
    """Return a number for each task, the same for those of which one depends on another."""
    together = _Together(range(len(graph.tasks)))
    for task in graph.tasks:
        together.join([task.index, *(d.task for d in task.dependencies if d.kind != "order")])
    return [together.find(index) for index in range(len(graph.tasks))]


class _Together:
    """Disjoint sets of numbers; the smallest stands for each."""

    def __init__(self, numbers: Iterable[int]):
        self.parent = {number: number for number in numbers}

    def find(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = number = self.parent[self.parent[number]]
        return number

    def join(self, numbers: Sequence[int]) -> None:
        for number in numbers[1:]:
            first, second = sorted((self.find(numbers[0]), self.find(number)))
            self.parent[second] = first


def _counted(graph: Graph, template: Template, held: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs of an update that live on the host: counters of steps, and rates that are tensors."""
    places = {name: place for name, (place, _) in template.state.places().items()}
    readers: dict[str, set[bool]] = {}
    for task in graph.tasks:
        for use in task.reads if not task.view else ():
            name = graph.values[graph.values[use.value].root].name
            readers.setdefault(name, set()).add(task.device == "host")
    return tuple(name for name in held if readers.get(name) == {True} or places.get(name, ("",))[0] == "setting")
