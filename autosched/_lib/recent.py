"""The cache of schedules, graphs and plans: those that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

MOST = 8

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """At most ``most`` values, the last used one last; ``close`` is called with those that go.

    >>> recent = Recent[str, int](most=2)
    >>> for key in "abac":
    ...     recent.use(key, ord(key))
    >>> list(recent)
    ['a', 'c']
    """

    def __init__(self, close: Callable[[V], object] = lambda value: None, most: int = MOST):
        super().__init__()
        self._close = close
        self._most = most

    def use(self, key: K, value: V) -> None:
        """Store a value as the one that was used last."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self._close(self.popitem(last=False)[1])

    def drop(self, key: K) -> None:
        """Drop a value."""
        self._close(self.pop(key))

    def close(self) -> None:
        """Drop all values."""
        while self:
            self._close(self.popitem()[1])
