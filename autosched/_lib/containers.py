"""Find and replace the tensors in containers, among arguments and results of a function.

They are tuples, lists, dicts, mappings around a dict (``UserDict``, such as the batches of
tokenizers) and dataclasses.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from autosched._lib.tree import transform


def parts_of(item: Any) -> dict[Any, Any] | None:
    """Return what is in a container, by key, position or field; None if it is none.

    >>> parts_of([1, 2]), parts_of({"a": 1}), parts_of(1)
    ({0: 1, 1: 2}, {'a': 1}, None)
    """
    if isinstance(item, dict):
        return item
    if isinstance(item, (tuple, list)):
        return dict(enumerate(item))
    if isinstance(item, UserDict):
        return item.data
    if is_dataclass(item) and not isinstance(item, type) and not _is_tensor(item):
        names = [field.name for field in fields(item)]
        own = {name: getattr(item, name) for name in names if hasattr(item, name)}
        return {**own, **getattr(item, "__dict__", {})}
    return None


def _is_tensor(item: Any) -> bool:
    """Whether torch's functions take an object, such as a Value."""
    return hasattr(type(item), "__torch_function__")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers by their paths: ``batch.0``."""
    if (parts := parts_of(tree)) is None:
        yield path, tree
    else:
        for key, item in parts.items():
            yield from leaves(item, f"{path}.{key}" if path else f"{key}")


def with_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return copies of nested containers with ``change`` applied to each leaf.

    >>> with_leaves(lambda leaf: leaf + 1, UserDict(a=[1, (2,)]))
    {'a': [2, (3,)]}
    """

    def changed(item: Any) -> Any:
        parts = None if isinstance(item, (tuple, list, dict)) else parts_of(item)
        if parts is None:
            return change(item)
        new = transform(changed, parts)
        twin = copy.copy(item)
        if isinstance(item, UserDict):
            twin.data = new
        else:
            for name, part in new.items():
                object.__setattr__(twin, name, part)  # it may be frozen
        return twin

    return transform(changed, tree)
