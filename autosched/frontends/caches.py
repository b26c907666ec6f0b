"""Find tensors that enter or leave a capture through caches.

``functools.lru_cache``, ``cache`` and ``cached_property`` retain what a capture computes, which has
no data, and return to a capture what was computed before it. They may be cleared, because what they
contained is then computed again. Knows no graph.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, GeneratorType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosched._lib.tree import flatten

__all__ = ["MadeTensors", "clear_caches_of"]

_LRU = type(functools.lru_cache(lambda: None))
_DEPTH = 4  # of lists, dicts and objects in a cache
_MOST = 50  # objects whose referrers are searched: each is compared with all objects


class MadeTensors:
    """The fake tensors that torch made in a capture."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def add(self, result: Any) -> None:
        """Store the fake tensors in a result of torch."""
        fakes = [leaf for leaf in flatten(result) if isinstance(leaf, FakeTensor)]
        self._refs += map(weakref.ref, fakes)

    def remove(self, retained: Iterable[Any] = ()) -> list[str]:
        """Remove the tensors from caches and other containers.

        Return the names of the others. Tensors in ``retained`` may remain where they are. Searching
        referrers visits all objects, so steps that often suffice come first.

        1. Collect young garbage. Collection is paused during a capture, so its garbage is young.
        2. If no container holds a tensor, stop: torch holds some in C++, where no call finds them.
        3. Clear the caches that hold tensors.
        4. Collect all garbage, and clear caches again.
        5. Remove what remains from lists and dicts.
        """
        known = {id(item) for item in retained}
        self._refs = [ref for ref in self._refs if id(ref()) not in known]
        if self._alive():
            gc.collect(1)
        alive = self._alive()
        if not _holders(alive):
            self._refs = []
            return []
        if len(alive) <= _MOST and clear_caches_of(*alive):
            alive = self._alive()
        if alive:
            del alive
            gc.collect()
            alive = self._alive()
            if alive and clear_caches_of(*alive):
                del alive
                alive = self._alive()
        names = list(_removed(alive))
        self._refs = []
        return names

    def _alive(self) -> list[torch.Tensor]:
        return [tensor for ref in self._refs if (tensor := ref()) is not None]


def clear_caches_of(*tensors: torch.Tensor) -> bool:
    """Clear the caches that hold these tensors; return whether any did."""
    found = list(_caches(tensors))
    for clear in found:
        clear()
    return bool(found)


def _caches(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], Any]]:
    """Yield functions that clear caches that hold tensors, also within objects."""
    seen: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    held: list[Any] = list(tensors)
    own = {id(tensors), id(seen), id(held)}
    for _ in range(_DEPTH):
        if not 0 < len(held) <= _MOST:
            return
        # Without our own containers, which would be in a reference cycle.
        known = own | seen.keys()
        found = [item for item in gc.get_referrers(*held) if id(item) not in known]
        held.clear()
        for item in found:
            if isinstance(item, _LRU):
                yield item.cache_clear
            elif not _is_namespace(item):
                yield from _properties(item, seen)
                held.append(item)
        del found
        seen |= {id(item): item for item in held}


def _properties(item: Any, seen: dict[int, Any]) -> Iterator[Callable[[], Any]]:
    """Yield functions that delete cached properties whose values were seen."""
    for name, value in list(getattr(item, "__dict__", {}).items()):
        kind = getattr(type(item), name, None)
        if id(value) in seen and isinstance(kind, functools.cached_property):
            yield functools.partial(item.__dict__.pop, name, None)


def _is_namespace(item: Any) -> bool:
    """Whether an object holds the variables of code."""
    return isinstance(item, (FrameType, GeneratorType, ModuleType, type)) or _is_globals(item)


def _is_globals(item: Any) -> bool:
    return isinstance(item, dict) and "__name__" in item and "__spec__" in item


def _holders(alive: list[torch.Tensor]) -> list[Any]:
    if not alive:
        return []
    found = gc.get_referrers(*alive)
    return [item for item in found if item is not alive and not isinstance(item, FrameType)]


def _removed(alive: list[torch.Tensor]) -> Iterator[str]:
    """Remove tensors from lists and dicts; yield the names of these."""
    known = {id(tensor) for tensor in alive}
    for holder in _holders(alive):
        if type(holder) in (dict, OrderedDict, defaultdict):
            for key in [key for key, item in holder.items() if id(item) in known]:
                if owner := _owner(holder):
                    holder[key] = None  # code may expect the attribute
                    yield f"{key!r} of {owner}"
                else:
                    del holder[key]
                    yield f"{_variable(holder)}[{key!r}]"
        elif type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in known]
            yield _variable(holder)


def _owner(attributes: dict[Any, Any]) -> str:
    """Return the name of the object with these attributes, or ""."""
    if _is_globals(attributes):
        return f"module {attributes['__name__']!r}"
    for owner in gc.get_referrers(attributes):
        if not isinstance(owner, FrameType) and getattr(owner, "__dict__", None) is attributes:
            return f"a {type(owner).__name__}"
    return ""


def _variable(holder: Any) -> str:
    """Return the name of a list or dict in its module."""
    for owner in gc.get_referrers(holder):
        if _is_globals(owner):
            name = next((key for key, item in owner.items() if item is holder), "?")
            return f"{owner['__name__']}.{name}"
    return f"a {type(holder).__name__}"
