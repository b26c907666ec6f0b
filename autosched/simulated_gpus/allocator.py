"""The caching allocator of a simulated GPU: pools of blocks, whose addresses are handed out again.

As in ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11, without the splitting of blocks:

* A block that is freed stays with its pool and its queue, and is the next one of its size there.
* What does not fit is tried again after all cached blocks were released; but not while anything
  is recorded, or allocates from a pool of its own.
* A pool of graphs counts its users. Its memory is released only when it has none.
* A block that ``record_stream`` named for other queues stays in use while anything is recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autosched.simulated_gpus.queues import Queue

GRAIN = 512  # bytes of the smallest block
PoolId = tuple[int, int]
ORDINARY: PoolId = (0, 0)


class Memory:
    """Bytes of a device, until they are released; only their address if not ``real``."""

    _end = 2**40  # of the addresses of memory that holds nothing

    def __init__(self, nbytes: int, real: bool):
        self.nbytes, self.released = nbytes, False
        make: Any = torch.UntypedStorage
        self.storage = make(nbytes) if real else None
        self.address: int = self.storage.data_ptr() if self.storage else Memory._end
        Memory._end += 0 if real else nbytes
        self.spoil()

    def spoil(self) -> None:
        """Set all bits."""
        if self.storage is not None:
            self.storage.fill_(255)


@dataclass
class Pool:
    """Free memory by queue and size, and the number of graphs and contexts that use the pool."""

    uses: int = 0
    free: dict[tuple[Queue, int], list[Memory]] = field(default_factory=lambda: defaultdict(list))


class Allocator:
    """The pools of one device, of ``real`` memory if operators compute numbers."""

    def __init__(self, real: bool) -> None:
        self.real = real
        self.pools = {ORDINARY: Pool(uses=1)}
        self.underway: dict[PoolId, Callable[[Queue], bool]] = {}  # who allocates from pools
        self.deferred: list[Callable[[], None]] = []  # frees that wait for the end of that
        self.allocated = self.reserved = self.peak = 0

    def begin(self, pool: PoolId, takes: Callable[[Queue], bool]) -> None:
        """Let those allocate from a pool, which has one user more."""
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pools.setdefault(pool, Pool()).uses += 1
        self.underway[pool] = takes

    def end(self, pool: PoolId) -> None:
        if self.underway.pop(pool, None) is None:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(self, pool: PoolId) -> None:
        """Take one user from a pool."""
        if pool not in self.pools or not self.pools[pool].uses:
            raise RuntimeError("releasePool: the pool has no users")
        self.pools[pool].uses -= 1

    def pool_for(self, queue: Queue) -> PoolId:
        """Return the pool from which a queue of this thread allocates."""
        return next((pool for pool, takes in self.underway.items() if takes(queue)), ORDINARY)

    def take(self, queue: Queue, pool: PoolId, nbytes: int, limit: float) -> Memory | None:
        """Return memory; None if there is no room."""
        free = self.pools[pool].free[queue, nbytes]
        if free:
            memory = free.pop()
        elif self.reserved + nbytes <= limit:
            memory = Memory(nbytes, self.real)
            self.reserved += nbytes
        else:
            return None
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        return memory

    def give_back(self, queue: Queue, pool: PoolId, memory: Memory) -> None:
        """Keep memory, which is no longer counted, for the next one."""
        self.pools[pool].free[queue, memory.nbytes].append(memory)

    def empty(self) -> None:
        """Release the free memory of the ordinary pool, and of those without users."""
        for pool in self.pools.values():
            if pool.uses and pool is not self.pools[ORDINARY]:
                continue
            for memory in (one for free in pool.free.values() for one in free):
                memory.released = True
                self.reserved -= memory.nbytes
            pool.free.clear()
