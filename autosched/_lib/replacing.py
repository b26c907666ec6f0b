"""Replace attributes of modules and classes for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, each given as an object, a name and a value, and restore them afterwards.

    >>> import math
    >>> with replaced((math, "pi", 3)):
    ...     math.pi
    3
    >>> math.pi > 3
    True
    """
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    try:
        for owner, name, item in attributes:
            setattr(owner, name, item)
        yield
    finally:
        for owner, name, item in before:
            setattr(owner, name, item)
