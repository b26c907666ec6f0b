"""Track which versions of values are on which devices.

The table is updated while a program is walked in issue order. A write replaces a version by the
next one. Tasks that write disjoint parts of a value may run in another order than that of its
versions; then the value keeps its version until the missing writes have happened. This module knows
no instruction; its callers choose what to store for each version.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Standing"]

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")


class Standing(Generic[Name, Item]):
    """A table of items by value, version and device.

    >>> standing = Standing()
    >>> standing.put("x", 0, "cpu", "memory")
    >>> standing.change("x", 1, "cpu"), standing.get("x", 0, "cpu"), standing.held("x", "cpu")
    (None, None, 'memory')
    >>> standing.change("x", 0, "cpu"), standing.get("x", 2, "cpu"), standing.latest("x", "cpu")
    (2, 'memory', 2)
    """

    def __init__(self) -> None:
        self._items: dict[tuple[Name, int, str], Item] = {}
        self._latest: dict[tuple[Name, str], int] = {}
        self._early: dict[tuple[Name, str], set[int]] = {}

    def put(self, value: Name, version: int, device: str, item: Item) -> None:
        """Store an item for a version of a value that is on a device now."""
        self._items[value, version, device] = item
        self._latest[value, device] = version
        if self._early:
            self._early.pop((value, device), None)

    def get(self, value: Name, version: int, device: str) -> Item | None:
        """Return the item of this version on this device; None unless all its parts are there."""
        if self._early and (value, device) in self._early:
            return None
        return self._items.get((value, version, device))

    def held(self, value: Name, device: str) -> Item | None:
        """Return the item of a value on a device in any version; None if it is not there."""
        version = self._latest.get((value, device))
        return None if version is None else self._items.get((value, version, device))

    def drop(self, value: Name, version: int, device: str) -> None:
        """Remove this version from this device."""
        self._items.pop((value, version, device), None)

    def latest(self, value: Name, device: str) -> int | None:
        """Return the latest version of a value on a device; None if it is not there."""
        version = self._latest.get((value, device))
        return version if version is not None and (value, version, device) in self._items else None

    def change(self, value: Name, version: int, device: str) -> int | None:
        """Apply a write to this version; return the new version, or None if it is not due yet."""
        if (value, version, device) not in self._items:
            self._early.setdefault((value, device), set()).add(version)
            return None
        item = self._items.pop((value, version, device))
        early = self._early.get((value, device), set())
        version += 1
        while version in early:
            early.remove(version)
            version += 1
        if not early:
            self._early.pop((value, device), None)
        self._items[value, version, device] = item
        self._latest[value, device] = version
        return version

    def where(self, value: Name, version: int) -> list[str]:
        """Return the devices that hold this version."""
        return [device for name, at, device in self._items if (name, at) == (value, version)]
