"""Capture one micro-batch, and an optimizer step, as a graph of operators.

The template of a micro-batch has forward, loss and backward. It is captured once for each size of a
micro-batch, without devices, and included in a step as often as there are micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autosched import Graph, GraphError, Task, Value, capture
from autosched.frontends.capture import captured

__all__ = [
    "BeforeStep",
    "Loss",
    "Place",
    "Template",
    "accumulating",
    "change_tasks",
    "forward_of",
    "inputs_like",
    "pass_of",
    "producer_of",
    "update_of",
]

Loss = Callable[[Any, Any], torch.Tensor]
BeforeStep = Callable[[torch.nn.Module], object]
Place = tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A captured graph of operators.

    ``gradients`` has, for parameters by input, the output that is the gradient, in the order in
    which they are computed; ``places`` has the places in ``state`` where other outputs are stored,
    ``switches`` the attributes that change; ``finish`` returns the function's result from outputs;
    ``settings`` are those of the optimizer that are inputs.
    """

    graph: Graph
    examples: Mapping[str, torch.Tensor]
    gradients: Mapping[str, str]
    places: Mapping[str, Place]
    switches: Sequence[tuple[dict[str, Any], str, Any]]
    state: Any
    finish: Callable[[Mapping[str, Any]], Any] = dict
    settings: Any = None

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """The inputs that are the batch."""
        return tuple(name for name in self.graph.input_names if name.startswith("batch."))

    @cached_property
    def written_buffers(self) -> tuple[str, ...]:
        """Other inputs that it writes."""
        values = self.graph.values
        changes = (use for task in self.graph.tasks for use in task.changes)
        return self._buffers({values[use.value].root for use in changes})

    @cached_property
    def broadcast_buffers(self) -> tuple[str, ...]:
        """Other inputs that it reads and writes, such as a running mean that it subtracts.

        Not counters, which it only writes.
        """
        values = self.graph.values
        written: set[int] = set()
        read: set[int] = set()
        for task in self.graph.tasks:
            changed = {values[use.value].root for use in task.changes}
            written |= changed
            if not task.view:
                read |= {values[use.value].root for use in task.reads} - changed
        return self._buffers(written & read)

    def _buffers(self, among: Set[int]) -> tuple[str, ...]:
        """Return the inputs among values (indices), except the batch."""
        names = (v.name for v in self.graph.sources if v.tensor is None and v.index in among)
        return tuple(name for name in names if name not in self.batch)


def pass_of(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Any],
    weight: float,
) -> Template:
    """Capture ``weight * loss_fn(model(*inputs), target)`` and its backward.

    The target is the last of ``batch``. The loss is the output ``result``. Raises CaptureError for
    what cannot be captured, and GraphError for a loss without gradients for the optimizer's
    parameters.
    """
    compute = _stateless(loss_fn)

    def forward_backward(*batch: Any) -> torch.Tensor:
        loss: torch.Tensor = compute(model(*batch[:-1]), batch[-1])
        if weight != 1:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with without_gradients(model):
        graph = capture(forward_backward, *batch)
    loss = graph.outputs["result"]
    last = (task.index for task in graph.tasks if loss in [use.value for use in task.changes])
    inner = graph.tasks[: max(producer_of(graph, "result"), *last, 0)]
    change_tasks(graph, [task for task in inner if task.origin.phase == "backward"], _forward)
    trained = {id(item) for group in optimizer.param_groups for item in group["params"]}
    known = graph.state.parameters
    made = {
        place[1]: output
        for output, place in graph.made.items()
        if place[0] == "grad" and id(known[place[1]]) in trained
    }
    if not made:
        raise GraphError("the loss gives no gradient to any parameter that the optimizer has")
    own = set(map(id, model.parameters()))
    for name in made:
        if id(known[name]) not in own:
            raise GraphError(
                f"the loss trains {name!r}, which is no parameter of the model; make it one"
            )
    ready = dict(sorted(made.items(), key=lambda item: producer_of(graph, item[1])))
    places = {output: place for output, place in graph.made.items() if place[0] != "grad"}
    return Template(graph, graph.examples, ready, places, graph.switched, graph.state)


