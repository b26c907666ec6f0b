"""Queues of simulated GPUs: what is put on them runs later, in any order that streams and events allow.

A host that synchronises lets queues go on until what it waits for has happened, chosen by a seeded
adversary: at times only what is needed runs, at times all else first. Between that nothing runs, or
now and then a little. So whoever does not wait comes too early, for some seed. Knows no tensor.

With ``timing``, which
knows how long work takes, moments are computed.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from autosched.simulated_gpus.observer import Observer

POOL = 32  # streams that torch has per device and priority before it hands out the same again

Work = Callable[[], object]


class Mark:
    """A moment of a queue, which an event holds after its record: past, or to come."""

    def __init__(self, queue: Queue):
        self.queue, self.past, self.seconds = queue, False, 0.0
        self.capture: Capture | None = None
        self.stamp: Any = None  # what an observer knows of it
        self.number = 0
        self.behind: tuple[Node, ...] = ()  # in a capture: what it comes behind


@dataclass(frozen=True)
class Item:
    """What stands in a queue: some work, a mark to be passed, or another queue's mark to be waited for."""

    what: str
    work: Work | None = None
    mark: Mark | None = None
    cycles: int = 0  # for which it sleeps
    hidden: bool = False  # from CUDA: what may happen to memory that goes back, in no time
    number: int = 0  # in the order of issue
    issued: float = 0.0

    @property
    def sleeps(self) -> bool:
        return self.cycles > 0


@dataclass(eq=False)
class Node:
    """A piece of work in a captured graph."""

    item: Item
    behind: tuple[Node, ...]
    queue: Queue


@dataclass(eq=False)
class Capture:
    """What is recorded instead of run: nodes, and the queues that have joined."""

    origin: Queue
    mode: str
    thread: int
    nodes: list[Node] = field(default_factory=list)
    joined: list[Queue] = field(default_factory=list)
    drawn: dict[Any, int] = field(default_factory=dict)  # numbers that one replay draws of each
    lives: list[Any] = field(default_factory=list)  # of the blocks that were allocated in it
    broken: str | None = None
    going: bool = True


class Queue:
    """What a stream stands for: items of one device, in order. Number 0 is the default stream."""

    def __init__(self, device: int, number: int, name: str = ""):
        self.device, self.number, self.name = device, number, name
        self.items: deque[Item] = deque()
        self.capture: Capture | None = None
        self.tips: tuple[Node, ...] = ()  # the last nodes, while it is being captured
        self.seconds = 0.0  # when its last item ended

    def __str__(self) -> str:
        return f"cuda:{self.device}/{self.number}"


class Current(dict[int, Queue]):
    """The current queue of each device in a thread, now and when autograd's nodes were made."""

    def __init__(self, queues: Iterable[Queue]):
        super().__init__(enumerate(queues))
        self.chosen: set[int] = set()  # devices of which the thread has chosen a queue
        self._moments: list[tuple[int, dict[int, Queue]]] = []
        self._note()

    def __setitem__(self, device: int, queue: Queue) -> None:
        super().__setitem__(device, queue)
        self.chosen.add(device)
        self._note()

    def _note(self) -> None:
        number: int = torch._C._autograd._get_sequence_nr()
        if self._moments and self._moments[-1][0] == number:
            self._moments.pop()
        self._moments.append((number, dict(self)))

    def at(self, number: int) -> dict[int, Queue]:
        """Return what was current when the node with this number was made."""
        found = max(bisect_right(self._moments, number, key=itemgetter(0)) - 1, 0)
        return self._moments[found][1]


