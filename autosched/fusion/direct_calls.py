"""Call the C++ function of a compiled graph without the Python code of Inductor around it.

That code converts arguments and results: it joins those that share memory, makes views again, and
writes results that are new values of arguments. For most graphs none of this is needed, and it
takes 5 to 20 microseconds per call, as long as a small kernel. What it does depends on the graph
alone. So the first call compares the tensors on both sides of it, and later calls leave it out if
it passed all of them on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["DirectCalls", "Entry"]

Pointers = list[Any]  # to tensors, in capsules; a function that takes them owns them
_trials = threading.local()  # .current: the trial that this thread is in


class DirectCalls:
    """A compiled function of tensors on the CPU that is called directly if that is the same."""

    def __init__(self, call: Callable[..., Sequence[torch.Tensor]]):
        self._call = call
        self._is_tried = False
        self._direct: Callable[[Pointers], Pointers] | None = None
        self._written: list[int] = []  # arguments whose versions count writes of kernels

    def __call__(self, *args: torch.Tensor) -> Sequence[Any]:
        """Return the results for these arguments."""
        if self._direct is not None and not torch.is_grad_enabled():
            if self._written:
                torch._C._increment_version([args[i] for i in self._written])
            return _tensors(self._direct(_pointers(args)))
        if self._is_tried or getattr(_trials, "current", None) is not None:
            return self._call(*args)
        return self._try(args)

    def _try(self, args: Sequence[torch.Tensor]) -> Sequence[Any]:
        before = list(map(_version, args))
        trial = _trials.current = _Trial()
        try:
            results = self._call(*args)
        finally:
            _trials.current = None
        if trial.passed_on(args, results):
            self._written = [i for i, old in enumerate(before) if trial.before[i] > old]
            self._direct = trial.function
        self._is_tried = True
        return results


class Entry:
    """A C++ function of Inductor, as its Python code calls it; ``load`` waits for the compiler."""

    def __init__(self, load: Callable[[], Callable[[Pointers], Pointers]]):
        self._load = load

    def __call__(self, pointers: Pointers) -> Pointers:
        """Return pointers to the results for these arguments."""
        trial: _Trial | None = getattr(_trials, "current", None)
        function = self._load()
        return function(pointers) if trial is None else trial.run(function, pointers)


class _Trial:
    """What C++ functions take and return during one call, and versions of what they take."""

    def __init__(self) -> None:
        self.count = 0
        self.function: Callable[[Pointers], Pointers] | None = None
        self.taken: list[Any] = []
        self.returned: list[Any] = []
        self.before: list[int] = []
        self.after: list[int] = []

    def run(self, function: Callable[[Pointers], Pointers], pointers: Pointers) -> Pointers:
        self.count += 1
        self.function = function
        self.taken = _tensors(pointers)
        self.before = list(map(_version, self.taken))
        made = function(_pointers(self.taken))
        self.after = list(map(_version, self.taken))
        if None in made:  # no tensor, so nothing can be compared
            return made
        self.returned = _tensors(made)
        return _pointers(self.returned)

    def passed_on(self, args: Sequence[torch.Tensor], results: Sequence[Any]) -> bool:
        """Whether one function took these arguments and returned these results, as they are."""
        return (
            self.count == 1
            and _are_same(args, self.taken)
            and _are_same(results, self.returned)
            and list(map(_version, args)) == self.after
        )


def _are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(a is b for a, b in zip(ones, others, strict=True))


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written; those of inference mode do not know."""
    return 0 if tensor.is_inference() else tensor._version


def _pointers(tensors: Sequence[torch.Tensor]) -> Pointers:
    return torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([*tensors])


def _tensors(pointers: Pointers) -> list[Any]:
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(pointers)
