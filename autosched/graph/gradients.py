"""Raise an error when autograd would lose a gradient.

Tasks run without autograd. If a run is given tensors that require grad while autograd is enabled,
outputs that depend on them would be constants to the caller's ``backward()``, and gradients would
be missing silently. So such outputs require grad, as in plain PyTorch, and raise GradientError when
a gradient reaches them. Their numbers are unchanged, and nothing is saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from autosched._lib.tree import flatten, transform
from autosched.errors import GradientError, listed
from autosched.graph.effects import function_name
from autosched.graph.graph import Graph
from autosched.graph.task import Followed

Where = Callable[[list[bool]], list[str]]  # describes outputs; called only for errors
_MODULES = 1  # the bit for parameters of called modules; values have the higher bits


class Gradients:
    """The tensors that autograd would have followed in runs of a graph.

    If the graph was captured, ``followed`` has them exactly. In other graphs the effects of
    functions are unknown: there, every output that is computed from a tensor that requires grad is
    assumed to be followed.

    >>> x = torch.ones(2, requires_grad=True)
    >>> graph = Graph("double")
    >>> graph.output(y=graph.input("x") * 2)
    >>> graph.run_serial(x=x)["y"].requires_grad
    True
    """

    def __init__(self, graph: Graph, followed: Followed | None = None):
        self.graph = graph
        self.followed = followed
        self._constants = [
            value for value in graph.sources if isinstance(value.tensor, torch.Tensor)
        ]

    def guarded(self, inputs: Mapping[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of a run, of which some raise GradientError in backward.

        Those are the outputs at which a gradient would be lost.
        """
        if not torch.is_grad_enabled():
            return outputs
        given: list[tuple[str, torch.Tensor]] = []
        for name, item in inputs.items():
            if isinstance(item, torch.Tensor):
                if item.requires_grad:
                    given.append((name, item))
            else:
                given += [(name, leaf) for leaf in _following(item)]
        given += [
            (value.name, value.tensor) for value in self._constants if value.tensor.requires_grad
        ]
        parameters = [item for item in self._parameters if item.requires_grad]
        if not given and not parameters:
            return outputs
        names = {name for name, _ in given}
        sources = [tensor for _, tensor in given] + parameters
        self._mark_written(inputs, names, sources)
        labels = self._labels(names, bool(parameters))
        lost = {
            id(leaf): (label, leaf)
            for label in labels
            if label in outputs  # others are those of other ranks
            for leaf in self._cut_off(label, inputs, outputs[label])
        }
        if not lost:
            return outputs

        def where(reached: list[bool]) -> list[str]:
            pairs = zip(lost_labels, reached, strict=True)
            return [self._said(label, names) for label, one in pairs if one]

        lost_labels = [label for label, _ in lost.values()]
        followed = _Lost.apply(where, [leaf for _, leaf in lost.values()], *sources)  # type: ignore[no-untyped-call]
        twins = dict(zip(lost, followed, strict=True))
        changed = {
            label: transform(lambda leaf: twins.get(id(leaf), leaf), outputs[label])
            for label in labels
            if label in outputs
        }
        return {**outputs, **changed}

    def _cut_off(
        self, label: str, inputs: Mapping[str, Any], output: Any
    ) -> Iterator[torch.Tensor]:
        """Yield the tensors of an output from which autograd cannot reach their sources.

        They should require grad and do not, or are copies of another tensor than autograd followed.
        """
        is_passed_on = self.graph.values[self.graph.outputs[label]].producer is None
        own: set[int] = set()
        for leaf in flatten(output):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not leaf.requires_grad:
                if (leaf.is_floating_point() or leaf.is_complex()) and not leaf.is_inference():
                    yield leaf
            elif leaf.is_leaf and is_passed_on:  # it may be a copy on another device
                own = own or {id(tensor) for item in inputs.values() for tensor in flatten(item)}
                if id(leaf) not in own and all(leaf is not v.tensor for v in self._constants):
                    yield leaf

    def _labels(self, names: Collection[str], modules: bool) -> Collection[str]:
        """Return the outputs that autograd would have followed, if these inputs require grad."""
        followed = self.followed
        if followed is not None and not modules and followed.given.issuperset(names):
            return followed.outputs
        wanted = sum(_bit(self.graph.value(name).index) for name in names) | (
            _MODULES if modules else 0
        )
        return [label for label, bits in self._from.items() if bits & wanted]

    def _mark_written(
        self, inputs: Mapping[str, Any], names: Collection[str], sources: list[torch.Tensor]
    ) -> None:
        """Make inputs raise in backward if a task's write would have changed their history."""
        followed = self.followed
        if followed is not None and followed.given.issuperset(names):
            found = [(name, inputs[name]) for name in followed.written]
        else:
            graph = self.graph
            changed = (
                name
                for name in inputs
                if name in names and graph.last_version(graph.value(name).index)
            )
            found = [(name, leaf) for name in changed for leaf in _following(inputs[name])]
        # A leaf that requires grad can be written under no_grad alone.
        written = [
            (name, leaf) for name, leaf in found if not (leaf.requires_grad and leaf.is_leaf)
        ]
        if not written:
            return
        what = f"to which graph {self.graph.name!r} writes in place"
        where = [f"{name!r}, {what}" for name, _ in written]
        try:
            _Written.apply(where, len(written), *(leaf for _, leaf in written), *sources)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise GradientError(
                f"{_message(where)}; autograd cannot note that either: {error}"
            ) from error

    @cached_property
    def _parameters(self) -> list[torch.Tensor]:
        shared = {id(item): item for task in self.graph.tasks for item in task.shared}
        return [item for item in shared.values() if isinstance(item, torch.Tensor)]

    @cached_property
    def _from(self) -> dict[str, int]:
        """The inputs, constants (by index) and modules that each output depends on, as bits."""
        bits = {value.index: _bit(value.index) for value in self.graph.sources}
        for task in self.graph.tasks:
            shares = any(isinstance(item, torch.Tensor) for item in task.shared)
            found = _MODULES if shares else 0
            if function_name(task.fn) != "detach":
                for use in task.reads:
                    found |= bits[use.value]
            for use in chain(task.changes, task.outputs):
                bits[use.value] = bits.get(use.value, 0) | found
        return {label: bits[index] for label, index in self.graph.outputs.items()}

    def _said(self, label: str, names: Iterable[str]) -> str:
        maker = self.graph.values[self.graph.outputs[label]].producer
        where = f" (computed at {self.graph.tasks[maker].source})" if maker is not None else ""
        inputs = listed(sorted(names), most=3) if names else "parameters of its modules"
        what = f"output {label!r} of graph {self.graph.name!r}{where}"
        return f"{what}, whose gradient is for {inputs}"


