"""Run a fused region: several tasks, compiled to few kernels.

A region is compiled for the sizes, strides, dtypes and devices of its arguments and for torch's
settings, at its first call with such arguments. If it cannot be compiled, its tasks are called one
by one.

Regions with the same operators and arguments, such as the layers of a transformer, share one
compiled function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosched._lib.forks import rlock
from autosched._lib.logs import LOG
from autosched.fusion.inductor import (
    Compiled,
    NotTraceableError,
    Submit,
    as_tensor,
    compile_graph,
    described,
    guard,
    results_of,
    trace,
    unavailable,
    unsuitable,
)
from autosched.fusion.structure import structure_of
from autosched.graph.composite import Composite

__all__ = ["Region"]

_MOST = 8  # variants of one region, for different arguments
_LOCK = rlock()  # Inductor compiles one graph at a time


class _Kernels:
    """A compiled function, shared by all regions that would be compiled to the same.

    Inductor may return an argument, a tensor twice, or a part of a larger one, where operators
    return new tensors; and other strides. The first call finds out which results these are, and
    every call copies them. ``expected`` are tensors like the results of the operators; results at
    the positions ``floats`` are floats.
    """

    def __init__(self, compiled: Compiled, expected: Sequence[torch.Tensor], floats: Sequence[int]):
        self._call, self.wait = compiled
        self._floats = floats
        self._expected = [(each.stride(), each.untyped_storage().nbytes()) for each in expected]
        self._copied: list[int] | None = None

    def __call__(self, *args: torch.Tensor) -> list[Any]:
        made: list[Any]
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # the casts are among the operators
                made = list(self._call(*args))
        else:
            made = list(self._call(*args))
        if self._copied is None:
            self._copied = self._to_copy(made, args)
        for i in self._copied:
            made[i] = _copy(made[i], self._expected[i][0])
        for i in self._floats:
            made[i] = made[i].item()
        return made

    def _to_copy(self, made: Sequence[torch.Tensor], args: Sequence[torch.Tensor]) -> list[int]:
        """Return the positions of results that are not tensors of their own, as expected."""
        taken = {_storage(arg) for arg in args}
        found = []
        for i, (item, (strides, nbytes)) in enumerate(zip(made, self._expected, strict=True)):
            larger = item.untyped_storage().nbytes() > nbytes
            if larger or item.stride() != strides or _storage(item) in taken:
                found.append(i)
            taken.add(_storage(item))
        return found


def _copy(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy with these strides; elements with a stride of 0 are written once."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(tensor[once])
    return made


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ranges of memory overlap from the first to the last element of tensors."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(start < end for (_, end), (start, _) in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_shared: weakref.WeakValueDictionary[Hashable, _Kernels] = weakref.WeakValueDictionary()


class _Variant(NamedTuple):
    """What a region calls for some arguments: ``kernels``, or its tasks one by one (None)."""

    matches: Callable[..., bool]
    others: Sequence[Any]  # devices, and which arguments are floats
    kernels: _Kernels | None


class Region:
    """A call of the tasks of ``composite``, fused for ``threads`` threads of a CPU stream.

    ``failure`` is the reason why it is not fused, once that is known.
    """

    def __init__(self, composite: Composite, threads: int):
        self.composite = composite
        self.threads = threads
        self.failure: str | None = None
        self._count = len(composite.takes)
        self._single = len(composite.gives) == 1
        self._variants: list[_Variant] = []  # most recently made first
        self.is_given_up = False

    def give_up(self, why: str) -> None:
        """Call the tasks one by one from now on."""
        self.failure = why
        self.is_given_up = True
        self._variants = []

    def __call__(self, *args: Any) -> Any:
        """Run the region on the values that it takes, and the placeholders for its device."""
        given, others, tensors = self._divided(args)
        for variant in self._variants:
            if variant.others == others and variant.matches(*tensors):
                kernels = variant.kernels
                break
        else:
            kernels = self._compiled(given, others, tensors)
        if kernels is None:
            return self.composite(*args)
        made = kernels(*tensors)
        return made[0] if self._single else tuple(made)

    def begin(self, submit: Submit, *args: Any) -> Any:
        """Begin to compile for such arguments, and run the tasks one by one."""
        self._compiled(*self._divided(args), submit)
        return self.composite(*args)

    def finish(self) -> None:
        """Wait until it is compiled for all arguments for which this has begun."""
        for i, variant in enumerate(self._variants):
            if variant.kernels is not None:
                try:
                    variant.kernels.wait()
                except Exception as error:  # of a C++ compiler, or when its result is loaded
                    self._variants[i] = variant._replace(kernels=None)
                    self._fail(error)

    def __repr__(self) -> str:
        return f"<Region of {len(self.composite.tasks)} tasks>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; compiled functions stay in this process."""
        return self.__dict__ | {"_variants": []}

    @cached_property
    def structure(self) -> str | None:
        """What the region does, as a text that is valid in other processes; None if it has none."""
        text = structure_of(self.composite)
        return text and f"{self.threads} threads: {text}"

    def _divided(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Return the values, on what else the compiled code depends, and the values as tensors."""
        given: Sequence[Any] = args[: self._count]
        others: Sequence[Any] = args[self._count :]
        if float not in map(type, given):
            return given, others, given
        others = *others, [type(arg) is float for arg in given]
        return given, others, list(map(as_tensor, given))

    def _compiled(
        self,
        given: Sequence[Any],
        others: Sequence[Any],
        tensors: Sequence[Any],
        submit: Submit | None = None,
    ) -> _Kernels | None:
        """Return new kernels for such arguments, or those of a thread that was faster; or None."""
        if self.is_given_up or any(isinstance(arg, FakeTensor) for arg in given):
            return None  # in the second case, the region is only traced
        why = unsuitable(given)
        if why is None and len(self._variants) == _MOST:
            why = f"it is called with more than {_MOST} kinds of arguments"
        if why is not None:
            self.failure = why
            return None
        if any(task.writes for task in self.composite.tasks) and _overlap(tensors):
            return None  # kernels would take it for granted in later calls, too
        with _LOCK:
            for variant in self._variants:
                if variant.others == others and variant.matches(*tensors):
                    return variant.kernels
            kernels = self._kernels(given, others, submit)
            self._variants = [_Variant(guard(tensors), others, kernels), *self._variants]
        return kernels

    def _kernels(
        self, given: Sequence[Any], others: Sequence[Any], submit: Submit | None
    ) -> _Kernels | None:
        """Compile the region, or note why that is impossible."""
        devices = others[: len(self.composite.heres)]
        try:
            for kind in sorted({arg.device.type for arg in map(as_tensor, given)}):
                if why := unavailable(kind):
                    raise NotTraceableError(why)
            graph, floats = trace(lambda *values: self._several(*values, *devices), given)
            identity = graph.code, *map(_properties, given), self.threads, _settings()
            kernels = _shared.get(identity)
            if kernels is None:
                compiled = compile_graph(graph, given, self.threads, submit)
                kernels = _shared[identity] = _Kernels(compiled, results_of(graph), floats)
        except Exception as error:  # Inductor raises many kinds of errors
            kernels = None
            self._fail(error)
        return kernels

    def _fail(self, error: Exception) -> None:
        own = isinstance(error, NotTraceableError)
        self.failure = str(error) if own else f"Inductor: {described(error)}"
        LOG.info("%r is not fused: %s", self, self.failure)

    def _several(self, *args: Any) -> list[Any]:
        made = self.composite(*args)
        return [made] if self._single else list(made)


def _properties(arg: Any) -> Hashable:
    if type(arg) is float:
        return "float"
    return tuple(arg.shape), arg.stride(), arg.dtype, arg.device


def _settings() -> Hashable:
    """Return the settings of torch on which the code of operators depends."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
