"""NCCL between played GPUs of ranks that threads play; it notes each of its rules that is broken.

    one thread     issues all operations of a rank in a run
    order          exchanges are issued in one order by all ranks
    matching       the nth send between two GPUs meets the nth receive, of as many bytes and the
                   same dtype; no tags
    in flight      a stream waits for a send before the next one of its GPU, and so for receives
    device         the current device of the thread that issues is that of the GPU

A rank has one GPU, of its number. A send ends when it was received, whatever its size. What goes one
way between two ranks runs in the order of issue. So a program that needs a buffer, or another order,
never ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch

from autosched.simulated_gpus.hardware import Hardware
from autosched.simulated_gpus.queues import Mark, Queue
from autosched.simulated_gpus.tensors import block_of, memory_of

__all__ = ["Way", "World"]

PATIENCE = 20.0  # seconds until a rank that waits for others is taken to wait forever


class Pair:
    """A send and its receive, one of which may not be issued yet."""

    def __init__(self, name: str, sender: Queue, receiver: Queue):
        self.name = name
        self.ready = Mark(sender)  # the send may begin
        self.done = Mark(receiver)
        self.sent: torch.Tensor | None = None
        self.received: torch.Tensor | None = None

    def copy(self) -> None:
        assert self.sent is not None
        assert self.received is not None
        memory_of(self.received).copy_(memory_of(self.sent))


class World:
    """All ways between the GPUs of ranks."""

    def __init__(self, gpus: Hardware):
        self.gpus = gpus
        self.broken: list[str] = []  # rules
        self.aborted: set[int] = set()
        self.issued: dict[int, list[Pair]] = defaultdict(list)  # by rank, in order
        self.pairs: dict[tuple[int, int], list[Pair]] = defaultdict(list)
        self.count: dict[tuple[int, int, bool], int] = defaultdict(int)
        self.running: set[int] = set()  # ranks that are in a run
        self.threads: dict[int, set[int]] = defaultdict(set)  # by rank
        self.pending: dict[tuple[int, bool], Work] = {}
        self.queues: dict[tuple[int, int, int], Queue] = {}
        self.changed = threading.Condition(gpus.lock)
        gpus.elsewhere = lambda: self.changed.wait(PATIENCE)

    def queue(self, source: int, target: int, rank: int) -> Queue:
        """Return the queue of a rank for what one sends to another."""
        with self.changed:
            return self.queues.setdefault((source, target, rank), Queue(rank, -1))

    def rule(self, what: str) -> None:
        """Note a rule that is broken."""
        self.broken.append(what)

    def begin(self, rank: int) -> None:
        """Note that a rank begins a run."""
        self.running.add(rank)
        self.threads[rank].clear()

    def end(self, rank: int) -> None:
        """Note that a rank has ended a run."""
        if len(self.threads[rank]) > 1:
            self.rule(f"one thread: rank {rank} issues from {len(self.threads[rank])}")
        self.running.discard(rank)

    def check(self) -> None:
        """Raise AssertionError for the rules that were broken."""
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for order in self.issued.values():
            for before, after in pairwise(order):
                sorter.add(id(after), id(before))
        try:
            sorter.prepare()
        except CycleError:
            self.rule("order: GPUs issue exchanges in different orders")
        assert not self.broken, "\n".join(dict.fromkeys(self.broken))

    def abort(self, gpu: int) -> None:
        """End all that is pending on a GPU, whatever it has done; others learn nothing of it."""
        with self.changed:
            self.aborted.add(gpu)
            for (source, target), pairs in self.pairs.items():
                for pair in pairs:
                    pair.done.past = pair.done.past or source == gpu
                    pair.ready.past = pair.ready.past or target == gpu
            self.changed.notify_all()


class Work:
    """What an operation returns; ``wait`` lets the current stream wait for it."""

    def __init__(self, world: World, stream: Queue, mark: Mark):
        self.world = world
        self.stream = stream
        self.mark = mark
        self.awaited = False

    def wait(self) -> None:
        gpus = self.world.gpus
        current = gpus.current[self.stream.device]
        gpus.wait(current, self.mark)
        self.awaited = self.awaited or current is self.stream


class Way:
    """What ``ProcessGroupNCCL`` has, for the GPU of a rank."""

    def __init__(self, world: World, rank: int):
        self.world = world
        self.rank = rank

    def send(self, rows: Sequence[torch.Tensor], peer: int, _: int) -> Work:
        """Start to send on the current stream."""
        return self._issue(rows[0], self.rank, peer, True)

    def recv(self, rows: Sequence[torch.Tensor], peer: int, _: int) -> Work:
        """Start to receive on the current stream."""
        return self._issue(rows[0], peer, self.rank, False)

    def _issue(self, row: Any, source: int, target: int, is_send: bool) -> Work:
        world, gpus = self.world, self.world.gpus
        queue = world.queue(source, target, self.rank)
        current = gpus.current[self.rank]
        with world.changed:
            if self.rank in world.aborted:
                raise RuntimeError("NCCL error: the communicator was aborted")
            self._check(is_send)
            pair = self._pair(source, target, is_send)
            world.issued[self.rank].append(pair)
            gpus.wait(queue, gpus.record(current))
            if is_send:
                pair.sent = row
                gpus.launch(queue, f"begin {pair.name}", lambda: None, [block_of(row)])
                gpus._append(queue, gpus._item("record", mark=pair.ready))
                gpus.wait(queue, pair.done)
                gpus.launch(queue, f"end {pair.name}", lambda: None, [block_of(row)])
            else:
                pair.received = row
                gpus.wait(queue, pair.ready)
                gpus.launch(queue, pair.name, lambda: self._copy(pair), [block_of(row)])
                gpus._append(queue, gpus._item("record", mark=pair.done))
            work = Work(world, current, gpus.record(queue))
            world.pending[self.rank, is_send] = work
            world.changed.notify_all()
        return work

    def _copy(self, pair: Pair) -> None:
        if self.rank in self.world.aborted:
            return
        if pair.sent is None or pair.received is None:
            raise AssertionError(pair.name)
        sent, received = [(row.nbytes, row.dtype) for row in (pair.sent, pair.received)]
        if sent != received:
            self.world.rule(f"matching: {pair.name} has {sent}, and its receiver {received}")
            return
        pair.copy()

    def _pair(self, source: int, target: int, is_send: bool) -> Pair:
        world = self.world
        number = world.count[source, target, is_send]
        world.count[source, target, is_send] += 1
        if number == len(world.pairs[source, target]):
            name = f"exchange {number} of {source} to {target}"
            ends = (world.queue(source, target, rank) for rank in (source, target))
            world.pairs[source, target].append(Pair(name, *ends))
        return world.pairs[source, target][number]

    def _check(self, is_send: bool) -> None:
        world, rank, way = self.world, self.rank, "send" if is_send else "receive"
        if world.gpus.device != rank:
            world.rule(
                f"device: rank {rank} issues a {way} where cuda:{world.gpus.device} is current"
            )
        before = world.pending.get((rank, is_send))
        if before is not None and not before.awaited:
            world.rule(f"in flight: rank {rank} issues a {way} before its stream awaits the last")
        if rank in world.running:
            world.threads[rank].add(threading.get_ident())