class _Raising(torch.autograd.Function):
    """An operation whose backward raises; ``ctx.where`` describes what a gradient has reached."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(_message(ctx.where([gradient is not None for gradient in gradients])))


class _Lost(_Raising):
    """Make tensors of a run depend on their sources for autograd.

    All tensors given to the run are inputs, so that torch.autograd.grad reaches this node, too.
    """

    @staticmethod
    def forward(ctx: Any, where: Where, lost: list[torch.Tensor], *sources: torch.Tensor) -> Any:
        ctx.where = where
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in lost])


class _Written(_Raising):
    """Record in tensors that they were written to."""

    @staticmethod
    def forward(ctx: Any, where: list[str], count: int, *tensors: torch.Tensor) -> Any:
        ctx.where = lambda _: where
        ctx.mark_dirty(*tensors[:count])
        return tensors[:count]


def _message(where: list[str]) -> str:
    return (
        "a gradient would be lost: autograd does not follow the tasks of a schedule. It reached "
        f"{' and '.join(where)}; call backward() within the function that is captured or compiled, "
        "or use torch.compile(fn, backend='autosched'), which autograd follows; where no gradient "
        "is wanted, use .detach() or torch.no_grad()"
    )


def _bit(index: int) -> int:
    return 2 << index


def _following(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in flatten(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