class Queues:
    """All queues of all devices, and the adversary."""

    def __init__(self, gpus: int, seed: int):
        self.gpus = gpus
        self.observer = Observer()
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        # How often something runs before it has to, and how often the adversary changes its mind.
        self.eagerness = self.random.choice([0.0, 0.0, 0.3, 0.9])
        self.fickleness = self.random.choice([0.0, 0.0, 0.1, 0.3])
        self.busy: dict[Queue, float] = {}  # that have items, and how the adversary likes them
        self.capture: Capture | None = None
        self.capture_queue: Queue | None = None  # where graphs are captured by default
        self.error: Exception | None = None
        # A device's seconds at the host's.
        self.clock: Callable[[int, float], float] = lambda device, now: now
        self.timing: Any = None  # computed durations, in place of a clock
        self.count = 0
        self.default = [Queue(device, 0) for device in range(gpus)]
        self.pools: dict[tuple[int, int], list[Queue]] = {}
        self.handed: dict[tuple[int, int], int] = {}
        self.mine = threading.local()

    # ---- streams: current by thread and device

    def from_pool(self, device: int, priority: int = 0) -> Queue:
        """Return the next queue of a device's pool; the 33rd is the first."""
        with self.lock:
            pool = self.pools.setdefault(
                (device, priority), [Queue(device, n + 1) for n in range(POOL)]
            )
            taken = self.handed[device, priority] = self.handed.get((device, priority), 0) + 1
            return pool[(taken - 1) % POOL]

    @property
    def device(self) -> int:
        """The current device of this thread."""
        return getattr(self.mine, "device", 0)

    @device.setter
    def device(self, device: int) -> None:
        if not 0 <= device < self.gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.mine.device = device

    @property
    def current(self) -> Current:
        """The current queue of each device in this thread."""
        if not hasattr(self.mine, "queues"):
            self.mine.queues = Current(self.default)
        queues: Current = self.mine.queues
        return queues

    # ---- putting

    def put(
        self, queue: Queue, what: str, work: Work, *, cycles: int = 0, hidden: bool = False
    ) -> None:
        """Queue some work, or make it a node of the graph that is being captured."""
        with self.lock:
            item = self._item(what, work, cycles=cycles, hidden=hidden)
            if queue.capture is None:
                return self._append(queue, item)
            node = Node(item, queue.tips, queue)
            queue.tips = (node,)
            queue.capture.nodes.append(node)

    def record(self, queue: Queue) -> Mark:
        """Mark where a queue has come."""
        with self.lock:
            mark = Mark(queue)
            if queue.capture is None:
                self._append(queue, self._item("record", mark=mark))
            else:
                mark.capture, mark.behind = queue.capture, queue.tips
            self.observer.recorded(queue, mark)
            return mark

    def wait(
        self, queue: Queue, mark: Mark | None, event: Any = None, *, asked: bool = True
    ) -> None:
        """Hold a queue back until a mark is past; never for what was never recorded.

        ``asked``: by the user, maybe for an event, and not by what needs it.
        """
        if mark is None:
            return self.observer.waited(queue, None, event, asked)
        with self.lock:
            if mark.capture is None:
                if queue.capture is not None:
                    self._break("dependency created on uncaptured work in another stream")
                self._append(queue, self._item("wait", mark=mark))
                return self.observer.waited(queue, mark, event, asked)
            if not mark.capture.going:
                raise RuntimeError(
                    "CUDA error: operation not permitted on an event last recorded in a capturing stream"
                )
            if queue.capture is None:
                queue.capture, queue.tips = mark.capture, ()
                mark.capture.joined.append(queue)
            queue.tips = (*queue.tips, *(node for node in mark.behind if node not in queue.tips))
            self.observer.waited(queue, mark, event, asked)

    def _item(self, what: str, work: Any = None, mark: Any = None, **facts: Any) -> Item:
        self.count += 1
        issued = self.timing.issued(**facts) if self.timing else 0.0
        return Item(what, work, mark, **facts, number=self.count, issued=issued)

    def _append(self, queue: Queue, item: Item) -> None:
        queue.items.append(item)
        self.busy.setdefault(queue, self.random.random())
        while self.random.random() < self.eagerness and self._step():
            pass

    # ---- running

    def until(self, marks: Iterable[Mark | None], *, asked: bool = False) -> None:
        """Let queues go on until marks are past. Raises RuntimeError where work failed."""
        with self.lock:
            for mark in marks:
                sparing = self.random.random() < 0.5
                while mark is not None and not mark.past:
                    self._on_the_way_to(mark, sparing)
                if self.timing and mark is not None:
                    self.timing.host = max(self.timing.host, mark.seconds)
                if mark is not None:
                    self.observer.host_waited(mark, asked)
            if self.error is not None:
                error, self.error = self.error, None
                raise RuntimeError(f"CUDA error: a kernel failed: {error}") from error

    def _on_the_way_to(self, mark: Mark, sparing: bool) -> None:
        """Run an item, one without which the mark is not reached if sparing."""
        ran = self._run(self._held_up_by(mark)) if sparing else self._step(asleep=True)
        if not ran:
            raise RuntimeError("the queues of simulated GPUs wait for each other")

    def poll(self, mark: Mark | None) -> bool:
        """Whether a mark is past, or was never made; each time one asks, time has gone on."""
        with self.lock:
            if self.timing and mark is not None:
                while not mark.past:
                    self._on_the_way_to(mark, sparing=True)
                return bool(mark.seconds <= self.timing.issued())
            self._step(asleep=True)
            if mark is not None and mark.past:
                self.observer.host_waited(mark, False)
            return mark is None or mark.past

    def _step(self, asleep: bool = False) -> bool:
        """Run the next item of some queue, of one that sleeps only if there is no other; whether there was any."""
        ready = [queue for queue in self.busy if self._is_ready(queue)]
        awake = [queue for queue in ready if not queue.items[0].sleeps]
        if not (awake or (asleep and ready)):
            return False
        chosen = max(awake or ready, key=self.busy.__getitem__)
        if self.random.random() < self.fickleness:
            self.busy[chosen] = self.random.random()
        return self._run(chosen)

    def _run(self, queue: Queue) -> bool:
        if not queue.items or not self._is_ready(queue):
            return False
        while queue.items[0].sleeps and self._step():
            pass  # as long as any other has something to do
        item = queue.items.popleft()
        if not queue.items:
            del self.busy[queue]
        if self.timing:
            self.timing.take(queue, item)
        if item.work is not None:
            try:
                with torch._C._DisableTorchDispatch():
                    item.work()
            except Exception as error:
                self.error = error
        elif item.what == "record" and item.mark is not None:
            now = queue.seconds if self.timing else self.clock(queue.device, time.perf_counter())
            item.mark.past, item.mark.seconds = True, now
        return True

    def _is_ready(self, queue: Queue) -> bool:
        mark = queue.items[0].mark
        return queue.items[0].what != "wait" or mark is None or mark.past

    def _held_up_by(self, mark: Mark) -> Queue:
        """Return the queue that has to go on before a mark can be past; one of a circle, if any."""
        queue = mark.queue
        seen: set[Queue] = set()
        while queue.items and queue not in seen and not self._is_ready(queue):
            seen.add(queue)
            queue = queue.items[0].mark.queue  # type: ignore[union-attr]
        return queue

    # ---- capturing

    def begin_capture(self, mode: str) -> Capture:
        """Record what is put on the current queue from now on."""
        with self.lock:
            queue = self.current[self.device]
            if queue.number == 0:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            if self.capture is not None:
                raise RuntimeError(
                    "CUDA error: a capture is under way, and there can be one at a time"
                )
            self.capture = queue.capture = Capture(
                queue, mode, threading.get_ident(), joined=[queue]
            )
            queue.tips = ()
            return self.capture

    def end_capture(self) -> Capture:
        """End it. Raises RuntimeError for what went wrong in it, and for queues that have not come back."""
        with self.lock:
            capture, self.capture = self.capture, None
            if capture is None or self.current[self.device] is not capture.origin:
                raise RuntimeError("CUDA error: the capture must end on the stream where it began")
            capture.going = False
            known = ancestors(capture.origin.tips)
            lost = [queue for queue in capture.joined if not known.issuperset(_seen(queue.tips))]
            for queue in capture.joined:
                queue.capture, queue.tips = None, ()
            if lost and capture.broken is None:
                self.observer.refused(f"unjoined work: {', '.join(map(str, lost))}")
            if capture.broken is not None:
                raise RuntimeError(
                    f"CUDA error: operation failed due to a previous error during capture: {capture.broken}"
                )
            if lost:
                raise RuntimeError(
                    f"CUDA error: capturing stream has unjoined work: {', '.join(map(str, lost))}"
                )
            return capture

    def forbid(self, what: str, queue: Queue | None = None) -> None:
        """Raise RuntimeError for what must not be done while a graph is captured, which breaks the capture, too."""
        with self.lock:
            capture = self.capture
            if capture is None:
                return
            mine = capture.mode == "thread_local" and capture.thread == threading.get_ident()
            if capture.mode == "global" or mine or (queue is not None and queue.capture is capture):
                self._break(f"operation not permitted when stream is capturing: {what}")

    def forbid_on_device(self, what: str, device: int) -> None:
        """Raise RuntimeError as ``forbid``; from whatever thread, if a device's stream is captured."""
        with self.lock:
            self.forbid(what)
            if self.capture is not None and self.capture.origin.device == device:
                self._break(f"operation not permitted when stream is capturing: {what}")

    def _break(self, why: str) -> None:
        self.observer.refused(why)
        if self.capture is not None:
            self.capture.broken = self.capture.broken or why
        raise RuntimeError(f"CUDA error: {why}")

    def replay(self, capture: Capture, queue: Queue, last: Mark | None) -> Mark:
        """Queue a captured graph: each node has a lane of its own, and what comes next waits for all of them."""
        with self.lock:
            if queue.capture is not None:
                self._break("a graph is replayed while another is captured")
            self.observer.replayed(capture, queue)
            observer, self.observer = self.observer, Observer()
            self.wait(queue, last)  # a graph does not overlap itself
            self.put(queue, "begin the graph", lambda: [life.begin() for life in capture.lives])
            begin = self.record(queue)
            marks: dict[Node, Mark] = {}
            for node in capture.nodes:
                lane = Queue(node.queue.device, -1)
                for mark in (begin, *(marks[earlier] for earlier in node.behind)):
                    lane.items.append(Item("wait", mark=mark))
                item = node.item
                lane.items.append(
                    Item(item.what, item.work, cycles=item.cycles, hidden=item.hidden)
                )
                marks[node] = Mark(lane)
                lane.items.append(Item("record", mark=marks[node]))
                self.busy[lane] = self.random.random()
            for mark in marks.values():
                self.wait(queue, mark)
            end = self.record(queue)
            self.observer = observer
            return end


def ancestors(tips: Iterable[Node]) -> set[Node]:
    """Return these nodes, and all that they come behind."""
    known: set[Node] = set()
    open_ = list(tips)
    while open_:
        node = open_.pop()
        if node not in known:
            known.add(node)
            open_ += node.behind
    return known


def _seen(tips: Iterable[Node]) -> set[Node]:
    """Return these nodes, or what those of them come behind that are hidden."""
    return {node for tip in tips for node in (_seen(tip.behind) if tip.item.hidden else [tip])}
