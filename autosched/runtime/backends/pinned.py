"""Pools of page-locked host memory for staging copies.

A copy from or to pageable memory goes through such pieces: the host moves what is to be sent into
them, and moves what has arrived to its destination, which is called its *landing*. A piece is
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

__all__ = ["PIECE", "Piece", "Pinned"]

PIECE = (
    4 << 20
)  # bytes: moved by the host in some 0.4 ms, in which a link is not idle for want of the next piece
_LEAST = 4 << 10
_LIMIT = 256 << 20  # bytes of all pieces; who wants more waits for the oldest copy


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes of host memory, the event behind the copy that uses them, and what is to be done then."""

    device: torch.device
    memory: torch.Tensor
    event: torch.Event
    landing: Callable[[], object] | None = None


class Pinned:
    """Pieces, shared by the threads that issue copies; a piece is of one device, as its event is.

    Sizes are powers of two, which torch rounds page-locked memory up to anyway.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.limit = limit
        self.total = 0
        self.lock = threading.Lock()
        self.idle: dict[tuple[torch.device, int], list[Piece]] = {}
        self.flying: dict[
            torch.Stream, deque[Piece]
        ] = {}  # of each stream, in the order of its copies

    def take(self, device: torch.device, nbytes: int) -> Piece:
        """Return a piece of so many bytes or more that no copy uses; to be sent, on a stream of the device."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        with self.lock:
            while not (idle := self.idle.get((device, size))):
                if self._settle():
                    continue
                if self.total + size <= self.limit:
                    return self._make(device, size)
                if not self._give_up() and not self._wait():
                    return self._make(device, size)  # all are about to be sent by other threads
            return idle.pop()

    def send(
        self, piece: Piece, stream: torch.Stream, landing: Callable[[], object] | None = None
    ) -> None:
        """Keep a piece until all that its device's stream has to do by now is past, and then let it land."""
        piece.landing = landing
        with self.lock:
            piece.event.record(stream)
            self.flying.setdefault(stream, deque()).append(piece)

    def land(self) -> None:
        """Land all copies that are past; another thread's landing that has begun has ended then."""
        with self.lock:
            self._settle()

    def forget(self) -> None:
        """Let nothing land of what is under way."""
        with self.lock:
            for piece in chain(*self.flying.values()):
                piece.landing = None

    def clear(self) -> None:
        """Wait for all copies, and give the memory back."""
        with self.lock:
            while self._wait():
                pass
            self._give_up()

    def _make(self, device: torch.device, size: int) -> Piece:
        self.total += size
        return Piece(device, _locked(size), torch.Event(device))

    def _settle(self) -> bool:
        """Let all go that are past; return whether there were any."""
        any_past = False
        for line in self.flying.values():
            while line and line[0].event.query():
                piece = line.popleft()
                any_past = True
                if piece.landing is not None:
                    piece.landing()
                    piece.landing = None
                self.idle.setdefault((piece.device, piece.memory.numel()), []).append(piece)
        return any_past

    def _wait(self) -> bool:
        """Wait for a copy, of the stream that has most before it; return whether there was one."""
        line = max(self.flying.values(), key=len, default=None)
        if not line:
            return False
        line[0].event.synchronize()
        return self._settle()

    def _give_up(self) -> bool:
        """Give idle pieces back; return whether there were any."""
        idle = [piece for pieces in self.idle.values() for piece in pieces]
        self.total -= sum(piece.memory.numel() for piece in idle)
        self.idle.clear()
        return bool(idle)


def _locked(nbytes: int) -> torch.Tensor:
    """Return page-locked bytes; pageable ones, which are as right and slower, for a device that has no use for it."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return torch.empty(nbytes, dtype=torch.uint8)
