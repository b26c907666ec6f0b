"""Add rows of all ranks by the all-reduce of torch.distributed.

It is started by one task and awaited by another, which reads a *mark* of each rank: a byte that the
rank sends when it has started. So nobody waits for a rank that has not come this far, and what a
rank must do before that is never held up. Ranks start all-reduces in one order, as gloo needs it.

gloo adds a chunk on each rank, on its way around a ring, and then sends the sums around. So all
ranks get the same bits, and each element is added in an order that depends on its position.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from autosched.runtime.ranks.session import Session, session

__all__ = ["AllReduce"]


class AllReduce:
    """One all-reduce of a program, on this rank; in each run it is started and then finished."""

    def __init__(self, name: str):
        self.name = name
        self._under_way: _UnderWay | None = None

    def start(self, row: torch.Tensor) -> torch.Tensor:
        """Start to add the rows of all ranks, in place, and return a mark."""
        self._under_way = _UnderWay(session(), row, self.name)
        return torch.empty(1, dtype=torch.uint8)

    def finish(self, row: torch.Tensor, marks: Sequence[torch.Tensor]) -> None:
        """Wait until this row is the sum; all ranks have started to add."""
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        row.copy_(under_way.sum())  # nothing is copied, unless the program has moved it meanwhile


class _UnderWay:
    """An all-reduce that has been started. Its work keeps the row, also when the wire is lost."""

    def __init__(self, members: Session, row: torch.Tensor, name: str):
        self._members = members
        self._row = row
        self._name = name
        self._ended = ended = threading.Event()
        members.register(self)
        real = torch.view_as_real(row) if row.is_complex() else row
        wire = members.wire_of_run(name)
        try:
            self._work: Any = wire.all_reduce(real)
        except RuntimeError as error:
            raise members.cause(name) from error
        self._work.get_future().add_done_callback(lambda _: ended.set())

    def where(self) -> str:
        """Return nothing: the part of the program that runs here says where it is."""
        return ""

    def lost(self) -> None:
        """Wait no longer: gloo may never end what has been sent in part."""
        self._ended.set()

    def sum(self) -> torch.Tensor:
        """Return the row when it is the sum. Raises the cause where the wire is lost."""
        self._ended.wait()
        if self._members.is_lost:
            raise self._members.cause(self._name)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._members.cause(self._name) from error
        return self._row
