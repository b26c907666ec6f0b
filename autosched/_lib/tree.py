"""Flatten, transform and match nested tuples, lists and dicts.

These are the few functions of a pytree library that graphs need, without importing torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

_TREES = (tuple, list, dict)


def flatten(tree: Any) -> Iterator[Any]:
    """Yield the leaves from left to right.

    >>> list(flatten({"a": [1, 2], "b": (3, None)}))
    [1, 2, 3, None]
    """
    if not isinstance(tree, _TREES):
        yield tree
        return
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, _TREES):  # a generator per leaf would take three times as long
            yield from flatten(item)
        else:
            yield item


def transform(
    change: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return the tree with ``change`` applied to each leaf; containers keep their types.

    Containers for which ``is_leaf`` holds are leaves, too.

    >>> transform(lambda leaf: leaf + 1, {"a": [1, 2], "b": (3,)})
    {'a': [2, 3], 'b': (4,)}
    """
    if is_leaf is not None and is_leaf(tree):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        items = [
            transform(change, item, is_leaf) if isinstance(item, _TREES) else change(item)
            for item in tree
        ]
        return sequence_like(tree, items)
    if isinstance(tree, dict):
        changed = {key: transform(change, item, is_leaf) for key, item in tree.items()}
        return changed if type(tree) is dict else of_its_kind(tree, changed)
    return change(tree)


def sequence_like(tree: Any, items: list[Any]) -> Any:
    """Return a list or tuple, which may be a named one, with other items."""
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def of_its_kind(tree: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of a subclass with other items.

    A subclass that also has its items as attributes keeps these in step by itself.
    """
    if is_dataclass(tree) and hasattr(tree, "__dict__"):  # whose own way to be copied may be slow
        twin = type(tree).__new__(type(tree))
        vars(twin).update(vars(tree))
    else:
        twin = copy.copy(tree)
    for key, item in items.items():
        twin[key] = item
    return twin


def is_deeper(most: int, tree: Any) -> bool:
    """Whether containers are nested more than ``most`` deep, as those that contain themselves are.

    >>> is_deeper(2, [0, {"a": (1,)}]), is_deeper(3, [0, {"a": (1,)}])
    (True, False)
    """
    if not isinstance(tree, _TREES):
        return False
    if most == 0:
        return True
    for item in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(item, _TREES) and is_deeper(most - 1, item):
            return True
    return False


def match(shape: Any, tree: Any) -> Iterator[Any]:
    """Yield the parts of ``tree`` at the leaves of ``shape``. Raises ValueError if they differ.

    >>> list(match(("a", {"b": "c"}), (1, {"b": [2, 3]})))
    [1, [2, 3]]
    """
    if isinstance(shape, (tuple, list)):
        items = list(tree) if isinstance(tree, (tuple, list)) else None
        if items is None or len(items) != len(shape):
            got = f"{len(items)} results" if items is not None else f"one {type(tree).__name__}"
            raise ValueError(f"{got} where outputs= says {len(shape)}")
        for part, item in zip(shape, items, strict=True):
            yield from match(part, item)
    elif isinstance(shape, dict):
        if not isinstance(tree, dict) or set(tree) != set(shape):
            got = f"one {type(tree).__name__}"
            if isinstance(tree, dict):
                got = str(sorted(map(str, tree)))
            raise ValueError(f"{got} where outputs= says a dict of {sorted(map(str, shape))}")
        for key, part in shape.items():
            yield from match(part, tree[key])
    else:
        yield tree
