"""Capture one micro-batch, and an optimizer step, as a graph of operators; equivalent graphs of these.

The template of a micro-batch has forward, loss and backward. It is captured once for each size of a
micro-batch, without devices, and included in a step as often as there are micro-batches.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from autosched import Graph, GraphError, Here, ScheduleError, Task, Value, capture
from autosched.costs.estimate import Estimate, estimate
from autosched.frontends.capture import captured
from autosched.frontends.state import without_gradients

Loss = Callable[[Any, Any], torch.Tensor]
Place = tuple[str, ...]


@dataclass(frozen=True)
class Template:
    """A captured graph of operators.

    ``gradients`` has, for parameters by input, the output that is the gradient, in the order in
    which they are computed; ``places`` has the places in ``state`` where other outputs are stored,
    ``switches`` the attributes that change; ``settings`` are those of the optimizer that are inputs.
    """

    graph: Graph
    examples: Mapping[str, torch.Tensor]
    gradients: Mapping[str, str]
    places: Mapping[str, Place]
    switches: Sequence[tuple[dict[str, Any], str, Any]]
    state: Any
    settings: Any = None

    @cached_property
    def estimate(self) -> Estimate:
        """The estimated costs of its operators."""
        return estimate(self.graph, self.examples)

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """The inputs that are the batch."""
        return tuple(name for name in self.graph.input_names if name.startswith("batch."))

    @cached_property
    def written_buffers(self) -> tuple[str, ...]:
        """Other inputs that it writes."""
        values = self.graph.values
        changes = (use for task in self.graph.tasks for use in task.changes)
        roots = {values[use.value].root for use in changes}
        names = (v.name for v in self.graph.sources if v.tensor is None and v.index in roots)
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
    compute = stateless(loss_fn)

    def forward_backward(*batch: Any) -> torch.Tensor:
        loss: torch.Tensor = compute(model(*batch[:-1]), batch[-1])
        if weight != 1:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with without_gradients(model.parameters()):
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


def update_of(
    model: torch.nn.Module,
    loss_fn: Loss,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    varying: Collection[str] = (),
    hooks_alone: bool = False,
) -> Template:
    """Capture a step of the optimizer for some parameters, or what its hooks do alone.

    Their gradients are inputs ``gradients.NAME``, and so are ``varying`` settings, by their names.
    """
    compute = stateless(loss_fn)
    keys = {id(tensor): key for key, tensor in parameters.items()}
    named = model.named_parameters()
    names = {name: keys[id(parameter)] for name, parameter in named if id(parameter) in keys}

    def update(gradients: dict[str, torch.Tensor]) -> None:
        _ = compute  # so that values have the same names as in ``forward_backward``
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.grad = gradients[names[name]]
        if hooks_alone:
            for hook in hooks_of_step(optimizer):
                hook(optimizer, (), {})
            return
        optimizer.step()
        optimizer.zero_grad()

    gradients = {key: torch.empty_like(tensor) for key, tensor in parameters.items()}
    with without_gradients(model.parameters()):
        graph = captured(update, [gradients], {}, varying)
    return Template(
        graph, graph.examples, {}, graph.made, graph.switched, graph.state, settings=graph.settings
    )


def hooks_of_step(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before and after a step of an optimizer."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [*before.values(), *after.values()]


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


class _Stateless:
    """Calls a module that holds no tensors, so that it is not searched for them."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


def stateless(loss_fn: Loss) -> Loss:
    """Return a loss function that is searched for tensors only if it has some."""
    if not isinstance(loss_fn, torch.nn.Module):
        return loss_fn
    if any(parameter.requires_grad for parameter in loss_fn.parameters()):
        raise GraphError(
            f"loss_fn {type(loss_fn).__name__} has parameters to train; make it a part of the model"
        )
    return loss_fn if any(True for _ in loss_fn.buffers()) else _Stateless(loss_fn)


# ---- equivalent templates


Stages = Mapping[str, int]  # of tasks, by name

