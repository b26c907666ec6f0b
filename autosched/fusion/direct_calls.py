"""Call the C++ function of a compiled graph without the Python code of Inductor around it.

That code converts arguments and results: it joins those that share memory, makes views again, and
writes results that are new values of arguments. For most graphs none of this is needed, and it
takes 5 to 20 microseconds per call, as long as a small kernel. Which of it a graph needs was
decided when it was compiled. So the first call compares the tensors on both sides of the code, and
later calls leave it out if it has passed all of them on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch

from autosched._lib.tree import flatten
from autosched.graph.effects import Effects, effects_of

__all__ = ["DirectCalls", "Entry", "written_arguments"]

# Pointers to tensors, in capsules: each belongs to whoever has it, and is used once.
Pointers = list[Any]
Function = Callable[[Pointers], Pointers]

_trials = threading.local()  # .current: the trial that this thread is in


class DirectCalls:
    """Calls a compiled graph, from the second call on its C++ function if that does the same.

    ``call`` is what Inductor returned, and ``written`` are the arguments to which kernels write.
    """

    def __init__(self, call: Callable[..., Sequence[torch.Tensor]], written: Sequence[int]):
        self._call = call
        self._written = written
        self._direct: Function | None = None
        self._is_tried = False

    def __call__(self, *args: torch.Tensor) -> Sequence[Any]:
        """Return the results for these arguments."""
        if self._direct is not None and not torch.is_grad_enabled():
            if self._written:  # for autograd
                torch._C._increment_version([args[i] for i in self._written])
            return _tensors(self._direct(_pointers(args)))
        if self._is_tried or getattr(_trials, "current", None) is not None:
            return self._call(*args)
        return self._try(args)

    def _try(self, args: Sequence[torch.Tensor]) -> Sequence[Any]:
        trial = _trials.current = _Trial()
        try:
            results = self._call(*args)
        finally:
            _trials.current = None
        if trial.passed_on(args, results):
            self._direct = trial.function
        self._is_tried = True
        return results


class Entry:
    """A C++ function for Inductor's Python code, which tells the trial of its thread of each call.

    ``load`` waits for the C++ compiler, and returns the function.
    """

    def __init__(self, load: Callable[[], Function]):
        self._load = load

    def __call__(self, pointers: Pointers) -> Pointers:
        """Return pointers to the results for these arguments."""
        trial: _Trial | None = getattr(_trials, "current", None)
        function = self._load()
        return function(pointers) if trial is None else trial.run(function, pointers)


class _Trial:
    """The C++ function that was called, and the tensors that it took and returned."""

    def __init__(self) -> None:
        self.count = 0  # of calls
        self.function: Function | None = None
        self.taken: list[Any] = []
        self.returned: list[Any] = []

    def run(self, function: Function, pointers: Pointers) -> Pointers:
        self.count += 1
        self.function = function
        self.taken = _tensors(pointers)
        made = function(_pointers(self.taken))
        if None in made:  # a result that is no tensor
            return made
        self.returned = _tensors(made)
        return _pointers(self.returned)

    def passed_on(self, args: Sequence[torch.Tensor], results: Sequence[Any]) -> bool:
        """Whether one function took these arguments and returned these results, as they are.

        New values of arguments, which Python code would write, would be further results.
        """
        are_same = _are_same(args, self.taken) and _are_same(results, self.returned)
        return self.count == 1 and are_same


def written_arguments(graph: torch.fx.GraphModule) -> list[int]:
    """Return the positions of arguments to which a graph of ATen operators writes.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> args = torch.ones(2, 2), torch.ones(2)
    >>> written_arguments(make_fx(lambda x, y: y + x.t()[0].mul_(y))(*args))
    [0]
    """
    found = {
        _memory(argument)
        for node in graph.graph.nodes
        for argument in flatten(_effects(node).writes)
        if isinstance(argument, torch.fx.Node)
    }
    arguments = graph.graph.find_nodes(op="placeholder")
    return [i for i, argument in enumerate(arguments) if argument in found]


def _memory(node: torch.fx.Node) -> torch.fx.Node:
    """Return the argument, or the operator, that a node's result has its memory from."""
    while True:
        effects = _effects(node)
        before = effects.writes[0] if effects.in_place else effects.base
        if node.target is getitem:  # one result of several
            (before,) = node.all_input_nodes
        if not isinstance(before, torch.fx.Node):
            return node
        node = before


def _effects(node: torch.fx.Node) -> Effects:
    target = node.target
    return effects_of(target, node.args, node.kwargs) if callable(target) else Effects()


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))


def _pointers(tensors: Sequence[torch.Tensor]) -> Pointers:
    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([*tensors])


def _tensors(pointers: Pointers) -> list[Any]:
    """Return the tensors, and free the pointers."""
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(pointers)
