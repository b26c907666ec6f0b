"""The memory of played GPUs, and the numbers they draw, above their queues.

Memory is allocated at once, when the host asks, and belongs to the queue that is current then. When
nothing refers to it any more, its next owner overwrites it, in the order of that queue: here with
NaN, and whoever touches it afterwards is noted as a fault. So a free that comes too early is seen
twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.gpu.fake_gpu.queues import Capture, Mark, Queue, Queues, Work

GRAIN = 512  # bytes of the smallest block


class Life:
    """Whether a block's memory is still its own, as the queues have it."""

    def __init__(self, what: str):
        self.what, self.over = what, False

    def begin(self) -> None:
        self.over = False

    def end(self) -> None:
        self.over = True


class Block:
    """Memory of a device; it goes back when the last tensor on it is gone."""

    def __init__(self, hardware: Hardware, queue: Queue, memory: torch.UntypedStorage, what: str):
        self.hardware, self.queue, self.memory = hardware, queue, memory
        self.capture: Capture | None = queue.capture
        self.pooled = self.capture is not None or threading.get_ident() in hardware.pooled
        self.nbytes = max(GRAIN, -(-memory.nbytes() // GRAIN) * GRAIN)
        self.life = Life(what)
        self.users: list[Queue] = []  # by record_stream
        hardware.take(self)

    def __del__(self) -> None:
        self.hardware.give_back(self)


class Hardware(Queues):
    """Played GPUs of ``nbytes`` each."""

    def __init__(self, gpus: int, seed: int, nbytes: float):
        super().__init__(gpus, seed)
        self.nbytes = nbytes
        self.allocated, self.peak = [0] * gpus, [0] * gpus
        self.seeds, self.drawn = [0] * gpus, [0] * gpus
        self.faults: list[str] = []
        self.ranges: list[str] = []  # what NVTX was told
        self.open = True
        self.pooled: set[int] = set()  # threads that allocate from a pool of graphs
        self._pinned: dict[int, StorageWeakRef] = {}

    # ---- memory of a device

    def allocate(self, queue: Queue, like: torch.Tensor, what: str) -> tuple[torch.Tensor, Block]:
        """Return memory in the shape of a tensor, all bits set, and its block. Raises OutOfMemoryError."""
        memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        memory.untyped_storage().fill_(255)
        return memory, Block(
            self, queue, memory.untyped_storage(), f"{what} of {tuple(like.shape)} on {queue}"
        )

    def take(self, block: Block) -> None:
        with self.lock:
            device = block.queue.device
            if self.allocated[device] + block.nbytes > self.nbytes:
                block.nbytes = 0
                held = self.allocated[device]
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: {held} of {self.nbytes:.0f} bytes are allocated"
                )
            self.allocated[device] += block.nbytes
            self.peak[device] = max(self.peak[device], self.allocated[device])
            if block.capture is not None:
                block.capture.lives.append(block.life)

    def give_back(self, block: Block) -> None:
        """Let the next owner have it: behind all that its queue has been given, and whoever ``record_stream`` named."""
        with self.lock:
            if not self.open or not block.nbytes:
                return
            self.allocated[block.queue.device] -= block.nbytes
            memory, life = block.memory, block.life
            here = block.queue.capture
            if block.pooled and (
                here is None or here is not block.capture
            ):  # stays in a pool, for whoever is next
                if here is not None:
                    self.put(block.queue, "overwrite", lambda _: memory.fill_(255), hidden=True)
                return

            def overwrite(_: int) -> None:
                memory.fill_(255)
                life.end()

            if not block.users:
                return self.put(block.queue, "overwrite", overwrite, hidden=True)
            aside = Queue(block.queue.device, -1)
            for user in block.users:
                self.wait(aside, self.record(user))
            self.wait(aside, self.record(block.queue))
            self.put(aside, "overwrite", overwrite)

    def launch(
        self, queue: Queue, what: str, work: Work, blocks: Sequence[Block], base: int = 0
    ) -> None:
        """Queue work that touches blocks."""
        if self.capture is not None and queue.capture is None:
            self.forbid(f"{what} on {queue}, which is no part of the capture")
        lives = [block.life for block in blocks]

        def checked(base: int) -> None:
            over = [life.what for life in lives if life.over]
            if over:
                self.faults.append(
                    f"{what} on {queue} touches memory that went back before: {', '.join(over)}"
                )
            work(base)

        self.put(queue, what, checked, base=base)

    # ---- page-locked memory of the host

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a host tensor's memory for page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        reference = self._pinned.get(tensor.untyped_storage().data_ptr())
        return reference is not None and not reference.expired()

    # ---- random numbers: in the order in which the host asks, by device

    def draw(self, queue: Queue) -> tuple[int, int]:
        """Reserve numbers; return the launch's base, and how many come before them: in a graph, in it."""
        with self.lock:
            if queue.capture is not None:
                queue.capture.drawn += 1
                return 0, queue.capture.drawn - 1
            self.drawn[queue.device] += 1
            return self.drawn[queue.device] - 1, 0

    def generator(self, device: int, number: int) -> torch.Generator:
        """Return what draws the numbers after so many others."""
        return torch.Generator().manual_seed(self.seeds[device] * 1_000_003 + number)

    # ---- the host

    def synchronize(self, queue: Queue) -> None:
        """Let the host wait for all that stands in a queue."""
        self.forbid(f"the host waits for {queue}", queue)
        self.until([self.record(queue)])

    def synchronize_device(self, device: int) -> None:
        """Let the host wait for all queues of a device."""
        self.forbid(f"the host waits for cuda:{device}")
        with self.lock:
            self.until([self.record(queue) for queue in list(self.busy) if queue.device == device])

    def close(self) -> None:
        """Forget what has not run."""
        with self.lock:
            self.open = False
            self.busy.clear()


_playing: list[Hardware] = []


def hardware() -> Hardware:
    """Return what is played now."""
    return _playing[-1]


__all__ = ["Block", "Hardware", "Mark", "hardware"]
