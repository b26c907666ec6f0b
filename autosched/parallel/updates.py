"""Divide an optimizer step into updates that need few gradients each.

An optimizer may update each parameter by separate operators, or many by one operator; the graph
shows which parameters belong together. So the update of one bucket need not wait for the gradients
of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import networkx as nx
import torch
from torch._ops import OpOverload

from autosched import Graph, Machine, ScheduleError, Task, Value, merge
from autosched.costs.estimate import estimate
from autosched.parallel.costs import laid_out, tabulated
from autosched.parallel.template import Place, Template


@dataclass(frozen=True)
class Bucket:
    """Parameters of one stage whose gradients are reduced together."""

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

    @property
    def nbytes(self) -> int:
        """The total number of their bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Update:
    """The optimizer's operators for some buckets (their numbers), of one stage.

    ``graph`` takes the gradients as ``gradients.NAME``, or all of a bucket as one flat tensor
    ``flat.NUMBER``. Tasks on the host, such as counting steps, are the same for all replicas.
    ``places`` says where outputs are stored in ``state``; ``settings`` are those of the optimizer
    that are inputs on the host.
    """

    stage: int
    buckets: tuple[int, ...]
    graph: Graph
    device_inputs: tuple[str, ...]
    host_inputs: tuple[str, ...]
    places: Mapping[str, Place]
    seconds: Mapping[str, Mapping[str, float]]
    nbytes: Mapping[str, int]
    state: Any
    settings: Any

    @cached_property
    def device_tasks(self) -> tuple[str, ...]:
        """The tasks of ``graph`` that each replica runs separately."""
        return tuple(task.name for task in self.graph.tasks if task.device != "host")

    @cached_property
    def created(self) -> tuple[str, ...]:
        """The outputs that do not exist before this step, such as moments."""
        known = {place for place, _ in self.state.places().values()}
        return tuple(name for name, place in self.places.items() if place not in known)

    @cached_property
    def new_state(self) -> dict[str, int]:
        """The bytes of those that tasks on the device create."""
        on_device = {*self.device_tasks}
        values = {name: self.graph.values[self.graph.outputs[name]] for name in self.created}
        return {
            name: self.nbytes[value.name]
            for name, value in values.items()
            if value.producer is not None and self.graph.tasks[value.producer].name in on_device
        }

    def output(self, name: str) -> str:
        """Return the name of the value that is an output."""
        return _output_value(self.graph, name)


def updates_of(
    template: Template,
    buckets: Sequence[Bucket],
    numbers: Sequence[int],
    machine: Machine,
    flat: bool,
) -> list[Update]:
    """Return the updates of the buckets with these numbers; ``flat``: of flat gradients."""
    graph = template.graph
    bucket_of = {name: number for number in numbers for name in buckets[number].parameters}
    # 1. Connect tasks by their dependencies, and with the buckets whose gradients they read.
    links: nx.Graph[Any] = nx.Graph()
    links.add_nodes_from(("bucket", number) for number in numbers)
    for task in graph.tasks:
        links.add_node(task.index)
        links.add_edges_from((task.index, d.task) for d in task.dependencies if d.kind != "order")
        for use in task.reads:
            root = graph.values[graph.values[use.value].root]
            name = root.name.removeprefix("gradients.")
            if root.producer is None and name in bucket_of:
                links.add_edge(task.index, ("bucket", bucket_of[name]))
    # 2. Each connected component is an update; tasks without gradients belong to the first one.
    found = []
    rest = set[Any]()
    for component in nx.connected_components(links):
        own = [number for number in numbers if ("bucket", number) in component]
        if own:
            found.append((own, component))
        else:
            rest |= component
    found[0][1].update(rest)
    updates = []
    for own, component in found:
        tasks = [task.name for task in graph.tasks if task.index in component]
        updates.append(_update(template, buckets, own, tasks, machine, flat))
    return updates


def _update(
    template: Template, buckets: Sequence[Bucket], numbers: Sequence[int], tasks: Sequence[str],
    machine: Machine, flat: bool,
) -> Update:  # fmt: skip
    old = template.graph
    graph = Graph(old.name)
    # 1. The state that tasks read is an input.
    read = {old.values[use.value].name for name in tasks for use in old.task(name).reads}
    state = [n for n in old.input_names if n in read and not n.startswith("gradients.")]
    values = {name: graph.input(name) for name in state}
    examples = {name: template.examples[name] for name in state}
    # 2. Gradients are inputs, or views of flat inputs.
    own = {number: buckets[number] for number in numbers}
    values.update(_gradients(graph, template, own, tasks, flat, examples))
    # 3. The tasks become at most one on the host and one on the device.
    inputs = {name: value for name, value in values.items() if name in read}
    made = _included(graph, old, inputs, tasks)
    outputs = {name: _output_value(old, name) for name in template.places}
    places = {n: place for n, place in template.places.items() if outputs[n] in made}
    graph.output(**{name: made[outputs[name]] for name in places})
    estimated = estimate(graph, examples)
    estimated.warn(graph)
    groups = {
        t.name: "count" if t.device == "host" else "update" for t in graph.tasks if not t.view
    }
    merged = merge(graph, groups)
    host_inputs = _host_inputs(merged, template, state)
    device_inputs = tuple(name for name in state if name not in host_inputs)
    seconds, nbytes = tabulated(merged, estimated.costs, machine)
    return Update(
        buckets[numbers[0]].stage, tuple(numbers), merged, device_inputs, host_inputs, places,
        seconds, nbytes, template.state, template.settings,
    )  # fmt: skip


