"""NCCL between played GPUs of ranks that threads play; it notes each of its rules that is broken.

    one thread     issues all operations of a rank in a run
    order          communicators are made in one order by all GPUs, and exchanges are issued in one
    directions     no GPU both sends and receives over a communicator
    matching       the nth send between two GPUs meets the nth receive, of as many bytes and the
                   same dtype; no tags
    in flight      a stream waits for a send before the next one of its GPU, and so for receives
    eager          communicators and the first exchange of two GPUs are made before any run
    one end a GPU  two ends of a communicator are on different GPUs
    once           a communicator is made once by each of its GPUs
    device         the current device of the thread that issues is that of the communicator

A send ends when it was received, whatever its size. A communicator's operations run in the order of
issue. So a program that needs a buffer, or another order, never ends. Who makes a communicator waits
for its other GPUs, forever if need be: nothing aborts that.
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
    """All communicators of all GPUs.

    ``devices`` are the places of the GPUs by their numbers; ``ranks`` have these GPUs, and each has
    the one of its number if they are left out.
    """

    def __init__(self, gpus: Hardware, devices: Sequence[int], ranks: Sequence[int] | None = None):
        self.gpus = gpus
        self.devices = devices
        self.ranks = range(len(devices)) if ranks is None else ranks
        self.is_over = False
        self.broken: list[str] = []  # rules
        self.made: dict[int, list[Channel]] = defaultdict(list)  # by GPU
        self.aborted: set[int] = set()
        self.issued: dict[int, list[Pair]] = defaultdict(list)  # by GPU, in order
        self.pairs: dict[tuple[Channel, int, int], list[Pair]] = defaultdict(list)
        self.count: dict[tuple[Channel, int, int, bool], int] = defaultdict(int)
        self.running: set[int] = set()  # ranks that are in a run
        self.threads: dict[int, set[int]] = defaultdict(set)  # by rank
        self.pending: dict[tuple[int, bool], Work] = {}
        self.opened: set[tuple[int, int]] = set()
        self.directions: set[tuple[int, Channel, bool]] = set()
        self.changed = threading.Condition(gpus.lock)
        gpus.elsewhere = lambda: self.changed.wait(PATIENCE)

    def connect(self, gpu: int) -> Connect:
        """Return what makes the ends of a GPU."""
        return lambda channel: self._make(gpu, channel)

    def _make(self, gpu: int, channel: Channel) -> Communicator:
        """Make an end of a communicator, with all others."""
        if len({self.devices[member] for member in channel.gpus}) < len(channel.gpus):
            raise RuntimeError(f"NCCL error: Duplicate GPU detected in {channel}")
        self._check_device(gpu, "makes a communicator")
        if self.ranks[gpu] in self.running:
            self.rule(f"eager: GPU {gpu} makes {channel} in a run")
        with self.changed:
            if channel in self.made[gpu]:
                self.rule(f"once: GPU {gpu} makes {channel} again")
            self.made[gpu].append(channel)
            self.changed.notify_all()
            here = [self.made[member] for member in channel.gpus]
            self.changed.wait_for(lambda: self.is_over or all(channel in each for each in here))
            if self.is_over:
                raise RuntimeError(f"GPU {gpu} waits for others to make {channel}")
        return _Communicator(self, gpu, channel)

    def close(self) -> None:
        """End the threads that still wait for others."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def _check_device(self, gpu: int, what: str) -> None:
        if self.gpus.device != self.devices[gpu]:
            self.rule(f"device: GPU {gpu} {what} where cuda:{self.gpus.device} is current")

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
        for a in self.made:
            for b in self.made:
                both = {*self.made[a]} & {*self.made[b]}
                if [x for x in self.made[a] if x in both] != [x for x in self.made[b] if x in both]:
                    self.rule(f"order: GPUs {a} and {b} make communicators in different orders")
        assert not self.broken, "\n".join(dict.fromkeys(self.broken))

    def abort(self, gpu: int) -> None:
        """End all that is pending on a GPU, whatever it has done; others learn nothing of it."""
        with self.changed:
            self.aborted.add(gpu)
            for (_, source, target), pairs in self.pairs.items():
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


class _Communicator:
    """A GPU's end of a communicator, with a queue of its own."""

    def __init__(self, world: World, gpu: int, channel: Channel):
        self.world = world
        self.gpu = gpu
        self.channel = channel
        self.queues = {member: _queue(world, channel, member) for member in channel.gpus}
        self.queue = self.queues[gpu]

    def send(self, row: torch.Tensor, peer: int) -> Work:
        return self._issue(row, self.gpu, peer, True)

    def receive(self, row: torch.Tensor, peer: int) -> Work:
        return self._issue(row, peer, self.gpu, False)

    def abort(self) -> None:
        self.world.abort(self.gpu)

    def _issue(self, row: Any, source: int, target: int, is_send: bool) -> Work:
        world, gpus, queue = self.world, self.world.gpus, self.queue
        current = gpus.current[queue.device]
        with world.changed:
            if self.gpu in world.aborted:
                raise RuntimeError("NCCL error: the communicator was aborted")
            self._check(source, target, is_send)
            pair = self._pair(source, target, is_send)
            world.issued[self.gpu].append(pair)
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
            world.pending[self.gpu, is_send] = work
            world.changed.notify_all()
        return work

    def _copy(self, pair: Pair) -> None:
        if self.gpu in self.world.aborted:
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
        key = self.channel, source, target
        number = world.count[*key, is_send]
        world.count[*key, is_send] += 1
        if number == len(world.pairs[key]):
            name = f"exchange {number} of {source} to {target} over {self.channel}"
            world.pairs[key].append(Pair(name, self.queues[source], self.queues[target]))
        return world.pairs[key][number]

    def _check(self, source: int, target: int, is_send: bool) -> None:
        world, gpu, way = self.world, self.gpu, "send" if is_send else "receive"
        rank = world.ranks[gpu]
        world._check_device(gpu, f"issues a {way}")
        if source == target or {source, target} - {*self.channel.gpus}:
            world.rule(f"matching: {source} to {target} over {self.channel}")
        before = world.pending.get((gpu, is_send))
        if before is not None and not before.awaited:
            world.rule(f"in flight: GPU {gpu} issues a {way} before its stream awaits the last")
        if rank in world.running:
            world.threads[rank].add(threading.get_ident())
            if (source, target) not in world.opened:
                world.rule(f"eager: the first exchange of {source} and {target} is in a run")
        world.opened.add((source, target))
        world.directions.add((gpu, self.channel, is_send))
        if (gpu, self.channel, not is_send) in world.directions:
            world.rule(f"directions: GPU {gpu} sends and receives over {self.channel}")


def _queue(world: World, channel: Channel, gpu: int) -> Queue:
    """Return the queue of a GPU's end of a communicator."""
    queues: dict[Any, Queue] = world.__dict__.setdefault("queues", {})
    with world.changed:
        return queues.setdefault((channel, gpu), Queue(world.devices[gpu], -1))


__all__ = ["World"]
