"""Compile loops over tables of numbers where that pays, and run the same source as plain Python where it does not.

A *kernel* is a function of numbers and flat sequences of numbers that calls only kernels and ``math``. Compiling takes
seconds the first time on a machine (later it is found on disk), so small work is done by the uncompiled source, over
lists, which plain Python reads faster than arrays. Both give the same bits. Knows no graph and no machine.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

__all__ = ["Mode", "is_there", "kernel", "mode"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=tuple[Any, ...])
_KERNELS: list[Callable[..., Any]] = []
_REGISTERED: list[Callable[..., Any]] = []


def kernel(function: F) -> F:
    """Mark a function as one that can be compiled and that others which are may call; returns it as it is."""
    _KERNELS.append(function)
    return function


@functools.cache
def is_there() -> bool:
    """Return whether numba can be imported."""
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _compiled(function: F) -> F:
    """Return a kernel compiled to machine code, which is kept on disk next to its source."""
    import numba
    from numba.extending import register_jitable

    for known in _KERNELS[len(_REGISTERED) :]:
        _REGISTERED.append(register_jitable(known))
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__qualname__ = (
        f"{function.__name__}_{_stamp()}"  # names the file; numba itself sees changes in one source only
    )
    twin.__module__ = function.__module__
    return cast(F, numba.njit(cache=True)(twin))


@functools.cache
def _stamp() -> str:
    """Return what tells the sources of all kernels from any other."""
    names = dict.fromkeys(known.__code__.co_filename for known in _KERNELS)
    return hashlib.sha256(b"".join(Path(name).read_bytes() for name in names)).hexdigest()[:12]


class Mode(NamedTuple):
    """How kernels run: compiled over arrays, or as they are over lists."""

    fast: bool

    def __call__(self, function: F) -> F:
        """Return a kernel as it is to be called."""
        return _compiled(function) if self.fast else function

    def numbers(self, size: int, fill: float = 0.0) -> Any:
        """Return so many floats."""
        return np.full(size, fill) if self.fast else [fill] * size

    def counts(self, size: int, fill: int = 0) -> Any:
        """Return so many whole numbers."""
        return np.full(size, fill, np.int64) if self.fast else [fill] * size

    def of(self, tables: T) -> T:
        """Return a named tuple of flat arrays as kernels are to read it."""
        return tables if self.fast else type(tables)(*(item.tolist() for item in tables))

    def whole(self, items: Any) -> Any:
        """Return a copy of whole numbers as kernels are to read them."""
        return np.array(items, np.int64) if self.fast else np.asarray(items, np.int64).tolist()


def mode(work: float) -> Mode:
    """Return the mode for so much work, in steps of a kernel, of which plain Python does about a million a second.

    Numba is imported when so much has been asked for, in all, that it pays.

    >>> mode(1000).fast
    False
    """
    _asked.append(work + (_asked.pop() if _asked else 0.0))
    return Mode(work > _WORTH_CALLING and (bool(_REGISTERED) or _asked[0] > _WORTH_IMPORTING) and is_there())


_asked: list[float] = []
_WORTH_CALLING = 5e3  # steps
_WORTH_IMPORTING = 1e5  # which takes half a second, and compiling for the first time some seconds
