"""Run a fused region: several tasks, compiled to few kernels.

A region is compiled for the sizes, strides, dtypes and devices of its arguments, at its first call
with such arguments. If it cannot be compiled, its tasks are called one by one.

Regions with the same operators and arguments, such as the layers of a transformer, share one
compiled function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from autosched._lib.forks import rlock
from autosched._lib.logs import LOG
from autosched.fusion.inductor import (
    NotTraceableError,
    as_tensor,
    compile_graph,
    guard,
    trace,
    unavailable,
)
from autosched.graph.composite import Composite

__all__ = ["Region"]

_MOST = 8  # variants of one region, for different arguments
_LOCK = rlock()  # Inductor compiles one graph at a time


class _Kernels:
    """A compiled function, shared by all regions that would be compiled to the same.

    ``floats`` are the positions of results that are floats; the function returns them as tensors.
    """

    def __init__(self, call: Callable[..., Sequence[torch.Tensor]], floats: Sequence[int]):
        self.call = call
        self.floats = floats


_shared: weakref.WeakValueDictionary[Hashable, _Kernels] = weakref.WeakValueDictionary()


class _Variant(NamedTuple):
    """What a region calls for some arguments: ``kernels``, or its tasks one by one (None)."""

    matches: Callable[..., bool]
    key: Hashable  # the properties of the arguments
    kernels: _Kernels | None


class Region:
    """A call of the tasks of ``composite``, fused for ``threads`` threads of a CPU stream.

    ``failure`` is the reason why it is not fused, once that is known. ``on_compiled`` is called
    when it has been compiled, or could not be.
    """

    def __init__(self, composite: Composite, threads: int):
        self.composite = composite
        self.threads = threads
        self.failure: str | None = None
        self.on_compiled: Callable[[], None] | None = None
        self._count = len(composite.takes)
        self._single = len(composite.gives) == 1
        self._variants: list[_Variant] = []  # most recently made first

    def __call__(self, *args: Any) -> Any:
        """Run the region on the values that it takes, and the placeholders for its device."""
        given: Sequence[Any] = args[: self._count]
        if float in map(type, given):
            given = list(map(as_tensor, given))
        for variant in self._variants:
            if variant.matches(*given):
                break
        else:
            variant = self._variant(args[: self._count], args[self._count :])
        if variant.kernels is None:
            return self.composite(*args)
        made: list[Any] = list(variant.kernels.call(*given))
        for i in variant.kernels.floats:
            made[i] = made[i].item()
        return made[0] if self._single else tuple(made)

    @property
    def is_compiled(self) -> bool:
        """Whether it has been called, and so compiled if possible."""
        return bool(self._variants)

    def __repr__(self) -> str:
        return f"<Region of {len(self.composite.tasks)} tasks>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; compiled functions stay in this process."""
        return self.__dict__ | {"_variants": [], "on_compiled": None}

    def _variant(self, given: Sequence[Any], devices: Sequence[Any]) -> _Variant:
        """Return a new variant for such arguments; compile it unless one differs in guards only."""
        with _LOCK:
            key = tuple(map(_properties, given))
            found = [variant for variant in self._variants if variant.key == key]
            kernels = found[0].kernels if found else self._kernels(key, given, devices)
            tensors = list(map(as_tensor, given))
            guarded = all(isinstance(arg, torch.Tensor) for arg in tensors)
            made = _Variant(guard(tensors) if guarded else _always, key, kernels)
            self._variants = [made, *self._variants[: _MOST - 1]]
        if self.on_compiled is not None:
            self.on_compiled()
        return made

    def _kernels(
        self, key: Hashable, given: Sequence[Any], devices: Sequence[Any]
    ) -> _Kernels | None:
        """Compile the region, or note why that is impossible."""
        try:
            for kind in sorted({arg.device.type for arg in given if hasattr(arg, "device")}):
                if why := unavailable(kind):
                    raise NotTraceableError(why)
            graph, floats = trace(lambda *values: self._several(*values, *devices), given)
            identity = graph.code, key, self.threads
            kernels = _shared.get(identity)
            if kernels is None:
                compiled = compile_graph(graph, list(map(as_tensor, given)), self.threads)
                positions = [i for i, is_float in enumerate(floats) if is_float]
                kernels = _shared[identity] = _Kernels(compiled, positions)
        except Exception as error:  # Inductor raises many kinds of errors
            kernels = None
            own = isinstance(error, NotTraceableError)
            self.failure = str(error) if own else f"Inductor: {type(error).__name__}: {error}"
            LOG.info("%r is not fused: %s", self, self.failure)
        return kernels

    def _several(self, *args: Any) -> list[Any]:
        made = self.composite(*args)
        return [made] if self._single else list(made)


def _properties(arg: Any) -> Hashable:
    if not isinstance(arg, torch.Tensor):
        return type(arg).__name__
    return tuple(arg.shape), arg.stride(), arg.dtype, arg.device


def _always(*_: Any) -> bool:
    return True