_OF_STATES = (torch.get_rng_state, torch.set_rng_state, torch.manual_seed)
_LIKE = ("rand_like", "randn_like", "randint_like")  # draw without reading their argument
_OTHER_NUMBERS = (
    "the backward pass sets the state of torch's random number generator, and then draws other "
    "numbers than forward did, which stages cannot repeat; pass such numbers to the model as a "
    "part of the batch"
)


def with_random_numbers_once(one: Template) -> Template:
    """Draw once, and keep, the random numbers that checkpoints draw again in backward.

    These set the generator's state to what it was in forward; stages draw at other times. What is
    kept is a copy, since masks of dropout are scaled in place. Raises ScheduleError if backward
    draws others after it sets a state.
    """
    graph = one.graph
    if not any(task.fn in _OF_STATES and task.origin.phase == "backward" for task in graph.tasks):
        return one
    first = _first_draws(one)
    again = {value: kept for value, kept in first.items() if value != kept}
    copy = _Copy(one)
    drawn: dict[int, Value] = {}
    for task in graph.tasks:
        made = [use.value for use in task.outputs]
        value = _result(task) if task.random else -1
        if task.fn not in _OF_STATES and again.keys().isdisjoint((value, *made)):
            copy.take(task)
        source = again.get(value, value)
        if source not in again.values():
            continue
        copy.flush()
        name = graph.values[value].name
        if value == source:
            drawn[value] = copy.values[name]
        facts: dict[str, Any] = {"name": f"{task.name}.kept", "origin": task.origin}
        copy.values[name] = copy.graph.record(torch.clone, (drawn[source],), {}, **facts)
    new = copy.finished(one)
    drawing = [task for task in new.graph.tasks if task.random]
    change_tasks(new.graph, drawing, lambda task: replace(task, device=None))  # it was the host's
    return new


def _first_draws(one: Template) -> dict[int, int]:
    """Return, for each value that is drawn, the one drawn first from the same state."""
    graph = one.graph
    random = [task for task in graph.tasks if task.random]
    fakes = _fake_tensors(one, {use.value for task in random for use in task.reads})
    first: dict[int, int] = {}
    known: dict[Hashable, int] = {}
    states: dict[int, int] = {}  # of the generator: the last value that was drawn
    last = newest = -1
    for task in random:
        if task.fn is torch.get_rng_state:
            states[_result(task)] = last
        elif task.fn is torch.set_rng_state and task.reads[0].value in states:
            last = states[task.reads[0].value]
        elif task.kwargs.get("generator") is None:
            before, value = last, _result(task)
            last = first[value] = known.setdefault((last, _draw(graph, task, fakes)), value)
            if last == value and (before != newest or task.fn in _OF_STATES):
                raise ScheduleError(_OTHER_NUMBERS)
            newest = value if last == value else newest
    if last != newest:
        raise ScheduleError(_OTHER_NUMBERS)
    return first


def _draw(graph: Graph, task: Task, fakes: Mapping[int, torch.Tensor]) -> Hashable:
    """Return a key of what a task draws; its own if that depends on contents of tensors."""
    read = [use.value for use in task.reads]
    makers = [graph.values[value].producer for value in read]
    fills = len(task.changes) == 1 and all(
        use.version == 0 and maker is not None and _is(graph.tasks[maker], "empty", "new_empty")
        for use, maker in zip(task.reads, makers, strict=True)
    )
    if read and not fills and not _is(task, *_LIKE):
        return task.index
    shapes = [(*fakes[v].shape, fakes[v].stride(), fakes[v].dtype) for v in read]
    constants = tree_map(
        lambda leaf: None if isinstance(leaf, Value) else leaf, (task.args, dict(task.kwargs))
    )
    return task.fn, repr((constants, shapes))


def _result(task: Task) -> int:
    """Return the value (its index) that a task writes, or makes first; -1 if there is none."""
    uses = (*task.changes, *task.outputs)
    return uses[0].value if uses else -1


