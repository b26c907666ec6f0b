"""Detect steps that consume iterators, generators, queues or files.

These return something else in the next call. Also detects changes of objects whose contents are not
attributes: NumPy arrays and context variables. Knows no graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import pickle
import queue
import random
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

import numpy
import torch
from numpy.random import BitGenerator, RandomState
from numpy.random import Generator as NumpyGenerator
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["HiddenStates"]

_STATEFUL = (
    *(torch.Generator, random.Random, RandomState, NumpyGenerator, BitGenerator),
    *(queue.Queue, queue.SimpleQueue, io.IOBase, GeneratorType),
    *(ContextVar, array, numpy.ndarray),
)
_GLOBAL = {
    "Python's random": random._inst,
    "NumPy's random": numpy.random.mtrand._rand,
}
_DEPTH = 6  # of iterators over iterators
# A seed that no step sets: setting the present one could not be detected.
_UNLIKELY_SEED = 0x5EED_0F_A_C0DE


class HiddenStates:
    """The states of ``items`` and of the global random number generators.

    >>> numbers = iter([1, 2])
    >>> states = HiddenStates([numbers, "else"])
    >>> states.changed() is None, next(numbers), states.changed() is numbers
    (True, 1, True)
    """

    def __init__(self, items: Iterable[Any]):
        found = [item for item in (*items, *_GLOBAL.values()) if _is_stateful(item)]
        self._restore = [restore for item in found for restore in _prepared(item)]
        self._before = [(item, _state(item)) for item in found]

    def changed(self) -> Any:
        """Return the first item with another state now, or None."""
        return next((item for item, before in self._before if _state(item) != before), None)

    def name_of(self, item: Any) -> str | None:
        """Return the name of a global random number generator, or None."""
        return next((name for name, known in _GLOBAL.items() if known is item), None)

    def restore(self) -> None:
        """Restore the random number generators."""
        with _on_real_tensors():
            for restore in self._restore:
                restore()


@contextlib.contextmanager
def _on_real_tensors() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _prepared(item: Any) -> Iterator[Callable[[], Any]]:
    """Yield the function that restores a random number generator.

    Seed a generator of torch, so that setting its present seed can be detected.
    """
    if isinstance(item, NumpyGenerator):
        item = item.bit_generator
    match item:
        case torch.Generator():
            with _on_real_tensors():
                state = item.get_state()
            yield functools.partial(item.set_state, state)
            item.manual_seed(_UNLIKELY_SEED)
        case random.Random():
            yield functools.partial(item.setstate, item.getstate())
        case RandomState():
            yield functools.partial(item.set_state, item.get_state())
        case BitGenerator():
            yield functools.partial(setattr, item, "state", item.state)


def _is_stateful(item: Any) -> bool:
    """Whether an object has hidden state, and may return different things."""
    if isinstance(item, _STATEFUL):
        return not isinstance(item, random.SystemRandom)
    kind = type(item)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def _state(item: Any, depth: int = 0) -> Hashable:
    """Return a value that is equal until an object is consumed."""
    match item:
        case torch.Generator():
            with _on_real_tensors():  # its state is a tensor with data
                return bytes(item.get_state().numpy())
        case random.Random():
            return item.getstate()
        case RandomState():
            return pickle.dumps(item.get_state(legacy=False))
        case NumpyGenerator():
            return pickle.dumps(item.bit_generator.state)
        case BitGenerator():
            return pickle.dumps(item.state)
        case numpy.ndarray() | array():
            return zlib.crc32(item.tobytes())
        case queue.Queue() | queue.SimpleQueue():
            return item.qsize()
        case io.IOBase():
            with contextlib.suppress(OSError, ValueError):  # closed, or being read line by line
                return item.tell()
            return -1
        case ContextVar():
            return id(item.get(None))
        case GeneratorType():
            return _of_generator(item, depth)
    return type(item), _part(_reduced(item), depth) if depth < _DEPTH else None


def _of_generator(item: GeneratorType[Any, Any, Any], depth: int) -> Hashable:
    frame = item.gi_frame
    if frame is None or depth >= _DEPTH:
        return frame is None
    held = [*frame.f_locals.values(), item.gi_yieldfrom]
    comparable = (bool, int, float, str, bytes)
    return frame.f_lasti, tuple(
        _part(part, depth + 1) if isinstance(part, comparable) or _is_stateful(part) else id(part)
        for part in held
    )


def _reduced(item: Any) -> Any:
    """Return the arguments from which an iterator could be constructed again."""
    try:
        return item.__reduce__()
    except TypeError:  # not supported for itertools in Python 3.14
        return repr(item), *gc.get_referents(item)


def _part(part: Any, depth: int) -> Hashable:
    """Return a value for a part of an iterator; the size of one that may be recreated."""
    match part:
        case tuple():
            return tuple(_part(item, depth + 1) for item in part) if depth < _DEPTH else len(part)
        case bool() | int() | float() | str() | bytes() | range():
            return part
        case list() | dict() | set():
            return len(part)
    return _state(part, depth + 1) if _is_stateful(part) else str(type(part))
