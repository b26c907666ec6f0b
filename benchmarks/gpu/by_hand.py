"""What a good engineer writes by hand, with streams and events of torch, where we write a graph.

Streams, events and buffers are made once. Compute stays on the caller's stream; nothing is recorded on streams
(``record_stream``), since references live until the caller's stream is behind all that uses the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _rig import Rig
from torch import Tensor


class ProductsAndCopies:
    """Products of a matrix by itself, each copied to page-locked host memory while the next is made."""

    def __init__(self, rig: Rig, x: Tensor, products: int):
        self.gpu, self.x = rig.gpu, x
        self.host = [rig.pinned(*x.shape) for _ in range(products)]
        self.copying, self.copied = rig.gpu.Stream(), rig.gpu.Event()
        self.made = [rig.gpu.Event() for _ in range(products)]

    def __call__(self) -> list[Tensor]:
        """Return the copies, which the host may read."""
        here, kept = self.gpu.current_stream(), []
        for copy, made in zip(self.host, self.made, strict=True):
            kept.append(self.x.mm(self.x))
            made.record(here)
            self.copying.wait_event(made)
            with self.gpu.stream(self.copying):
                copy.copy_(kept[-1], non_blocking=True)
        self.copied.record(self.copying)
        self.copied.synchronize()  # so products, too, may go back
        return self.host


class StreamedWeights:
    """Dense layers whose weights come from page-locked host memory into a few buffers, some layers ahead of compute."""

    def __init__(self, rig: Rig, weights: Sequence[Tensor], buffers: int):
        self.gpu, self.weights = rig.gpu, weights
        self.buffers = [torch.empty(weights[0].shape, device=rig.device) for _ in range(buffers)]
        self.copying, self.begun = rig.gpu.Stream(), rig.gpu.Event()
        self.loaded = [rig.gpu.Event() for _ in weights]
        self.used = [rig.gpu.Event() for _ in weights]

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the last layer makes, on the caller's stream."""
        here, ahead = self.gpu.current_stream(), len(self.buffers)
        self.begun.record(here)
        self.copying.wait_event(self.begun)  # the last call's layers have used the buffers
        for i, weight in enumerate(self.weights):
            buffer = self.buffers[i % ahead]
            if i >= ahead:
                self.copying.wait_event(self.used[i - ahead])
            with self.gpu.stream(self.copying):
                buffer.copy_(weight, non_blocking=True)
            self.loaded[i].record(self.copying)
            here.wait_event(self.loaded[i])
            x = torch.relu(x @ buffer)
            self.used[i].record(here)
        return x


class Lanes:
    """Chains of additions on a stream each, which exchange what they have after every block of them."""

    def __init__(self, rig: Rig, lanes: int, blocks: int, block: int):
        self.gpu, self.block = rig.gpu, block
        self.streams = [rig.gpu.Stream() for _ in range(lanes)]
        self.begun = rig.gpu.Event()
        self.ended = [[rig.gpu.Event() for _ in range(lanes)] for _ in range(blocks)]

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return what each chain ends with, for the caller's stream."""
        here, lanes = self.gpu.current_stream(), len(self.streams)
        self.begun.record(here)
        for stream in self.streams:
            stream.wait_event(self.begun)
        values, kept = [x] * lanes, []
        for number, ended in enumerate(self.ended):
            before, values = values, []
            for lane, stream in enumerate(self.streams):
                with self.gpu.stream(stream):
                    if number:
                        stream.wait_event(self.ended[number - 1][(lane + 1) % lanes])
                    value = torch.add(before[lane], before[(lane + 1) % lanes])
                    for _ in range(self.block - 1):
                        value = torch.add(value, y)
                    ended[lane].record(stream)
                values.append(value)
            kept.append(before)  # which another lane reads
        for lane, ended in enumerate(self.ended[-1]):
            here.wait_event(ended)
            self.streams[(lane + 1) % lanes].wait_event(
                ended
            )  # before memory of that lane goes back
        return values