def _gradients(
    graph: Graph, template: Template, buckets: Mapping[int, Bucket], tasks: Sequence[str],
    flat: bool, examples: dict[str, torch.Tensor],
) -> dict[str, Value]:  # fmt: skip
    """Declare gradients as inputs, with ``examples``; return their values, by old name."""
    old = template.graph
    changes = (use.value for name in tasks for use in old.task(name).changes)
    written = {old.values[old.values[value].root].name for value in changes}
    values: dict[str, Value] = {}
    for number, bucket in buckets.items():
        labels = {f"gradients.{name}": tensor for name, tensor in bucket.parameters.items()}
        if not flat:
            values.update((label, graph.input(label)) for label in labels)
            examples.update((label, template.examples[label]) for label in labels)
            continue
        name = f"flat.{number}"
        device = template.examples[next(iter(bucket.parameters))].device
        examples[name] = torch.empty(bucket.numel, dtype=bucket.dtype, device=device)
        whole = graph.input(name)
        if not written.isdisjoint([*labels, *bucket.parameters]):  # other replicas read the sum
            whole = graph.add(torch.clone, whole)
        start = 0
        for label, tensor in labels.items():
            values[label] = whole[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
            strides = template.examples[label].stride()
            if strides != torch.empty(tensor.shape, device="meta").stride():
                # Fused optimizers go through parameter and gradient as they lie in memory.
                values[label] = graph.add(laid_out, values[label], strides)
    return values


def _included(
    graph: Graph, old: Graph, inputs: Mapping[str, Value], tasks: Sequence[str]
) -> dict[str, Value]:
    """Include tasks; numbers that the host makes go to the device as one list, in one copy."""
    host = [name for name in tasks if old.task(name).device == "host"]
    device = [name for name in tasks if old.task(name).device != "host"]
    own = {old.task(name).index for name in device}
    if any(d.task in own for name in host for d in old.task(name).dependencies):
        return graph.include(old, inputs, only=tasks)
    made: dict[str, Value] = graph.include(old, inputs, only=host)
    read = {use.value for name in device for use in old.task(name).reads}
    numbers = [
        old.values[use.value].name
        for name in host
        for use in old.task(name).outputs
        if use.value in read and _makes_numbers(old.task(name))
    ]
    known = {**inputs, **made}
    if len(numbers) > 1:
        packed = graph.add(_listed, *[made[name] for name in numbers], name="numbers", on="host")
        for position, name in enumerate(numbers):
            known[name] = graph.add(_item, packed, position, name=f"numbers.{position}")
    made.update(graph.include(old, known, only=device))
    return made


def _makes_numbers(task: Task) -> bool:
    """Whether a task reads a number from a tensor, or computes with numbers of Python."""
    return not isinstance(task.fn, OpOverload) or "_local_scalar_dense" in str(task.fn)


def _listed(*numbers: Any) -> list[Any]:
    return list(numbers)


def _item(numbers: Sequence[Any], position: int) -> Any:
    return numbers[position]


def _output_value(graph: Graph, output: str) -> str:
    return graph.values[graph.outputs[output]].name


def _host_inputs(graph: Graph, template: Template, state: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs of an update on the host: counters of steps, and settings."""
    kinds = {name: place[0] for name, (place, _) in template.state.places().items() if place}
    readers: dict[str, set[bool]] = {}
    for task in graph.tasks:
        for use in task.reads if not task.view else ():
            name = graph.values[graph.values[use.value].root].name
            readers.setdefault(name, set()).add(task.device == "host")
    numbers = template.settings.names
    return tuple(
        n for n in state if readers.get(n) == {True} or kinds.get(n) == "setting" or n in numbers
    )


# ---- hooks of the optimizer's step


def check_separable(graph: Graph, stages: Mapping[str, int]) -> None:
    """Raise ScheduleError if hooks compute what one stage has from what another one has."""
    labels = {f"{prefix}{name}": name for name in stages for prefix in ("", "gradients.")}
    names = {v.index: labels[v.name] for v in graph.sources if v.name in labels}
    links: nx.Graph[int] = nx.Graph()
    links.add_nodes_from(names)
    for task in graph.tasks:
        for values in _related_values(graph, task):
            nx.add_path(links, [graph.values[value].root for value in values])
    for component in nx.connected_components(links):
        first, *others = sorted(component & names.keys()) or [-1]
        for other in others:
            a, b = names[first], names[other]
            if stages[a] != stages[b]:
                raise ScheduleError(
                    f"a hook of the optimizer computes what one stage has from what another one "
                    f"has: stage {stages[a]} has {a!r}, stage {stages[b]} {b!r}; change each by "
                    f"itself, or clip with clip_grad_norm="
                )


def _related_values(graph: Graph, task: Task) -> Iterator[list[int]]:
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
    # A value that the hook computes relates all items; a constant does not.
    if any(graph.values[graph.values[index].root].producer is not None for index in shared):
        yield everything