def forward_of(model: torch.nn.Module, batch: Sequence[Any]) -> Template:
    """Capture ``model(*batch)`` without gradients."""

    def forward(*batch: Any) -> Any:
        with torch.no_grad():
            return model(*batch)

    graph = capture(forward, *batch)
    change_tasks(graph, graph.tasks, _forward)
    return Template(
        graph, graph.examples, {}, graph.made, graph.switched, graph.state, graph.finish
    )


def update_of(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, torch.Tensor],
    before_step: BeforeStep | None = None,
    varying: Collection[str] = (),
) -> Template:
    """Capture ``before_step``, and a step of the optimizer if given, for some parameters.

    Their gradients are inputs ``gradients.NAME``, and so are ``varying`` settings, by their names.
    """
    compute = _stateless(loss_fn)
    keys = {id(tensor): key for key, tensor in parameters.items()}
    named = model.named_parameters()
    names = {name: keys[id(parameter)] for name, parameter in named if id(parameter) in keys}

    def update(gradients: dict[str, torch.Tensor]) -> None:
        _ = compute  # so that values have the same names as in ``forward_backward``
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.grad = gradients[names[name]]
        if before_step is not None:
            before_step(model)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    gradients = {key: torch.empty_like(tensor) for key, tensor in parameters.items()}
    with without_gradients(model):
        graph = captured(update, [gradients], {}, varying)
    return Template(
        graph, graph.examples, {}, graph.made, graph.switched, graph.state, settings=graph.settings
    )


def accumulating(one: Template) -> Template:
    """Return a template that adds gradients in place to inputs ``sum.NAME``."""
    graph = Graph(one.graph.name)
    outputs = graph.include(one.graph, inputs_like(graph, one.graph))
    examples = dict(one.examples)
    for name, output in one.gradients.items():
        total = graph.input(f"sum.{name}")
        gradient = outputs.pop(output)
        label = f"sum.{name}.add"
        graph.add(torch.Tensor.add_, total, gradient, name=label, writes=total, outputs=())
        examples[f"sum.{name}"] = one.examples[name]
    graph.output(**outputs)
    return replace(one, graph=graph, examples=examples)


def inputs_like(graph: Graph, other: Graph) -> dict[str, Value]:
    """Declare the inputs of another graph in a graph."""
    return {name: graph.input(name) for name in other.input_names}


def producer_of(graph: Graph, output: str) -> int:
    """Return the task (its index) that computes an output; -1 for one that is an input."""
    producer = graph.values[graph.outputs[output]].producer
    return -1 if producer is None else producer


def change_tasks(graph: Graph, tasks: Iterable[Task], change: Callable[[Task], Task]) -> None:
    """Put others in the place of some of a graph's tasks."""
    for task in tasks:
        graph.tasks[task.index] = changed = change(task)
        if graph.names[task.name] is task:
            graph.names[task.name] = changed


def _forward(task: Task) -> Task:
    """Return the task as a part of forward: also that of a gradient that forward computes."""
    return replace(task, origin=task.origin._replace(phase="forward"))


@contextlib.contextmanager
def without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Remove a model's gradients for a while."""
    saved = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in saved.items():
            parameter.grad = gradient


class _Stateless:
    """Calls a module that holds no tensors, so that it is not searched for them."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


def _stateless(loss_fn: Loss) -> Loss:
    if not isinstance(loss_fn, torch.nn.Module):
        return loss_fn
    if any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise GraphError(
            f"loss_fn {type(loss_fn).__name__} has parameters to train; make it a part of the model"
        )
    return loss_fn if any(True for _ in loss_fn.buffers()) else _Stateless(loss_fn)
