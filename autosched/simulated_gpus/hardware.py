"""The memory of simulated GPUs, and what else they have, above their queues.

Memory is allocated at once, when the host asks, and belongs to the queue that is current then. When
nothing refers to it any more, its next owner overwrites it, in the order of that queue: here with
NaN, and whoever touches it afterwards is noted as a fault. So a free that comes too early is seen
twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autosched.simulated_gpus.allocator import GRAIN, ORDINARY, Allocator, Memory, PoolId
from autosched.simulated_gpus.generators import Drawn, State
from autosched.simulated_gpus.observer import Observer, Tensors
from autosched.simulated_gpus.queues import Capture, Mark, Queue, Queues, Work


class Life:
    """Whether a block's memory is still its own, as the queues have it."""

    def __init__(self, what: str, memory: Memory):
        self.what, self.memory, self._over = what, memory, False

    @property
    def over(self) -> bool:
        if self.memory.released:
            raise RuntimeError(f"an illegal memory access was encountered: {self.what}")
        return self._over

    def begin(self) -> None:
        self._over = False

    def end(self) -> None:
        self._over = True


class Block:
    """Memory of a device; it goes back when the last tensor on it is gone."""

    memory: Memory | None = None
    memory_known: Any = None  # what an observer knows of it

    def __init__(self, hardware: Hardware, queue: Queue, nbytes: int, what: str):
        self.hardware, self.queue = hardware, queue
        self.capture: Capture | None = queue.capture
        self.users: list[Queue] = []  # by record_stream
        nbytes = max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
        self.pool, self.memory = hardware.take(queue, nbytes)
        self.life = Life(what, self.memory)
        if self.capture is not None:
            self.capture.lives.append(self.life)
        hardware.observer.allocated(self)

    def __del__(self) -> None:
        if self.memory is not None:
            self.hardware.give_back(self, self.memory)


