"""NCCL between played GPUs of ranks that threads play; it notes each of its rules that is broken.

    one thread     issues all operations of a rank in a run
    order          communicators are made in one order on all ranks, and exchanges are issued in one
    directions     no rank both sends and receives over a communicator
    matching       the nth send between two ranks meets the nth receive, of as many bytes; no tags
    in flight      a stream waits for a send before the next one of its rank, and so for receives
    eager          the first exchange of two ranks is before any run
    one rank a GPU two ranks of a communicator are on different GPUs

A send ends when it was received, whatever its size. A communicator's operations run in the order of
issue. So a program that needs a buffer, or another order, never ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch

from autosched.runtime.ranks.nccl import Channel, Communicator, Connect
from tests.gpu.fake_gpu.hardware import Hardware
from tests.gpu.fake_gpu.queues import Mark, Queue

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
        self.received.memory.copy_(self.sent.memory)  # type: ignore[attr-defined]


class World:
    """All communicators of all ranks; ``devices`` are the numbers of their GPUs."""

    def __init__(self, gpus: Hardware, devices: Sequence[int]):
        self.gpus = gpus
        self.devices = devices
        self.broken: list[str] = []  # rules
        self.made: dict[int, list[Channel]] = defaultdict(list)  # by rank
        self.aborted: set[int] = set()
        self.issued: dict[int, list[Pair]] = defaultdict(list)  # by rank, in order
        self.pairs: dict[tuple[Channel, int, int], list[Pair]] = defaultdict(list)
        self.count: dict[tuple[Channel, int, int, bool], int] = defaultdict(int)
        self.running: set[int] = set()  # ranks that are in a run
        self.threads: dict[int, set[int]] = defaultdict(set)
        self.pending: dict[tuple[int, bool], Work] = {}
        self.opened: set[tuple[int, int]] = set()
        self.directions: set[tuple[int, Channel, bool]] = set()
        self.changed = threading.Condition(gpus.lock)
        gpus.elsewhere = lambda: self.changed.wait(PATIENCE)

    def connect(self, rank: int) -> Connect:
        """Return what makes the communicators of a rank."""
        return lambda channel: self._make(rank, channel)

    def _make(self, rank: int, channel: Channel) -> Communicator:
        """Make a communicator: its ranks wait for each other."""
        if len({self.devices[member] for member in channel.ranks}) < len(channel.ranks):
            raise RuntimeError(f"NCCL error: Duplicate GPU detected in {channel.name}")
        with self.changed:
            self.made[rank].append(channel)
            self.changed.notify_all()
            here = [self.made[member] for member in channel.ranks]
            if not self.changed.wait_for(lambda: all(channel in each for each in here), PATIENCE):
                self.rule(f"order: rank {rank} waits for others to make {channel.name}")
                raise RuntimeError("NCCL error: timeout")
        return _Communicator(self, rank, channel)

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
        orders = [self.issued[rank] for rank in self.issued]
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for order in orders:
            for before, after in pairwise(order):
                sorter.add(id(after), id(before))
        try:
            sorter.prepare()
        except CycleError:
            self.rule("order: ranks issue exchanges in different orders")
        for a in self.made:
            for b in self.made:
                both = {*self.made[a]} & {*self.made[b]}
                if [x for x in self.made[a] if x in both] != [x for x in self.made[b] if x in both]:
                    self.rule(f"order: ranks {a} and {b} make communicators in different orders")
        assert not self.broken, "\n".join(dict.fromkeys(self.broken))

    def abort(self, rank: int) -> None:
        """End all that is pending on a rank, whatever it has done; others learn nothing of it."""
        with self.changed:
            self.aborted.add(rank)
            for (_, source, target), pairs in self.pairs.items():
                for pair in pairs:
                    pair.done.past = pair.done.past or source == rank
                    pair.ready.past = pair.ready.past or target == rank
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


class _Communicator:
    """A rank's end of a communicator, with a queue of its own."""

    def __init__(self, world: World, rank: int, channel: Channel):
        self.world = world
        self.rank = rank
        self.channel = channel
        self.queues = {member: _queue(world, channel, member) for member in channel.ranks}
        self.queue = self.queues[rank]

    def send(self, row: torch.Tensor, peer: int) -> Work:
        return self._issue(row, self.rank, peer, True)

    def receive(self, row: torch.Tensor, peer: int) -> Work:
        return self._issue(row, peer, self.rank, False)

    def abort(self) -> None:
        self.world.abort(self.rank)

    def _issue(self, row: Any, source: int, target: int, is_send: bool) -> Work:
        world, gpus, queue = self.world, self.world.gpus, self.queue
        current = gpus.current[queue.device]
        with world.changed:
            if self.rank in world.aborted:
                raise RuntimeError("NCCL error: the communicator was aborted")
            self._check(source, target, is_send)
            pair = self._pair(source, target, is_send)
            world.issued[self.rank].append(pair)
            gpus.wait(queue, gpus.record(current))
            if is_send:
                pair.sent = row
                gpus.launch(queue, f"begin {pair.name}", lambda: None, [row.block])
                gpus._append(queue, gpus._item("record", mark=pair.ready))
                gpus.wait(queue, pair.done)
                gpus.launch(queue, f"end {pair.name}", lambda: None, [row.block])
            else:
                pair.received = row
                gpus.wait(queue, pair.ready)
                gpus.launch(queue, pair.name, lambda: self._copy(pair), [row.block])
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
        if pair.sent.nbytes != pair.received.nbytes:
            self.world.rule(f"matching: {pair.name} has {pair.sent.nbytes} B, and its receiver "
                            f"{pair.received.nbytes}")  # fmt: skip
            return
        pair.copy()

    def _pair(self, source: int, target: int, is_send: bool) -> Pair:
        world = self.world
        key = self.channel, source, target
        number = world.count[*key, is_send]
        world.count[*key, is_send] += 1
        if number == len(world.pairs[key]):
            name = f"exchange {number} of {source} to {target} over {self.channel.name}"
            world.pairs[key].append(Pair(name, self.queues[source], self.queues[target]))
        return world.pairs[key][number]

    def _check(self, source: int, target: int, is_send: bool) -> None:
        world, rank, way = self.world, self.rank, "send" if is_send else "receive"
        if source == target or {source, target} - {*self.channel.ranks}:
            world.rule(f"matching: {source} to {target} over {self.channel.name}")
        before = world.pending.get((rank, is_send))
        if before is not None and not before.awaited:
            world.rule(f"in flight: rank {rank} issues a {way} before its stream awaits the last")
        if rank in world.running:
            world.threads[rank].add(threading.get_ident())
            if (source, target) not in world.opened:
                world.rule(f"eager: the first exchange of {source} and {target} is in a run")
        world.opened.add((source, target))
        world.directions.add((rank, self.channel, is_send))
        if (rank, self.channel, not is_send) in world.directions:
            world.rule(f"directions: rank {rank} sends and receives over {self.channel.name}")


def _queue(world: World, channel: Channel, rank: int) -> Queue:
    """Return the queue of a rank's end of a communicator."""
    queues: dict[Any, Queue] = world.__dict__.setdefault("queues", {})
    with world.changed:
        return queues.setdefault((channel, rank), Queue(world.devices[rank], -1))


__all__ = ["World"]
