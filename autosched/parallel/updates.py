"""Cut an optimizer's update into tasks that need few gradients each.

An optimizer may update each parameter by separate operators, or many by one operator; the graph
shows which parameters belong together. So the update of one bucket need not wait for the gradients
of another. Knows no replica and no order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch

from autosched import Costs, Graph, Machine, ScheduleError, Task, Value, merge
from autosched.parallel.micro_batch import costs_of
from autosched.parallel.template import Place, Template

__all__ = ["Bucket", "Update", "check_apart", "updates_of"]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one stage whose gradients are summed together."""

    stage: int
    parameters: Mapping[str, torch.Tensor]

    @cached_property
    def numel(self) -> int:
        """The total number of their elements."""
        return sum(tensor.numel() for tensor in self.parameters.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all of them."""
        return next(iter(self.parameters.values())).dtype


@dataclass(frozen=True)
class Update:
    """The optimizer's operators for some buckets (their numbers), of one stage.

    ``graph`` takes the gradients as ``gradients.NAME``, or all of a bucket as one flat tensor
    ``flat.NUMBER``. ``held`` are its inputs on the device, ``counted`` those on the host;
    ``places`` says where outputs are to be stored. Tasks on the host, such as counting steps, are
    the same for all replicas.
    """

    stage: int
    buckets: tuple[int, ...]
    graph: Graph
    held: tuple[str, ...]
    counted: tuple[str, ...]
    places: Mapping[str, Place]
    seconds: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, int]
    state: Any  # the holder of the model's and the optimizer's tensors
    begun: Mapping[str, int]  # the bytes of new state on the device, such as moments, by output

    @cached_property
    def on_device(self) -> tuple[str, ...]:
        """The tasks of ``graph`` that each replica runs separately."""
        return tuple(task.name for task in self.graph.tasks if task.device != "host")

    def output(self, name: str) -> str:
        """Return the name of the value that is an output."""
        return made_by(self.graph, name)


def updates_of(
    template: Template,
    buckets: Sequence[Bucket],
    numbers: Sequence[int],
    machine: Machine,
    flat: bool,
) -> list[Update]:
    """Return the updates of the buckets which have these numbers.

    ``flat``: their gradients are flat tensors.
    """
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
    graph = Graph(template.graph.name)
    old = template.graph
    read = {old.values[use.value].name for name in tasks for use in old.task(name).reads}
    held = [name for name in old.input_names if name in read and not name.startswith("gradients.")]
    values = {name: graph.input(name) for name in held}
    examples = {name: template.examples[name] for name in held}
    for number in numbers:
        bucket = buckets[number]
        start = 0
        device = template.examples[next(iter(bucket.parameters))].device
        if flat:
            examples[f"flat.{number}"] = torch.empty(
                bucket.numel, dtype=bucket.dtype, device=device
            )
            whole = graph.input(f"flat.{number}")
            if _are_written(old, tasks, bucket):
                whole = graph.add(
                    torch.clone, whole
                )  # all replicas read the sum, which lives where it was made
        for name, tensor in bucket.parameters.items():
            label = f"gradients.{name}"
            if flat:
                values[label] = whole[start : start + tensor.numel()].view(tensor.shape)
            else:
                values[label] = graph.input(label)
                examples[label] = template.examples[label]
            start += tensor.numel()
    found = graph.include(
        old, {name: value for name, value in values.items() if name in read}, only=tasks
    )
    left = {name: place for name, place in template.places.items() if made_by(old, name) in found}
    graph.output(**{name: found[made_by(old, name)] for name in left})
    costs = Costs.estimate(graph, examples)
    kinds = {
        task.name: "count" if task.device == "host" else "update"
        for task in graph.tasks
        if not task.view
    }
    merged = merge(graph, kinds)
    counted = _counted(merged, template, held)
    on_device = tuple(name for name in held if name not in counted)
    seconds, nbytes = costs_of(merged, costs, machine)
    packed = _packed(merged, costs.nbytes)
    return Update(
        buckets[numbers[0]].stage, tuple(numbers), packed, on_device, counted, left, seconds, nbytes, template.state,
        _begun(packed, left, template, nbytes),
    )  # fmt: skip


def _are_written(graph: Graph, tasks: Sequence[str], bucket: Bucket) -> bool:
    """Whether tasks write gradients of a bucket, as clipping does."""
    roots = (graph.values[use.value].root for name in tasks for use in graph.task(name).changes)
    return any(
        graph.values[root].name.removeprefix("gradients.") in bucket.parameters for root in roots
    )


def _begun(
    graph: Graph, left: Mapping[str, Place], template: Template, nbytes: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes of new state that tasks on the device create, by output."""
    before = {place for place, _ in template.state.places().values()}
    found = {}
    for name, place in left.items():
        value = graph.values[graph.outputs[name]]
        producer = None if value.producer is None else graph.tasks[value.producer]
        if place not in before and producer is not None and producer.device != "host":
            found[name] = nbytes[value.name]
    return found


def _packed(graph: Graph, tensors: Collection[str]) -> Graph:
    """Pack the numbers that the host computes for the device into one list: separately, each would take a copy.

    Changes a graph of one task on the host and one on the device, that reads numbers, and no
    tensors, of the first.
    """
    by_host = {task.device == "host": task for task in graph.tasks}
    if len(graph.tasks) != 2 or len(by_host) != 2 or any(task.fn is None for task in graph.tasks):
        return graph
    count = by_host[True]
    update = by_host[False]
    made = [use.value for use in count.outputs]
    sent = [value for value in made if any(use.value == value for use in update.reads)]
    if len(sent) < 2 or update.kwargs or any(graph.values[value].name in tensors for value in sent):
        return graph
    new = Graph(graph.name)
    values = {
        v.index: new.input(v.name) if v.tensor is None else new.constant(v.tensor)
        for v in graph.sources
    }
    kept = [value for value in made if value not in sent]
    places = [made.index(value) for value in sent], [made.index(value) for value in kept]
    numbers, *others = new.record(
        _Packing(count, *places), [_now(arg, values) for arg in count.args], count.kwargs, name=count.name,
        outputs=["numbers", *(graph.values[value].name for value in kept)], on="host",
        writes=[values[use.value] for use in count.writes], origin=count.origin,
    )  # fmt: skip
    values.update(zip(kept, others, strict=True))
    where = [
        sent.index(arg.index) if isinstance(arg, Value) and arg.index in sent else None
        for arg in update.args
    ]
    rest = [_now(arg, values) for arg, at in zip(update.args, where, strict=True) if at is None]
    results = new.record(
        _Unpacking(update, where), [numbers, *rest], {}, name=update.name,
        outputs=[graph.values[use.value].name for use in update.outputs],
        writes=[values[use.value] for use in update.writes], origin=update.origin,
    )  # fmt: skip
    values.update(zip((use.value for use in update.outputs), results, strict=True))
    new.output(**{name: values[index] for name, index in graph.outputs.items()})
    return new


def _now(leaf: Any, values: Mapping[int, Value]) -> Any:
    return values[leaf.index] if isinstance(leaf, Value) else leaf


class _Packing:
    """Calls a function, and returns some of its results in a list, followed by the others."""

    def __init__(self, task: Task, packed: Sequence[int], others: Sequence[int]):
        assert task.fn is not None
        self.fn: Callable[..., Any] = task.fn
        self.packed = packed
        self.others = others

    def __call__(self, *args: Any) -> list[Any]:
        found = self.fn(*args)
        return [[found[i] for i in self.packed], *(found[i] for i in self.others)]


class _Unpacking:
    """Calls a function with some arguments taken from a list: ``where`` has the index of each in the list, if any."""

    def __init__(self, task: Task, where: Sequence[int | None]):
        assert task.fn is not None
        self.fn: Callable[..., Any] = task.fn
        self.where = where

    def __call__(self, packed: Sequence[Any], *args: Any) -> Any:
        rest = iter(args)
        found = self.fn(*(next(rest) if at is None else packed[at] for at in self.where))
        return found if isinstance(found, tuple) else ([] if found is None else [found])


def made_by(graph: Graph, output: str) -> str:
    """Return the name of the value that is an output."""
    return graph.values[graph.outputs[output]].name


def _components(graph: Graph) -> list[int]:
    """Return a number for each task, equal for the tasks of one connected component."""
    together = _Together(range(len(graph.tasks)))
    for task in graph.tasks:
        together.join([task.index, *(d.task for d in task.dependencies if d.kind != "order")])
    return [together.find(index) for index in range(len(graph.tasks))]


class _Together:
    """Disjoint sets of numbers; the smallest represents each."""

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


def check_apart(graph: Graph, stages: Mapping[str, int]) -> None:
    """Raise ScheduleError if a gradient is computed from that of a parameter of another stage."""
    together = _Together(range(len(graph.values)))
    for task in graph.tasks:
        for values in _joined(graph, task):
            together.join([graph.values[value].root for value in values])
    found: dict[int, str] = {}
    for value in graph.sources:
        name = value.name.removeprefix("gradients.")
        if name != value.name and name in stages:
            other = found.setdefault(together.find(value.index), name)
            if stages[other] != stages[name]:
                raise ScheduleError(
                    f"before_step changes gradients by each other, and stage {stages[other]} has that of {other!r}, "
                    f"stage {stages[name]} that of {name!r}; change each by itself, or clip with clip_grad_norm="
                )


def _joined(graph: Graph, task: Task) -> Iterator[list[int]]:
    """Yield the values (indices) that a task computes from one another.

    For foreach operators, item by item.
    """
    everything = [*(use.value for use in task.reads), *(use.value for use in task.outputs)]
    if "_foreach_" not in str(task.fn):
        yield everything
        return
    lists = [item for item in (*task.args, task.result) if isinstance(item, (list, tuple))]
    for items in zip_longest(*lists):
        yield [item.index for item in items if isinstance(item, Value)]
    shared = [item.index for item in (*task.args, *task.kwargs.values()) if isinstance(item, Value)]
    made = any(graph.values[graph.values[index].root].producer is not None for index in shared)
    if made:  # of values that the hook computes; its constants are the same for all
        yield everything


def _counted(graph: Graph, template: Template, held: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs of an update that are on the host: counters of steps, and rates that are tensors."""
    places = {name: place for name, (place, _) in template.state.places().items()}
    readers: dict[str, set[bool]] = {}
    for task in graph.tasks:
        for use in task.reads if not task.view else ():
            name = graph.values[graph.values[use.value].root].name
            readers.setdefault(name, set()).add(task.device == "host")
    return tuple(
        name
        for name in held
        if readers.get(name) == {True} or places.get(name, ("",))[0] == "setting"
    )
