"""Decides by brute force what a run on simulated GPUs must report, for tests of the sanitizer.

It keeps all that was issued, with the set of the bytes of each access, and which of it surely comes
before which, as sets, with no clocks and no regions; then it looks at every two accesses. It shares
nothing with the detector but what both are told, and nothing with ``tests/reference.py``, which reads
programs, whose instructions are known before they run. ``test_interleavings`` checks its order.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from autosched.graph.effects import effects_of
from autosched.simulated_gpus.observer import Observer
from autosched.simulated_gpus.tensors import block_of


class Use(NamedTuple):
    at: int
    block: Any
    bytes: frozenset[int]
    writes: bool
    by_host: bool = False


def offsets(tensor: torch.Tensor) -> frozenset[int]:
    """The bytes of a tensor in its storage."""
    size = tensor.element_size()
    return frozenset(
        (tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True)))
        * size
        + k
        for index in itertools.product(*map(range, tensor.shape))
        for k in range(size)
    )


class BruteForce(Observer):
    """Keeps all; ``labels`` are what must be reported: kinds and memory."""

    def __init__(self) -> None:
        self.before: list[int] = []  # of each item, those that surely come before it, as bits
        self.last: dict[Any, int] = {}  # of each stream and the host
        self.records: dict[Any, int] = {}
        self.uses: list[Use] = []
        self.allocations: list[tuple[int, Any, Any]] = []
        self.frees: list[tuple[int, Any, Any, int]] = []
        self.blocks: list[Any] = []  # what is told of is kept, so that no identity is used twice
        self.pinned: dict[int, Any] = {}

    def add(self, actor: Any, *behind: int) -> int:
        item = len(self.before)
        direct = [self.last[key] for key in (actor, "host") if key in self.last]
        seen = 0
        for other in (*direct, *behind):
            seen |= self.before[other] | 1 << other
        self.before.append(seen)
        self.last[actor] = item
        return item

    def known(self, item: torch.Tensor) -> Any:
        """What stands for the memory of a tensor: what the detector keeps of it."""
        block = block_of(item)
        return item.untyped_storage().memory_known if block is None else block.memory_known

    def launched(self, queue: Any, what: str, reads: Any, writes: Any) -> None:
        at = self.add(queue)
        for is_write, items in ((False, reads), (True, writes)):
            for item in items:
                self.uses.append(Use(at, self.known(item), offsets(item), is_write))

    def called_on_host(self, func: Any, args: Any, kwargs: Any) -> None:
        found = [
            item
            for item in tree_leaves((args, kwargs))
            if isinstance(item, torch.Tensor)
            and block_of(item) is None
            and hasattr(item.untyped_storage(), "memory_known")
        ]
        effects = effects_of(func, args, kwargs)
        if found and effects.base is None:
            at, written = self.add("host"), [id(w) for w in effects.writes]
            for item in found:
                writes = id(item) in written
                self.uses.append(Use(at, self.known(item), offsets(item), writes, by_host=True))

    def recorded(self, queue: Any, mark: Any) -> None:
        self.records[mark] = self.add(queue)

    def waited(self, queue: Any, mark: Any, event: Any, asked: bool) -> None:
        if mark is not None:
            self.add(queue, self.records[mark])

    def host_waited(self, mark: Any, asked: bool) -> None:
        self.add("host", self.records[mark])

    def host_waited_for_device(self, device: int, asked: bool) -> None:
        self.add(
            "host", *(at for key, at in self.last.items() if getattr(key, "device", None) == device)
        )

    def allocated(self, block: Any) -> None:
        known = block.memory_known
        self.blocks.append(known)
        self.allocations.append((self.add(block.queue), known.key, known))

    def freed(self, block: Any) -> None:
        at = self.add(block.queue)
        event = self.before[at]
        for user in block.users:
            event |= self.before[self.last[user]] | 1 << self.last[user] if user in self.last else 0
        finished = event if block.users else 0
        self.frees.append((at, block.memory_known.key, block.memory_known, finished))

    def labels(self) -> set[tuple[str, Any]]:
        found: set[tuple[str, Any]] = set()
        raced: set[tuple[int, Any]] = set()
        for one, other in itertools.combinations(self.uses, 2):
            conflict = one.block is other.block and (one.writes or other.writes)
            ordered = one.at == other.at or self.before[other.at] >> one.at & 1
            if conflict and not ordered and one.bytes & other.bytes:
                by_host = one.by_host or other.by_host
                found.add(("host" if by_host else "race", one.block))
                raced.add((other.at, other.block))
        for (freed, key, old, finished), (at, other_key, new) in itertools.product(
            self.frees, self.allocations
        ):
            if key != other_key or at < freed:
                continue
            for one in self.uses:
                if one.block is not old or finished >> one.at & 1:
                    continue
                early = not self.before[at] >> one.at & 1
                for other in self.uses:
                    if other.block is new and not self.before[other.at] >> one.at & 1:
                        if early:
                            found.add(("lifetime", old))
                        elif (other.at, new) not in raced:
                            found.add(("lifetime", new))
        return found


class Tee(Observer):
    """Tells several observers the same."""

    def __init__(self, *observers: Observer):
        for name in (name for name in vars(Observer) if not name.startswith("_")):
            told = [getattr(each, name) for each in observers]
            setattr(self, name, lambda *args, told=told: [tell(*args) for tell in told] and None)