class Hardware(Queues):
    """Played GPUs of ``nbytes`` each, which torch calls ``kind``."""

    libraries_of: Any = None  # makes handles and workspaces of cuBLAS and cuDNN, for tests

    def __init__(
        self, gpus: int, seed: int, nbytes: float, kind: str = "cuda", numbers: bool = True
    ):
        super().__init__(gpus, seed)
        self.kind, self.numbers = kind, numbers
        self.nbytes = nbytes
        self.allocators = [Allocator(numbers) for _ in range(gpus)]
        self.generators = [State(device, kind) for device in range(gpus)]
        self.known_generators: dict[int, State] = {}
        self.libraries: Any = self.libraries_of and self.libraries_of(self)
        self.casts: Any = None  # of autocast
        self.collective: Any = None
        self.works: list[Any] = []  # of collectives
        self.of_groups: dict[Any, Queue] = {}
        self.has_group = False  # made for the one rank that is simulated
        self.faults: list[str] = []
        self.ranges: list[str] = []  # what NVTX was told
        self.open = True
        self.latest = 0  # the device of the last operator
        self._pinned: dict[int, Any] = {}
        # Pools that page-locked memory is asked for by, and the graph that can answer.
        self.pinned_underway: dict[PoolId, weakref.ref[Any]] = {}

    # ---- memory of a device

    @property
    def allocated(self) -> list[int]:
        return [allocator.allocated for allocator in self.allocators]

    @property
    def peak(self) -> list[int]:
        return [allocator.peak for allocator in self.allocators]

    def allocate(self, queue: Queue, like: torch.Tensor, what: str) -> tuple[torch.Tensor, Block]:
        """Return memory in the shape of a tensor, if it holds numbers, and its block.

        Raises OutOfMemoryError.

        New memory has all bits set; memory that others had will have, in the order of its queue.
        """
        span = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        nbytes = span * like.element_size() if like.numel() else 0
        block = Block(self, queue, nbytes, f"{what} of {tuple(like.shape)} on {queue}")
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        storage = None if block.memory is None else block.memory.storage
        if storage is not None:
            made.set_(storage, 0, like.shape, like.stride())
        return made, block

    def take(self, queue: Queue, nbytes: int) -> tuple[PoolId, Memory]:
        """Return the pool of this thread and queue, and memory of it."""
        with self.lock:
            allocator = self.allocators[queue.device]
            if not allocator.underway:
                deferred, allocator.deferred = allocator.deferred, []
                for give_back in deferred:
                    give_back()
            pool = allocator.pool_for(queue)
            memory = allocator.take(queue, pool, nbytes, self.nbytes)
            if memory is None and not allocator.underway:
                self._release_cached(queue.device)
                memory = allocator.take(queue, pool, nbytes, self.nbytes)
            if memory is None:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: {allocator.allocated} of {self.nbytes:.0f} bytes are "
                    f"allocated, and {allocator.reserved - allocator.allocated} cached"
                )
            return pool, memory

    def give_back(self, block: Block, memory: Memory) -> None:
        """Let the next owner have it: behind all that its queue has been given, and whoever ``record_stream`` named."""
        with self.lock:
            if not self.open:
                return
            self.observer.freed(block)
            queue, life, users = block.queue, block.life, block.users
            allocator = self.allocators[queue.device]
            allocator.allocated -= memory.nbytes

            def overwrite() -> None:
                memory.spoil()
                life.end()

            def go_back_last() -> None:
                aside = Queue(queue.device, -1)
                observer, self.observer = self.observer, Observer()
                for user in [*users, queue]:
                    self.wait(aside, self.record(user))
                self.observer = observer
                self.put(aside, "overwrite", overwrite)
                self.put(aside, "give back", give_back)

            give_back = partial(allocator.give_back, queue, block.pool, memory)
            if users and allocator.underway:
                allocator.deferred.append(go_back_last)
            elif users:
                go_back_last()
            else:
                if block.pool == ORDINARY or queue.capture is not None:
                    self.put(queue, "overwrite", overwrite, hidden=True)
                give_back()

    def empty_cache(self) -> None:
        """Release what is cached, behind all that was issued."""
        self.forbid("memory is released")
        with self.lock:
            for device in range(self.gpus):
                self._release_cached(device)

    def _release_cached(self, device: int) -> None:
        """Release what is cached, which waits for the device if that is anything."""
        allocator = self.allocators[device]
        if allocator.reserved > allocator.allocated:
            self.until([self.record(q) for q in list(self.busy) if q.device == device])
            allocator.empty()

    def launch(
        self,
        queue: Queue,
        what: str,
        work: Work,
        blocks: Sequence[Block],
        reads: Tensors = (),
        writes: Tensors = (),
    ) -> None:
        """Queue work that touches blocks, by reading and writing tensors."""
        if self.capture is not None and queue.capture is None:
            self.forbid(f"{what} on {queue}, which is no part of the capture")
        lives = [block.life for block in blocks]

        def checked() -> None:
            over = [life.what for life in lives if life.over]
            if over:
                self.faults.append(
                    f"{what} on {queue} touches memory that went back before: {', '.join(over)}"
                )
            work()

        self.put(queue, what, checked if self.numbers else _nothing)
        self.observer.launched(queue, what, reads, writes)

    # ---- page-locked memory of the host

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a host tensor's memory for page-locked."""
        capturing = self.current[self.device].capture is not None
        if capturing and any(graph() is None for graph in self.pinned_underway.values()):
            self.faults.append("page-locked memory is asked for by a graph that is gone")
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        reference = self._pinned.get(tensor.untyped_storage().data_ptr())
        return reference is not None and not bool(reference.expired())

    # ---- random numbers: in the order in which the host asks, by generator

    def draw(self, queue: Queue, generator: torch.Generator | None) -> Drawn:
        """Reserve numbers of a generator; the default one of the queue's device if None."""
        with self.lock:
            state = self.generators[queue.device]
            if generator is not None:
                state = self.known_generators[generator.initial_seed()]
            counts = None if queue.capture is None else queue.capture.drawn
            return state.draw(counts, self.faults.append)

    # ---- the host

    def synchronize(self, queue: Queue, *, asked: bool = False) -> None:
        """Let the host wait for all that stands in a queue; ``asked``: by the user."""
        self.forbid(f"the host waits for {queue}", queue)
        self.until([self.record(queue)], asked=asked)

    def synchronize_device(self, device: int, *, asked: bool = True) -> None:
        """Let the host wait for all queues of a device."""
        self.forbid_on_device(f"the host waits for cuda:{device}", device)
        with self.lock:
            self.until([self.record(queue) for queue in list(self.busy) if queue.device == device])
            self.observer.host_waited_for_device(device, asked)

    def close(self) -> None:
        """Forget what has not run."""
        with self.lock:
            self.open = False
            self.busy.clear()


def _nothing() -> None:
    """Compute nothing."""


current: list[Hardware] = []  # the last one is simulated now


def hardware() -> Hardware:
    """Return what is simulated now."""
    return current[-1]


def device(number: int) -> torch.device:
    """Return what torch calls a simulated GPU."""
    return torch.device(hardware().kind, number)


__all__ = ["Block", "Hardware", "Mark", "device", "hardware"]
