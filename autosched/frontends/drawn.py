"""Detect steps that consume iterators, generators, queues or files.

These return something else in the next call. Also detects changes of objects that Python does not
reach by attribute names: NumPy arrays and context variables. Knows no graph.
"""

from __future__ import annotations

import gc
import io
import queue
import random
import sys
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Drawn"]

_GIVING = (
    torch.Generator,
    random.Random,
    queue.Queue,
    queue.SimpleQueue,
    io.IOBase,
    ContextVar,
    array,
)
_DEPTH = 6  # of iterators over iterators
_UNLIKELY = (
    0x5EED_0F_A_C0DE  # a seed that no step sets: setting the present one could not be detected
)


class Drawn:
    """The positions of those ``items`` that return something else each time.

    >>> numbers = iter([1, 2])
    >>> drawn = Drawn([numbers, "else"])
    >>> drawn.moved() is None, next(numbers), drawn.moved() is numbers
    (True, 1, True)
    """

    def __init__(self, items: Iterable[Any]):
        self._restore: list[Callable[[], Any]] = []
        self._positions = [
            (item, _position(item)) for item in map(self._prepared, items) if _gives(item)
        ]

    def moved(self) -> Any:
        """Return the first item whose position has changed; None if there is none."""
        return next((item for item, before in self._positions if _position(item) != before), None)

    def restore(self) -> None:
        """Restore the random number generators."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for restore in self._restore:
                restore()

    def _prepared(self, item: Any) -> Any:
        """Return an item, and store how to restore it."""
        if isinstance(item, torch.Generator):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                state = item.get_state()
            self._restore.append(lambda: item.set_state(state))
            item.manual_seed(_UNLIKELY)
        elif isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
            own = item.getstate()
            self._restore.append(lambda: item.setstate(own))
        elif _is_numpy(item, "BitGenerator"):
            bits = item.state
            self._restore.append(lambda: setattr(item, "state", bits))
        elif _is_numpy(item, "Generator", "RandomState"):
            self._prepared(_bits(item))
        return item


def _gives(item: Any) -> bool:
    """Whether an object may return something else each time, depending on hidden state."""
    if isinstance(item, _GIVING) or _is_numpy(
        item, "Generator", "RandomState", "BitGenerator", "ndarray"
    ):
        return not isinstance(item, random.SystemRandom)
    kind = type(item)
    return isinstance(item, GeneratorType) or (
        hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    )


def _position(item: Any, depth: int = 0) -> Hashable:
    """Return the position of an object: equal if nothing was taken from it."""
    match item:
        case torch.Generator():
            with (
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
            ):  # its state is a tensor with data
                return bytes(item.get_state().numpy())
        case random.Random():
            return item.getstate()
        case queue.Queue() | queue.SimpleQueue():
            return item.qsize()
        case io.IOBase():
            return _of_file(item)
        case ContextVar():
            return id(item.get(None))
        case GeneratorType():
            return _of_generator(item, depth)
    if hasattr(item, "tobytes"):
        return zlib.crc32(item.tobytes())
    if _is_numpy(item, "Generator", "RandomState", "BitGenerator"):
        return repr(_bits(item).state)
    return type(item), _told(_reduced(item), depth) if depth < _DEPTH else None


def _of_file(file: io.IOBase) -> int:
    try:
        return file.tell()
    except (OSError, ValueError):  # closed; or its lines are being read one by one
        return -1


def _of_generator(item: GeneratorType[Any, Any, Any], depth: int) -> Hashable:
    frame = item.gi_frame
    if frame is None or depth >= _DEPTH:
        return frame is None
    held = [*frame.f_locals.values(), item.gi_yieldfrom]
    return frame.f_lasti, tuple(
        _told(part, depth + 1) if _is_told(part) else id(part) for part in held
    )


def _reduced(item: Any) -> Any:
    """Return the arguments from which an iterator could be constructed again."""
    try:
        return item.__reduce__()
    except TypeError:  # not supported for itertools in Python 3.14
        return repr(item), *gc.get_referents(item)


def _told(part: Any, depth: int) -> Hashable:
    """Return a value that identifies a part of an iterator.

    For parts that may be recreated each time, their size.
    """
    match part:
        case tuple():
            return tuple(_told(item, depth + 1) for item in part) if depth < _DEPTH else len(part)
        case bool() | int() | float() | str() | bytes() | range():
            return part
        case list() | dict() | set():
            return len(part)
    return _position(part, depth + 1) if _gives(part) else str(type(part))


def _is_told(part: Any) -> bool:
    return isinstance(part, (bool, int, float, str, bytes)) or _gives(part)


def _is_numpy(item: Any, *names: str) -> bool:
    """Whether an item is of one of these NumPy classes, which need not exist."""
    homes = [
        module
        for name in ("numpy", "numpy.random")
        if (module := sys.modules.get(name)) is not None
    ]
    return isinstance(
        item, tuple(getattr(home, name) for home in homes for name in names if hasattr(home, name))
    )


def _bits(item: Any) -> Any:
    """Return the bit generator of a NumPy generator."""
    return getattr(item, "_bit_generator", None) or getattr(item, "bit_generator", item)
