"""Random numbers of simulated GPUs, which graphs draw from where the generator is when they are replayed.

As in ``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp`` of torch 2.11: all graphs of a generator read
its seed and offset from one place in the memory of a device. A capture writes that place when it
begins, and a replay of what draws, each on its own stream.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Drawn = Callable[[], tuple[int, int]]  # when the kernel runs: the seed, and the numbers before


class Place:
    """Where kernels of graphs find the seed and the offset."""

    def __init__(self, device: int):
        self.device, self.seed, self.offset = device, 0, 0

    def fill(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset


class State:
    """A generator's seed, and how many numbers were drawn; one number for each kernel."""

    def __init__(self, device: int, kind: str = "cuda"):
        self.device, self.kind, self.seed, self.drawn = device, kind, 0, 0
        self.capturing = False
        self.place = Place(device)
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def register(self, graph: Any, current_device: int) -> None:
        """Let a graph draw; the first one makes the place, on the current device."""
        if not self.graphs:
            self.place = Place(current_device)
        self.graphs.add(graph)

    def draw(self, counts: dict[State, int] | None, fault: Callable[[str], None]) -> Drawn:
        """Reserve numbers; ``counts`` has those of the graph that is being captured, by generator."""
        if counts is None:
            if self.capturing:
                raise RuntimeError(
                    "Offset increment outside graph capture encountered unexpectedly."
                )
            self.drawn += 1
            now = self.seed, self.drawn - 1
            return lambda: now
        if self not in counts:
            raise RuntimeError(
                "Attempt to increase offset for a CUDA generator not in capture mode."
            )
        before, place = counts[self], self.place
        counts[self] += 1

        def found() -> tuple[int, int]:
            if place.device != self.device:
                fault(f"a kernel of cuda:{self.device} reads its seed on cuda:{place.device}")
            return place.seed, place.offset + before

        return found


class Generator(torch.Generator):
    """Stands for ``torch.Generator("cuda:0")``, and for the default generator of a GPU."""

    _marks = itertools.count(2**40)

    def __new__(cls, state: State, known: dict[int, State]) -> Generator:
        return super().__new__(cls)

    def __init__(self, state: State, known: dict[int, State]):
        self.state = state
        mark = next(self._marks)  # torch passes operators another object with the same seed
        super().manual_seed(mark)
        known[mark] = state

    @property
    def index(self) -> int:
        return self.state.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.state.kind, self.state.device)

    def manual_seed(self, seed: int) -> Generator:
        self.state.seed, self.state.drawn = seed, 0
        return self

    def initial_seed(self) -> int:
        return self.state.seed

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.state.seed, self.state.drawn]).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> Generator:
        self.state.seed, self.state.drawn = state.view(torch.int64).tolist()
        return self


def numbers(drawn: Drawn) -> torch.Generator:
    """Return what draws the numbers of a kernel that runs now."""
    seed, before = drawn()
    return torch.Generator().manual_seed(seed * 1_000_003 + before)
