"""cuBLAS and cuDNN of simulated GPUs: a handle for each thread and device, a workspace for each stream.

As in ``aten/src/ATen/cuda/CublasHandlePool.cpp``: a thread that ends leaves its handles to others.
The workspace of a handle and a stream is allocated when both first meet, and stays until all
workspaces are released. A kernel that uses one writes it first, and reads it afterwards.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autosched.simulated_gpus.hardware import Block, Hardware
    from autosched.simulated_gpus.queues import Queue

BLAS = frozenset(f"aten::{name}" for name in "addbmm addmm addmv baddbmm bmm dot mm mv".split())
DNN = frozenset(
    f"aten::{name}"
    for name in "convolution cudnn_convolution convolution_backward _cudnn_rnn".split()
)
_CREATE = {"cublas": "cublasCreate", "cudnn": "cudnnCreate"}
Key = tuple[str, int]  # library, device


class Libraries:
    """The handles and workspaces of a process."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.created: dict[Key, int] = defaultdict(int)
        self.idle: dict[Key, list[int]] = defaultdict(list)  # handles whose threads have ended
        self.workspaces: dict[tuple[int, Queue], tuple[torch.Tensor, Block]] = {}
        self.launches = 0
        self._mine = threading.local()

    def handle(self, library: str, device: int) -> int:
        """Return this thread's handle. Raises RuntimeError if it would be created in a capture."""
        if not hasattr(self._mine, "held"):
            self._mine.held = _Held(self.idle)
        held, key = self._mine.held, (library, device)
        if key not in held:
            if not self.idle[key]:
                self._may_create(library)
                self.created[key] += 1
                self.idle[key].append(self.created[key])
            held[key] = self.idle[key].pop()
        handle: int = held[key]
        return handle

    def _may_create(self, library: str) -> None:
        try:
            self.hardware.forbid(f"{_CREATE[library]} allocates")
        except RuntimeError as error:
            text = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
            raise RuntimeError(text if library == "cublas" else f"cuDNN error: {error}") from error

    def workspace(self, queue: Queue) -> tuple[torch.Tensor, Block]:
        """Return the workspace of this thread's handle and a queue."""
        key = self.handle("cublas", queue.device), queue
        if key not in self.workspaces:
            shape = torch.empty(64, dtype=torch.int64, device="meta")
            self.workspaces[key] = self.hardware.allocate(queue, shape, "the workspace of cuBLAS")
        return self.workspaces[key]

    def use(self, queue: Queue, kernel: str) -> list[Block]:
        """Prepare for a kernel of a library; queue its write to the workspace, which it will read."""
        kernel = kernel.partition(".")[0]
        if kernel in DNN:
            self.handle("cudnn", queue.device)
        if kernel not in BLAS:
            return []
        memory, block = self.workspace(queue)
        self.launches += 1
        mark = self.launches
        what = f"{kernel} into its workspace"
        self.hardware.launch(queue, what, lambda: memory.fill_(mark), [block])

        def read() -> None:
            if not bool((memory == mark).all()):
                self.hardware.faults.append(f"another kernel wrote the workspace of {kernel}")

        self.hardware.launch(queue, f"{kernel} from its workspace", read, [block])
        return [block]

    def release_workspaces(self) -> None:
        self.workspaces.clear()


class _Held(dict[Key, int]):
    """The handles of a thread, which others get when it ends."""

    def __init__(self, idle: dict[Key, list[int]]):
        super().__init__()
        self.idle = idle

    def __del__(self) -> None:
        for key, handle in self.items():
            self.idle[key].append(handle)
