"""Compile numeric loops with numba where that pays off.

A *kernel* is a function of numbers and flat sequences of numbers that calls only kernels and
``math``. Compiling takes seconds the first time on a machine (later the result is loaded from
disk). So a kernel is compiled only if that takes less time than running its source as Python, over
lists, which Python reads faster than arrays. Which of the two runs depends on the process, so both
must give the same bits; ``tests/policies`` checks that. This module knows no graph and no machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=tuple[Any, ...])
_KERNELS: list[Callable[..., Any]] = []
_REGISTERED: list[Callable[..., Any]] = []


def kernel(function: F) -> F:
    """Mark a function as a kernel, which kernels may call; return it unchanged."""
    _KERNELS.append(function)
    return function


PRIME = 2147483647


@kernel
def below(random: Any, count: int) -> int:
    """Return a random number below ``count``, by a state of one number from 1 to ``PRIME - 1``.

    Park and Miller, CACM 31(10), 1988.
    """
    random[0] = random[0] * 48271 % PRIME
    return int(random[0] % count)


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
    """Return a kernel compiled to machine code, which is cached on disk next to its source."""
    import numba
    from numba.extending import register_jitable

    for known in _KERNELS[len(_REGISTERED) :]:
        _REGISTERED.append(register_jitable(known))
    _IN_USE.add(function)
    # The name becomes the file name of the cache. Numba detects changes in the function's own
    # module, but not in the modules of functions that it calls.
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__qualname__ = _name(function)
    twin.__module__ = function.__module__
    # Kernels allocate no arrays, so their code counts no references to arrays. Otherwise most
    # accesses to tables change a count atomically, which takes several times as long as the rest.
    options: dict[str, Any] = {"_nrt": False}
    try:
        return cast(F, numba.njit(cache=True, **options)(twin))
    except RuntimeError:  # no cache folder is writable
        return cast(F, numba.njit(**options)(twin))


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__name__}_{_stamp(function)}"


@functools.cache
def _stamp(function: Callable[..., Any]) -> str:
    """Return a hash of the sources of a kernel, those it may call, their tables, and this one."""
    modules = [__name__, function.__module__]
    for name in modules:  # the list grows during the loop
        for item in vars(sys.modules[name]).values():
            is_table = isinstance(item, type) and issubclass(item, tuple)
            is_kernel = isinstance(item, types.FunctionType) and item in _KERNELS
            if (is_table or is_kernel) and item.__module__ not in modules:
                modules.append(item.__module__)
    sources = [Path(str(sys.modules[name].__file__)).read_bytes() for name in modules]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:12]


class Mode(NamedTuple):
    """How kernels run: compiled over arrays, or uncompiled over lists."""

    fast: bool

    def __call__(self, function: F) -> F:
        """Return a kernel, compiled if this mode is fast."""
        return _compiled(function) if self.fast else function

    def numbers(self, size: int, fill: float = 0.0) -> Any:
        """Return an array or list of floats."""
        if self.fast:  # memory of zeros is allocated where they are written
            return np.full(size, fill) if fill else np.zeros(size)
        return [fill] * size

    def counts(self, size: int, fill: int = 0) -> Any:
        """Return an array or list of integers."""
        return np.full(size, fill, np.int64) if self.fast else [fill] * size

    def small(self, size: int) -> Any:
        """Return zeros for 32-bit integers; memory is allocated where they are written."""
        return np.zeros(size, np.int32) if self.fast else [0] * size

    def of(self, tables: T) -> T:
        """Return a named tuple of flat arrays in the form for kernels."""
        return type(tables)(
            *(np.ascontiguousarray(item) if self.fast else item.tolist() for item in tables)
        )

    def floats(self, items: Any) -> Any:
        """Return floats in the form for kernels."""
        return np.ascontiguousarray(items, float) if self.fast else np.asarray(items).tolist()

    def whole(self, items: Any) -> Any:
        """Return a copy of integers in the form for kernels."""
        return np.array(items, np.int64) if self.fast else np.asarray(items, np.int64).tolist()


def mode(work: float, *kernels: Callable[..., Any]) -> Mode:
    """Return the mode for some work of kernels, in steps; Python does a million a second.

    1. Very small work is done uncompiled, since converting its tables takes longer.
    2. Kernels that this process has compiled or loaded are used.
    3. Kernels that were compiled earlier, and are on disk, are loaded if that pays off.
    4. Others are compiled if that takes less time than the work, and the work that this process has
       done uncompiled for lack of them.

    >>> mode(1000).fast
    False
    """
    if work <= _WORTH_CALLING:
        return Mode(False)
    absent = [f for f in kernels if f not in _IN_USE and not _is_on_disk(f)]
    for function in absent:
        _UNCOMPILED[function] = _UNCOMPILED.get(function, 0.0) + work
    if absent:
        fast = max(_UNCOMPILED[function] for function in absent) > _WORTH_COMPILING
    else:
        fast = bool(_REGISTERED) or work > _WORTH_IMPORTING
    return Mode(fast and is_there())


@functools.cache
def _is_on_disk(function: Callable[..., Any]) -> bool:
    """Return whether numba has the compiled kernel in one of its folders; do not import numba."""
    source = Path(function.__code__.co_filename)
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        folders = [*Path(chosen).glob("*")]
    else:
        folders = [source.parent / "__pycache__", *Path.home().glob(".cache/numba/*")]
    version = "".join(map(str, sys.version_info[:2]))
    pattern = f"{source.stem}.{_name(function)}-*.py{version}.nbi"
    since = source.stat().st_mtime
    return any(
        index.stat().st_mtime >= since for folder in folders for index in folder.glob(pattern)
    )


_IN_USE: set[Callable[..., Any]] = set()  # compiled or loaded by this process
# Steps done uncompiled because a kernel was not compiled yet.
_UNCOMPILED: dict[Callable[..., Any], float] = {}
_WORTH_CALLING = 5e3  # steps
_WORTH_IMPORTING = 3e4  # importing takes half a second
_WORTH_COMPILING = 3e6  # compiling takes about three seconds