def with_hoisted_random_numbers(one: Template) -> Template:
    """Generate random numbers before anything else, where they depend only on a shape.

    Masks of dropout are written to memory allocated "like" an activation. It is replaced by memory
    of the same shape, which depends on no task. Otherwise all random tasks, on all devices, would
    be ordered one after another together with their predecessors.
    """
    graph = one.graph
    filled = {use.value for task in graph.tasks if task.random for use in task.writes}
    allocations = {
        task.outputs[0].value
        for task in graph.tasks
        if _is(task, "empty_like") and task.outputs[0].value in filled
    }
    if not allocations:
        return one
    copy = _Copy(one)
    fakes = _fake_tensors(one, allocations)
    for task in graph.tasks:
        value = task.outputs[0].value if task.outputs else -1
        if not _is(task, "empty_like") or value not in allocations:
            copy.take(task)
            continue
        fake = fakes[value]
        copy.flush()
        copy.values[graph.values[value].name] = copy.graph.record(
            torch.empty_strided, (tuple(fake.shape), fake.stride()),
            {"dtype": fake.dtype, "device": Here(fake.device)}, name=task.name, origin=task.origin,
        )  # fmt: skip
    return copy.finished(one)


def _fake_tensors(one: Template, wanted: Set[int]) -> dict[int, torch.Tensor]:
    """Return fake tensors for some values (by index), by running all tasks on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        data: dict[int, Any] = {
            v.index: mode.from_tensor(one.examples[v.name] if v.tensor is None else v.tensor)
            for v in one.graph.sources
        }

        def fake(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return data[leaf.index]
            return leaf.usual if isinstance(leaf, Here) else leaf

        found: dict[int, torch.Tensor] = {}
        for task in one.graph.tasks:
            if task.fn in _OF_STATES:
                continue
            args, kwargs = tree_map(fake, (task.args, dict(task.kwargs)))
            assert task.fn is not None
            data.update(task.results(task.fn(*args, **kwargs)))
            found.update((u.value, data[u.value]) for u in task.outputs if u.value in wanted)
    return found


def _is(task: Task, *operators: str) -> bool:
    """Whether the name of a task, without its module's, begins with one of these."""
    return task.name.rpartition(".")[2].startswith(operators)


def split_convolutions(one: Template, stage: Stages) -> tuple[Template, Stages]:
    """Compute gradients of convolutions by the input and by the weights in separate tasks."""
    copy = _Copy(one)
    stages = dict(stage)
    for task in one.graph.tasks:
        mask = tuple(task.args[-1]) if _is(task, "convolution_backward") else ()
        if len(mask) != 3 or not mask[0] or not any(mask[1:]):
            copy.take(task)
            continue
        for part, needed in (("input", (True, False, False)), ("weight", (False, *mask[1:]))):
            label = f"{task.name}.{part}"
            results = copy.call(task, (*task.args[:-1], needed), label)
            for use, result, is_needed in zip(task.outputs, results, needed, strict=True):
                if is_needed:
                    copy.values[one.graph.values[use.value].name] = result
            stages[label] = stage[task.name]
    return (copy.finished(one) if len(stages) > len(stage) else one), stages


class _Copy:
    """A new graph with tasks of a template's; ``values`` maps names of old values to new values."""

    def __init__(self, one: Template):
        self.old = one.graph
        self.graph = Graph(one.graph.name)
        self.values: dict[str, Value] = dict(inputs_like(self.graph, one.graph))
        self.pending: list[str] = []

    def take(self, task: Task) -> None:
        """Add a task unchanged, later, together with the next ones."""
        self.pending.append(task.name)

    def flush(self) -> None:
        if self.pending:
            self.values.update(self.graph.include(self.old, self.values, only=self.pending))
            self.pending = []

    def call(self, task: Task, args: tuple[Any, ...], name: str) -> Any:
        """Add a task with other arguments, which contain old values; return its results."""
        self.flush()
        args = tuple(self.values[arg.name] if isinstance(arg, Value) else arg for arg in args)
        assert task.fn is not None
        count = len(task.outputs)
        return self.graph.record(
            task.fn, args, task.kwargs, name=name, outputs=count, origin=task.origin
        )

    def finished(self, one: Template) -> Template:
        self.flush()
        outputs = {label: self.old.values[index].name for label, index in self.old.outputs.items()}
        self.graph.output(**{label: self.values[name] for label, name in outputs.items()})
        return replace(one, graph=self.graph)
