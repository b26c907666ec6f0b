"""Find tensors that cross the border of a capture through caches.

``functools.lru_cache``, ``cache`` and ``cached_property`` keep what a capture computes, which has
no data, and return to a capture what was computed before it. They may be emptied, because what they
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

__all__ = ["Made", "emptied_caches_of"]

_LRU = type(functools.lru_cache(lambda: None))
_DEPTH = 4  # of lists, dicts and objects in a cache
_MANY = 50  # things whose holders are looked for: each is compared with all that there is


class Made:
    """The tensors that torch made in a capture."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def note(self, result: Any) -> None:
        """Store the fake tensors in a result of torch."""
        self._refs += [
            weakref.ref(leaf) for leaf in flatten(result) if isinstance(leaf, FakeTensor)
        ]

    def removed(self, kept: Iterable[Any] = ()) -> list[str]:
        """Empty the caches that hold such a tensor, remove it from other containers, and return the names of these.

        Tensors in ``kept`` may remain where they are.
        """
        known = {id(item) for item in kept}
        self._refs = [ref for ref in self._refs if id(ref()) not in known]
        # Most of what is left is garbage in cycles. Garbage collection is paused during a capture, so this garbage is
        # young, and collecting the young generations is cheap; looking for holders visits all objects there are.
        if self._left():
            gc.collect(1)
        left = self._left()
        if not _holders(left):  # but for what torch holds in C++, which no later call finds
            self._refs = []
            return []
        if len(left) <= _MANY and emptied_caches_of(*left):
            left = self._left()
        if left:
            del left
            gc.collect()
            left = self._left()
            if left and emptied_caches_of(*left):
                del left
                left = self._left()
        places = list(_removed(left))
        self._refs = []
        return places

    def _left(self) -> list[torch.Tensor]:
        return [tensor for ref in self._refs if (tensor := ref()) is not None]


def emptied_caches_of(*tensors: torch.Tensor) -> bool:
    """Empty the caches that hold any of these tensors; return whether there were any."""
    found = list(_caches(tensors))
    for empty in found:
        empty()
    return bool(found)


def _caches(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], Any]]:
    """Yield functions that empty the caches that hold tensors, also in lists, dicts and objects."""
    seen: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    held: list[Any] = list(tensors)
    own = {id(tensors), id(seen), id(held)}
    for _ in range(_DEPTH):
        if not 0 < len(held) <= _MANY:
            return
        found = {
            id(item): item
            for item in gc.get_referrers(*held)
            if id(item) not in own and id(item) not in seen
        }
        del held[:]
        for item in found.values():
            if isinstance(item, _LRU):
                yield item.cache_clear
            elif not isinstance(
                item, (FrameType, GeneratorType, ModuleType, type)
            ) and not _is_module_dict(item):
                yield from _properties(item, seen)
                held.append(item)
        seen |= {id(item): item for item in held}


def _properties(item: Any, seen: dict[int, Any]) -> Iterator[Callable[[], Any]]:
    """Yield functions that delete those cached properties of an object whose values were seen."""
    for name, value in list(getattr(item, "__dict__", {}).items()):
        if id(value) in seen and isinstance(
            getattr(type(item), name, None), functools.cached_property
        ):
            yield functools.partial(item.__dict__.pop, name, None)


def _is_module_dict(item: Any) -> bool:
    return isinstance(item, dict) and "__name__" in item and "__spec__" in item


def _holders(left: list[torch.Tensor]) -> list[Any]:
    """Return the objects that hold any of these tensors, but for the list itself and for frames."""
    if not left:
        return []
    found = gc.get_referrers(*left)
    return [item for item in found if item is not left and not isinstance(item, FrameType)]


def _removed(left: list[torch.Tensor]) -> Iterator[str]:
    """Take tensors out of the lists and dicts that hold them; yield what these are."""
    known = {id(tensor) for tensor in left}
    for holder in _holders(left):
        if type(holder) in (dict, OrderedDict, defaultdict):
            for key in [key for key, item in holder.items() if id(item) in known]:
                owner = _owner(holder)
                if owner:
                    holder[key] = None  # so that code that asks for it finds nothing there
                else:
                    del holder[key]
                yield f"{key!r} of {owner}" if owner else f"{_variable(holder)}[{key!r}]"
        elif type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in known]
            yield _variable(holder)


def _owner(attributes: dict[Any, Any]) -> str:
    """Return the object with these attributes; None for a dict that is not an object's."""
    if _is_module_dict(attributes):
        return f"module {attributes['__name__']!r}"
    for owner in gc.get_referrers(attributes):
        if not isinstance(owner, FrameType) and getattr(owner, "__dict__", None) is attributes:
            return f"a {type(owner).__name__}"
    return ""


def _variable(holder: Any) -> str:
    """Return the name of a list or dict in its module."""
    for owner in gc.get_referrers(holder):
        if isinstance(owner, dict) and _is_module_dict(owner):
            name = next((key for key, item in owner.items() if item is holder), "?")
            return f"{owner['__name__']}.{name}"
    return f"a {type(holder).__name__}"
