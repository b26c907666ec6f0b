"""Replace attributes of modules and classes for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, each given as an object, a name and a value, and restore them afterwards.

    An attribute that the object did not have itself is deleted afterwards.

    >>> import math
    >>> with replaced((math, "pi", 3)):
    ...     math.pi
    3
    >>> math.pi > 3
    True
    """
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in attributes]
    try:
        for owner, name, item in attributes:
            setattr(owner, name, item)
        yield
    finally:
        for owner, name, item in before:
            if item is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, item)
