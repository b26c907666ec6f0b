"""Collectives of ``torch.distributed`` on simulated GPUs, for the one rank that is simulated.

As NCCL's process group has them: what does not block is on a stream of the group, behind the current
one, and ``wait`` lets the current stream wait for it; its tensors live until then. What blocks is on
the current stream; a barrier lets the host wait, too. Other ranks are taken to have the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.utils._pytree import tree_leaves

from autosched.simulated_gpus.hardware import hardware
from autosched.simulated_gpus.queues import Queue
from autosched.simulated_gpus.tensors import block_of, memory_of

_dist: Any = torch.distributed
_Base: Any = _dist.Work if _dist.is_available() else object


class _Work(_Base):  # type: ignore[misc]
    """What a collective returns."""

    def __init__(self, queue: Queue, held: Any, is_barrier: bool):
        super().__init__()
        self.mark, self.held, self.is_barrier = hardware().record(queue), held, is_barrier

    def wait(self, timeout: Any = None) -> bool:
        gpus = hardware()
        queue = gpus.current[self.mark.queue.device]
        if queue is not self.mark.queue:
            gpus.wait(queue, self.mark)
        if self.is_barrier:
            gpus.synchronize(queue, asked=True)
        self.held = None
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return hardware().poll(self.mark)


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """Do what an operator of the namespace c10d does."""
    gpus, name = hardware(), func.name().partition("::")[2]
    parameters = func._schema.arguments
    given = dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
    tensors = [given[each.name] for each in parameters if "Tensor" in str(each.type)]
    sides = [list(filter(block_of, tree_leaves(item))) for item in tensors if item is not None]
    group = _dist.ProcessGroup.unbox(given["process_group"])
    is_root = given.get("root_rank") == group.rank()
    is_barrier = name == "barrier"
    kept = name == "send" or (name, is_root) in (("broadcast_", True), ("reduce_", False))
    outs, ins = ([] if is_barrier or kept else sides[0]), sides[-1]
    blocks = [block_of(item) for item in (*outs, *ins)]
    queue = now = gpus.current[blocks[0].queue.device if blocks else gpus.device]
    if given.get("async_op", True) and not is_barrier:
        key = group.group_name, now.device
        queue = gpus.of_groups.setdefault(key, Queue(now.device, 1000, "the stream of a group"))
        gpus.wait(queue, gpus.record(now), asked=False)
    pairs = [(out, ins[n % len(ins)]) for n, out in enumerate(outs) if ins and gpus.numbers]
    memory = [(memory_of(out), memory_of(given)) for out, given in pairs]

    def work() -> None:
        for target, source in memory:
            count = -(-target.numel() // max(1, source.numel()))
            target.copy_(source.flatten().repeat(count)[: target.numel()].view(target.shape))

    gpus.launch(queue, f"{name.strip('_')} of a group", work, blocks, ins, outs)
    made = _Work(queue, (outs, ins), is_barrier)
    gpus.works.append(made)  # torch's C++ keeps only a part of it
    return (args[0], made.boxed()) if len(func._schema.returns) > 1 else made.boxed()


def as_one_rank(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return ``init_process_group``, which meets no other ranks for NCCL."""

    def initialized(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None and "nccl" not in str(backend):
            return initialize(backend, *args, **kwargs)
        from torch.testing._internal.distributed.fake_pg import FakeStore

        place = {"rank": kwargs.get("rank", -1), "world_size": kwargs.get("world_size", -1)}
        if min(place.values()) < 0:
            variables = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
            place = dict(zip(place, map(int, variables), strict=True))
        initialize("fake", store=FakeStore(), **place)
        hardware().has_group = True

    return initialized


def end() -> None:
    """Leave the group that was made while GPUs were simulated."""
    if hardware().has_group and _dist.is_initialized():
        _dist.destroy_process_group()


def attributes() -> list[tuple[Any, str, Any]]:
    """Return what is set while GPUs are simulated."""
    if not _dist.is_available():
        return []
    new = _dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs | ({"backend": None} if hardware().has_group else {}))

    return [
        (_dist, "init_process_group", as_one_rank(_dist.init_process_group)),
        (_dist, "is_nccl_available", lambda: True),
        (_dist, "new_group", new_group),
    ]
