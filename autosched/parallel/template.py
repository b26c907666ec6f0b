"""Capture one micro-batch, and an update, as a graph of operators.

A template has forward, loss and backward. It is captured once for each size of a micro-batch, and
included as often as there are micro-batches. Knows no device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autosched import Graph, GraphError, Value, capture

__all__ = [
    "BeforeStep",
    "Loss",
    "Place",
    "Template",
    "accumulating",
    "forward_of",
    "hook_of",
    "inputs_like",
    "maker_of",
    "pass_of",
    "update_of",
]

Loss = Callable[[Any, Any], torch.Tensor]
BeforeStep = Callable[[torch.nn.Module], object]
Place = tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A captured graph of operators.

    ``gradients`` has, for parameters by input, the output that is the gradient, in the order in
    which they are computed; ``places`` has the places where other outputs are stored, ``switches``
    the attributes that change; ``state`` holds them, and ``finish`` returns the function's result,
    from outputs.
    """

    graph: Graph
    examples: Mapping[str, torch.Tensor]
    gradients: Mapping[str, str]
    places: Mapping[str, Place]
    switches: Sequence[tuple[dict[str, Any], str, Any]]
    state: Any
    finish: Callable[[Mapping[str, Any]], Any] = dict

    @property
    def batch(self) -> tuple[str, ...]:
        """The inputs that are the batch."""
        return tuple(name for name in self.graph.input_names if name.startswith("batch."))

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Other inputs that it reads and writes, such as a running mean that it subtracts.

        But not counters.
        """
        values = self.graph.values
        written = dict[int, None]()
        read = dict[int, None]()
        for task in self.graph.tasks:
            changed = dict.fromkeys(values[use.value].root for use in task.changes)
            written |= changed
            seen = (values[use.value].root for use in task.reads if not task.view)
            read |= dict.fromkeys(root for root in seen if root not in changed)
        names = ((value.name, value.index) for value in self.graph.sources if value.tensor is None)
        return tuple(
            name for name, i in names if i in written and i in read and name not in self.batch
        )


def pass_of(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer | None,
    batch: Sequence[Any],
    weight: float,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Template:
    """Capture ``weight * loss_fn(model(*inputs), target)`` and its backward.

    The target is the last of ``batch``.

    The loss is the output ``result``; forward runs within ``around()``. Raises CaptureError for
    what cannot be captured, and GraphError for a loss without gradients for the optimizer's
    parameters.
    """
    compute = _quiet(loss_fn)

    def forward_backward(*batch: Any) -> torch.Tensor:
        with around():
            loss: torch.Tensor = compute(model(*batch[:-1]), batch[-1])
        if weight != 1:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with without_gradients(model):
        graph = capture(forward_backward, *batch)
    trained = {id(parameter) for parameter in _trained(optimizer)}
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
    ready = dict(sorted(made.items(), key=lambda item: maker_of(graph, item[1])))
    places = {output: place for output, place in graph.made.items() if place[0] != "grad"}
    return Template(graph, graph.examples, ready, places, graph.switched, graph.state)


def forward_of(model: torch.nn.Module, batch: Sequence[Any]) -> Template:
    """Capture ``model(*batch)`` without gradients."""

    def forward(*batch: Any) -> Any:
        with torch.no_grad():
            return model(*batch)

    graph = capture(forward, *batch)
    return Template(
        graph, graph.examples, {}, graph.made, graph.switched, graph.state, finish=graph.finish
    )


def update_of(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    before_step: BeforeStep | None = None,
) -> Template:
    """Capture ``before_step`` and a step of the optimizer for some parameters, with its present state.

    Their gradients are inputs ``gradients.NAME``.
    """
    compute = _quiet(loss_fn)
    names = dict(_names(model, parameters))

    def update(gradients: dict[str, torch.Tensor]) -> None:
        _ = compute  # so that things have the same names as in ``forward_backward``
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.grad = gradients[names[name]]
        if before_step is not None:
            before_step(model)
        optimizer.step()
        optimizer.zero_grad()

    with without_gradients(model):
        graph = capture(
            update, {key: torch.empty_like(tensor) for key, tensor in parameters.items()}
        )
    return Template(graph, graph.examples, {}, graph.made, graph.switched, graph.state)


def hook_of(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], before_step: BeforeStep
) -> Template:
    """Capture the effect of ``before_step`` on the gradients of some parameters.

    These are inputs ``gradients.NAME``.
    """
    names = dict(_names(model, parameters))

    def change(gradients: dict[str, torch.Tensor]) -> None:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.grad = gradients[names[name]]
        before_step(model)

    with without_gradients(model):
        graph = capture(
            change, {key: torch.empty_like(tensor) for key, tensor in parameters.items()}
        )
    return Template(graph, graph.examples, {}, graph.made, graph.switched, graph.state)


def accumulating(one: Template) -> Template:
    """Return a template that adds gradients to inputs ``sum.NAME``, which it writes, instead of returning them."""
    graph = Graph(one.graph.name)
    values = inputs_like(graph, one.graph)
    outputs = graph.include(one.graph, values)
    examples = dict(one.examples)
    for name, output in one.gradients.items():
        total = graph.input(f"sum.{name}")
        graph.add(
            torch.Tensor.add_,
            total,
            outputs[output],
            name=f"sum.{name}.add",
            writes=total,
            outputs=(),
        )
        examples[f"sum.{name}"] = one.examples[name]
    gradients = set(one.gradients.values())
    graph.output(**{name: value for name, value in outputs.items() if name not in gradients})
    return replace(one, graph=graph, examples=examples)


def inputs_like(graph: Graph, other: Graph) -> dict[str, Value]:
    """Declare the inputs of another graph in a graph."""
    return {name: graph.input(name) for name in other.input_names}


def maker_of(graph: Graph, output: str) -> int:
    """Return the task (its index) that computes an output; -1 for one that is an input."""
    producer = graph.values[graph.outputs[output]].producer
    return -1 if producer is None else producer


@contextlib.contextmanager
def without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Remove a model's gradients for a while."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


class _Quiet:
    """Calls a module that holds no tensors, so that it is not searched for them."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


def _quiet(loss_fn: Loss) -> Loss:
    if not isinstance(loss_fn, torch.nn.Module):
        return loss_fn
    if any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise GraphError(
            f"loss_fn {type(loss_fn).__name__} has parameters to train; make it a part of the model"
        )
    return loss_fn if any(True for _ in loss_fn.buffers()) else _Quiet(loss_fn)


def _trained(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups if optimizer is not None else ():
        yield from group["params"]


def _names(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield parameters' names in a model, and the keys that they have here."""
    keys = {id(tensor): key for key, tensor in parameters.items()}
    for name, parameter in model.named_parameters():
        if id(parameter) in keys:
            yield name, keys[id(parameter)]
