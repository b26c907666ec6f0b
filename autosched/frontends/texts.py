"""Note which lists of strings among the arguments a traced function reads.

Batches have names of files and other texts, which mostly no code reads. Then calls with as many
other texts share a capture. A list that is tracked has no strings inside: code that looks past its
methods fails, and the function is traced again with the list itself.
"""

from __future__ import annotations

from typing import Any

from autosched._lib.tree import transform

__all__ = ["ANY", "is_texts", "tracked"]

# Methods that tell nothing of the strings.
_SILENT = frozenset(
    "__new__ __init__ __class__ __getattribute__ __setattr__ __delattr__ __init_subclass__ "
    "__subclasshook__ __class_getitem__ __doc__ __len__".split()
)


class _Any:
    """Equals everything: the place of texts that were not read."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANY = _Any()


class _Unread:
    """Takes the place of a string, and cannot be used as one."""

    def _fail(self, *_: object) -> Any:
        raise TypeError("texts are read by code that does not call their methods")

    __eq__ = __hash__ = __bool__ = __str__ = __repr__ = _fail


def is_texts(item: Any) -> bool:
    """Whether this is a list or tuple of strings."""
    return type(item) in _TWINS and bool(item) and all(type(text) is str for text in item)


def tracked(tree: Any) -> tuple[Any, list[bool]]:
    """Return the tree with twins of all texts, and a flag for each: whether it was read."""
    read: list[bool] = []

    def twin(leaf: Any) -> Any:
        if not is_texts(leaf):
            return leaf
        read.append(False)
        kind: Any = type(leaf)
        unread = [_Unread()] * len(leaf)
        made: Any = kind.__new__(_TWINS[kind], unread)
        if kind is list:
            list.extend(made, unread)
        made.texts, made.read, made.number = leaf, read, len(read) - 1
        return made

    return transform(twin, tree, is_leaf=is_texts), read


def _noting(method: Any) -> Any:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.read[self.number] = True
        return method(self.texts, *args, **kwargs)

    return noted


def _twin_of(kind: Any) -> Any:
    """Return a subclass whose methods note the call, and whose constructor makes the class."""
    methods = {
        name: _noting(method)
        for name in dir(kind)
        if callable(method := getattr(kind, name)) and name not in _SILENT
    }
    return type(kind.__name__, (kind,), {**methods, "__new__": lambda _, items=(): kind(items)})


_TWINS = {kind: _twin_of(kind) for kind in (list, tuple)}
