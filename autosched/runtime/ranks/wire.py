"""Send and receive rows of bytes between ranks, over gloo.

Sends and receives are started here and waited for elsewhere. They match by ranks and tag, and in
order within one tag. gloo moves no byte of a send before its receive is posted, and aborts a
receiver whose row is shorter than what arrives: callers compare sizes first.

A group of gloo has one thread that moves data. So that what a rank sends and what it receives do
not wait for each other, there is a group for each *colour* of directed pairs: no rank both sends and
receives in one colour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

__all__ = ["InterruptibleStore", "Wire", "colour", "lose", "new_group"]

_torch: Any = torch.distributed  # some of whose classes have no types
_FOREVER = timedelta(days=1)  # a wait that ends earlier would close all connections of its group
_MOMENT = timedelta(milliseconds=1)
_NAP = 1e-3  # seconds between two looks at a store
_NEVER_SENT = 2**31 - 1  # a tag


def colour(source: int, target: int) -> int:
    """Return the group of what one rank sends to another: twice the lowest bit that differs, or 1 more.

    >>> [colour(0, 1), colour(1, 0), colour(1, 3), colour(3, 1), colour(3, 0)]
    [0, 1, 2, 3, 1]
    """
    bit = ((source ^ target) & -(source ^ target)).bit_length() - 1
    return 2 * bit + (source >> bit & 1)


def new_group(name: str, store: Any, rank: int, size: int) -> Any:
    """Return a group of gloo; all ranks make it, and a store serves each name once."""
    return _torch.ProcessGroupGloo(_torch.PrefixStore(name, store), rank, size, _FOREVER)


class InterruptibleStore(_torch.Store):  # type: ignore[misc]
    """A store for groups to connect through, in which a wait ends when ``alive`` raises."""

    def __init__(self, store: Any, alive: Callable[[], None]):
        super().__init__()
        self.inner = store
        self.alive = alive

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        found: bytes = self.inner.get(key)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta = _FOREVER) -> None:
        """Wait for some values."""
        while not self.inner.check([*keys]):
            self.alive()
            time.sleep(_NAP)


def lose(group: Any, rank: int, size: int) -> None:
    """Close all connections of a group: what waits in it raises, here and in other ranks.

    gloo does so where a wait ends too early, which needs one rank that has not closed its own.
    Functions of gloo to abort wake no wait.
    """
    for other in (*range(rank + 1, size), *range(rank)):
        try:
            group.recv([torch.zeros(1, dtype=torch.uint8)], other, _NEVER_SENT).wait(_MOMENT)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return


class Wire:
    """The connections of one rank with all others, until it is lost.

    A work is waited for once, and keeps its row. What starts one raises RuntimeError where the
    wire is lost.
    """

    def __init__(self, name: str, store: Any, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.is_lost = False
        self.others: list[Any] = []  # wires that are lost with this one
        bits = (size - 1).bit_length()
        names = [f"{name} {number}" for number in range(2 * bits)]
        self.groups = [new_group(each, store, rank, size) for each in names]

    def sender(self, rank: int, tag: int) -> Callable[[torch.Tensor], Any]:
        """Return a function that starts to send a dense row, and returns the work."""
        send = self.groups[colour(self.rank, rank)].send
        return lambda row: send([row], rank, tag)

    def receiver(self, rank: int, tag: int) -> Callable[[torch.Tensor], Any]:
        """Return a function that starts to receive a row of the same size, and returns the work."""
        receive = self.groups[colour(rank, self.rank)].recv
        return lambda row: receive([row], rank, tag)

    def send(self, row: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to send a row, and return the work."""
        return self.sender(rank, tag)(row)

    def receive(self, row: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive a row of the same size, and return the work."""
        return self.receiver(rank, tag)(row)

    def all_reduce(self, row: torch.Tensor) -> Any:
        """Start to add a row to those of all other ranks, in place, and return the work.

        All ranks start the same ones in one order.
        """
        return self.groups[0].allreduce([row])

    def lose(self) -> None:
        """Close all connections, here and thereby in all other ranks."""
        self.is_lost = True
        for group in self.groups:
            lose(group, self.rank, self.size)
        for wire in self.others:
            wire.lose()
