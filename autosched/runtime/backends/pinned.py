"""Pools of page-locked host memory for staging copies.

A copy from or to pageable memory goes through such pieces: the host moves what is to be sent into
them, and copies what has arrived to its destination, which is called *unstaging*. A piece is
reused only after the copy that used it has finished. The driver would also stage memory that is
sent, but only when the stream reaches the copy, and it would block the issuing thread until then.

Knows no program, and of streams only that events are recorded on them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch

# Bytes that the host moves in some 0.4 ms, so that a link does not wait for the next piece.
PIECE = 4 << 20
_LEAST = 4 << 10
_LIMIT = 256 << 20  # bytes of all pieces; if all are in use, a copy must end first


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes of host memory, the event after a copy that uses them, and what to do after it."""

    device: torch.device
    memory: torch.Tensor
    event: torch.Event
    unstage: Callable[[], object] | None = None


class Pinned:
    """Pieces, shared by the threads that issue copies.

    A piece belongs to one device, as its event does. Sizes are powers of two, because torch rounds
    page-locked memory up to these anyway.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.limit = limit
        self.total = 0
        self.lock = threading.Lock()
        self.idle: dict[tuple[torch.device, int], list[Piece]] = {}
        self.in_flight: dict[torch.Stream, deque[Piece]] = {}  # by stream, in the order of copies

    def take(self, device: torch.device, nbytes: int) -> Piece:
        """Return an unused piece of this many bytes or more, for streams of the device."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        with self.lock:
            while not (idle := self.idle.get((device, size))):
                if self._settle():
                    continue
                if self.total + size <= self.limit:
                    return self._make(device, size)
                if not self._free_idle() and not self._wait():
                    return self._make(device, size)  # other threads are about to send them all
            return idle.pop()

    def send(
        self, piece: Piece, stream: torch.Stream, unstage: Callable[[], object] | None = None
    ) -> None:
        """Keep a piece until a stream has finished all work issued so far, then unstage it."""
        piece.unstage = unstage
        with self.lock:
            piece.event.record(stream)
            self.in_flight.setdefault(stream, deque()).append(piece)

    def unstage(self) -> None:
        """Unstage all finished copies.

        What another thread has begun to unstage has arrived when this returns.
        """
        with self.lock:
            self._settle()

    def forget(self) -> None:
        """Unstage nothing of the copies that are in flight."""
        with self.lock:
            for piece in chain(*self.in_flight.values()):
                piece.unstage = None

    def clear(self) -> None:
        """Wait for all copies, and free the memory."""
        with self.lock:
            while self._wait():
                pass
            self._free_idle()

    def _make(self, device: torch.device, size: int) -> Piece:
        self.total += size
        return Piece(device, _locked(size), torch.Event(device))

    def _settle(self) -> bool:
        """Release all pieces of finished copies; return whether there were any."""
        any_past = False
        for line in self.in_flight.values():
            while line and line[0].event.query():
                piece = line.popleft()
                any_past = True
                if piece.unstage is not None:
                    piece.unstage()
                    piece.unstage = None
                self.idle.setdefault((piece.device, piece.memory.numel()), []).append(piece)
        return any_past

    def _wait(self) -> bool:
        """Wait for a copy of the stream that has most pending; return whether there was one."""
        line = max(self.in_flight.values(), key=len, default=None)
        if not line:
            return False
        line[0].event.synchronize()
        return self._settle()

    def _free_idle(self) -> bool:
        """Free idle pieces; return whether there were any."""
        idle = [piece for pieces in self.idle.values() for piece in pieces]
        self.total -= sum(piece.memory.numel() for piece in idle)
        self.idle.clear()
        return bool(idle)


def _locked(nbytes: int) -> torch.Tensor:
    """Return page-locked bytes; pageable ones, which are slower, if a device has none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(nbytes, dtype=torch.uint8)
