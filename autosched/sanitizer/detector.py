"""Watch what happens on simulated GPUs: what is issued where, by which line, and what is wrong with it.

``order`` decides which accesses are in no order. Here are the memory that they are to, the user's
names and lines, and the mistakes that are none of order: streams that are one, threads on the
default stream, what captures do not permit, events that are never recorded.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autosched.graph.effects import effects_of
from autosched.sanitizer.findings import Access, Advice, Finding, Line
from autosched.sanitizer.lines import lines, tensor_names, variable
from autosched.sanitizer.order import HOST, Lines, Memory, Open, Order, Step, Touch
from autosched.sanitizer.picture import Work
from autosched.sanitizer.regions import NOTHING, region_of
from autosched.simulated_gpus.allocator import ORDINARY
from autosched.simulated_gpus.hardware import Block, Hardware
from autosched.simulated_gpus.observer import Observer, Tensors
from autosched.simulated_gpus.queues import Capture, Mark, Queue
from autosched.simulated_gpus.streams import Stream
from autosched.simulated_gpus.tensors import block_of

_SMALL = 2**20  # torch has pools of their own for blocks up to so many bytes
_MOST_STEPS = 300_000
_MOST_WORK = 2_000_000  # steps that are taken again to give advice


class Detector(Observer):
    """Reads what happens on simulated GPUs."""

    def __init__(self, gpus: Hardware):
        self.gpus = gpus
        self.order = Order(self._race, self._reused)
        self.steps: list[Step] = []
        self.found: dict[Any, Finding] = {}
        self.notes: dict[str, None] = {}
        # By the stream that waits: marks, events, lines, numbers.
        self.waits: dict[Queue, list[tuple[Mark | None, Any, Lines, int]]] = {}
        self.unrecorded: dict[Any, tuple[Lines, Queue]] = {}
        self.asked: dict[Line, tuple[str, bool]] = {}  # kinds, and whether each was implied
        self.first_with: dict[Queue, weakref.ref[Any]] = {}  # streams of a queue
        self.streams: dict[Queue, str] = {}  # the user's names
        self.threads: set[Any] = set()
        self.pins = False  # whether there is page-locked memory that copies use
        self.number = self.operations = 0
        self.is_cut = False  # whether there are more steps than were kept
        self.next: deque[Step] = deque()

    def _step(self, kind: str, queue: Any, *facts: Any, where: Lines = ()) -> None:
        """Take a step, or keep it for the graph that is captured."""
        with self.gpus.lock:
            self.number += 1
            step = Step(kind, queue, facts, where, self.number)
            capture = getattr(queue, "capture", None)
            if capture is not None:
                self.order.graphs.setdefault(capture, []).append(step)
                return
            if len(self.steps) < _MOST_STEPS:
                self.steps.append(step)
            elif not self.is_cut:
                self.is_cut = True
                self.notes[f"advice and pictures are of the first {_MOST_STEPS} steps"] = None
            self.next.append(step)
            if len(self.next) == 1:  # else another is being taken, and garbage was collected
                while self.next:
                    self.order.take(self.next[0])
                    self.next.popleft()

    # ---- what is told

    def launched(self, queue: Queue, what: str, reads: Tensors, writes: Tensors) -> None:
        self.operations += 1
        self._check_thread(queue)
        touched = [
            (memory, region_of(item), is_write)
            for is_write, items in ((False, reads), (True, writes))
            for item in items
            if (memory := self._memory(item)) is not None
        ]
        if not touched:
            return
        for memory, _, _ in touched:
            if memory.queue is not queue and not memory.names:
                memory.names = self._names(memory)
        phase = "backward" if getattr(self.gpus.mine, "backward", None) else ""
        self._step("touch", queue, queue, what, touched, phase, where=lines())

    def recorded(self, queue: Queue, mark: Mark) -> None:
        if queue.number >= 0:
            self._step("record", queue, mark)
            mark.number = self.number

    def waited(self, queue: Queue, mark: Mark | None, event: Any, asked: bool) -> None:
        where = lines() if asked else ()
        if mark is None:
            self.number += 1
            self.unrecorded.setdefault(event, (where, queue))
        elif queue.number >= 0:
            self._step("wait", queue, mark, where=where)
            if queue.capture is None:
                self._note_advice("wait", where)
        self.waits.setdefault(queue, []).append((mark, event, where, self.number))

    def host_waited(self, mark: Mark, asked: bool) -> None:
        where = lines() if asked else ()
        self._step("synchronize", HOST, mark, None, where=where)
        self._note_advice("synchronize", where)

    def host_waited_for_device(self, device: int, asked: bool) -> None:
        where = lines() if asked else ()
        self._step("synchronize", HOST, None, device, where=where)
        self._note_advice("synchronize", where)

    def _note_advice(self, kind: str, where: Lines) -> None:
        if where:
            implied = self.asked.get(where[0], ("", True))[1] and self.order.implied
            self.asked[where[0]] = kind, implied

    def allocated(self, block: Block) -> None:
        nbytes = 0 if block.memory is None else block.memory.nbytes
        key = block.queue, block.pool, nbytes <= _SMALL
        memory = Memory(block.life.what, (), block.queue, key, block=weakref.ref(block))
        block.memory_known = memory
        self._step("allocate", block.queue, memory)

    def freed(self, block: Block) -> None:
        memory: Memory | None = block.memory_known
        if memory is None:
            return
        if block.pool == ORDINARY:
            memory.freed = lines()
        if block.pool == ORDINARY or block.queue.capture is not None:
            where = memory.freed or ()
            self._step("free", block.queue, memory, tuple(block.users), where=where)

    def called_on_host(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self.pins:
            return
        leaves = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        known = [(item, memory) for item in leaves if (memory := _pinned_memory(item)) is not None]
        effects = effects_of(func, args, kwargs)
        if known and effects.base is None:  # a view reads nothing
            written = {id(item) for item in effects.writes}
            touched = [(memory, region_of(item), id(item) in written) for item, memory in known]
            self._step("touch", HOST, None, str(func), touched, "", where=lines())

    def replayed(self, capture: Capture, queue: Queue) -> None:
        where = lines()
        for step in self.order.graphs.get(capture, ()):
            for memory, _, _ in step.facts[2] if step.kind == "touch" else ():
                if memory.freed is not None and memory.key[1] == ORDINARY:
                    self._freed_input(memory, where)
        self._step("replay", queue, queue, capture, where=where)

    def refused(self, why: str) -> None:
        self._add(Finding("graph", f"a capture does not permit this: {why}"), why, lines())

    def entered(self, stream: Stream) -> None:
        if not stream.of_pool:
            return
        self._variable(stream.queue)
        first = self.first_with.setdefault(stream.queue, weakref.ref(stream))()
        if first is None:
            self.first_with[stream.queue] = weakref.ref(stream)
        elif first is not stream:
            names = [variable(lambda item, s=s: item is s) or "a stream" for s in (first, stream)]
            message = (
                f"{names[0]} and {names[1]} are one stream: torch has 32 for each device, "
                "and hands them out again; keep streams, and share them"
            )
            self._add(Finding("stream", message), stream.queue, lines())

    def numbers_read(self, what: str) -> None:
        found = lines()
        where = f" at {found[0]}" if found else ""
        note = f"{what} was read{where}: no numbers are computed, so it was zero"
        self.notes[f"{note}; numbers=True computes them"] = None

    def noted(self, what: str) -> None:
        self.notes[what] = None

    def _memory(self, item: torch.Tensor) -> Memory | None:
        block = block_of(item)
        if block is not None:
            found: Memory | None = block.memory_known
            return found
        storage: Any = item.untyped_storage()
        if not hasattr(storage, "memory_known"):
            self.pins = True
            storage.memory_known = Memory(f"page-locked tensor {tuple(item.shape)}", ())
        known: Memory = storage.memory_known
        return known

    # ---- findings

    def _names(self, memory: Memory) -> tuple[str, ...]:
        if memory.queue is None:
            return tensor_names(lambda item: _pinned_memory(item) is memory)
        block = None if memory.block is None else memory.block()
        return () if block is None else tensor_names(lambda item: block_of(item) is block)

    def _check_thread(self, queue: Queue) -> None:
        """Note work of a thread on the default stream, where whoever started it was on another."""
        started = getattr(self.gpus.mine, "started_under", None)
        if not started or queue.number != 0 or queue.device in self.gpus.current.chosen:
            return
        if started[queue.device].number != 0 and started not in self.threads:
            self.threads.add(started)
            message = (
                f"a thread works on {self._stream(queue)}, and whoever started it was on "
                f"{self._stream(started[queue.device])}: a thread begins on the default stream"
            )
            fix = "with torch.cuda.stream(stream): in the function of the thread"
            self._add(Finding("stream", message, fix=fix), queue, lines())

    def _race(self, memory: Memory, first: Touch, second: Touch) -> None:
        if None in (first.queue, second.queue):
            kind = "host"
        elif "replay" in (first.phase, second.phase):
            kind = "graph"
        elif "backward" in (first.phase, second.phase):
            kind = "autograd"
        else:
            kind = "event" if self._stale(first, second) else "race"
        names = memory.names = memory.names or self._names(memory)
        one, other = self._stream(first.queue), self._stream(second.queue)
        does = ["writes" if touch.writes else "reads" for touch in (first, second)]
        if None in (first.queue, second.queue):
            fix = "record an event behind the copy, and call its synchronize()"
        elif first.queue.name:
            fix = "call wait() of what the collective returned"
        else:
            fix = f"{self._called(second.queue)}.wait_stream({self._called(first.queue)})"
        message = f"{memory.name}: {one} {does[0]} it, {other} {does[1]} it, in no order"
        stale = self._stale(first, second) if None not in (first.queue, second.queue) else ""
        finding = Finding(
            kind,
            message + (f"; {stale}" if stale else ""),
            memory.name,
            names,
            self._access(first),
            self._access(second),
            f"{other} must wait for {one} between these lines",
            f"{fix}, before {second.lines[0] if second.lines else 'the function returns'}",
        )
        self._add(finding, first.lines[:1], second.lines)

    def _stale(self, first: Touch, second: Touch) -> str:
        """Return how a wait between two accesses misses the first one, if one does."""
        for mark, event, where, number in reversed(self.waits.get(second.queue, [])):
            if not first.number < number < second.number or event is None:
                continue
            at = f"the wait at {where[0]}" if where else "a wait"
            if mark is None:
                if event.mark is None or event.mark.queue is first.queue:
                    return f"{at} is for an event that had not been recorded, and waits for nothing"
            elif mark.queue is first.queue and mark.number < first.number:
                return f"{at} is for an event that was recorded before the first access"
        return ""

    def _reused(self, old: Open | None, first: Touch, second: Touch, memory: Memory) -> None:
        memory.names = memory.names or self._names(memory)
        if old is None:
            return self._early(first, second, memory)
        owner, user = self._stream(old.memory.queue), self._stream(first.queue)
        freed = f" at {old.lines[0]}" if old.lines else ""
        message = (
            f"{old.memory.name} is freed{freed}, while {user} may still use it: "
            f"its memory belongs to {owner}, and {memory.name} may get it"
        )
        finding = Finding(
            "lifetime",
            message,
            old.memory.name,
            old.memory.names,
            self._access(first),
            self._access(second),
            f"{owner} must wait for {user} before the memory is free",
            f"{old.memory.name}.record_stream({self._called(first.queue)}), behind its use",
        )
        self._add(finding, first.lines[:1], ())

    def _early(self, first: Touch, second: Touch, memory: Memory) -> None:
        """Report new memory that is used on a stream that does not wait for its owner."""
        owner, user = self._stream(memory.queue), self._stream(second.queue)
        message = (
            f"{memory.name} is allocated on {owner}, and {user} uses it without waiting for that: "
            "its memory may be in use as a tensor that was freed there before"
        )
        finding = Finding(
            "lifetime",
            message,
            memory.name,
            memory.names,
            self._access(first),
            self._access(second),
            f"{user} must wait for {owner} behind the allocation",
            f"{self._called(second.queue)}.wait_stream({self._called(memory.queue)}), "
            "or allocate it on the stream that uses it",
        )
        self._add(finding, second.lines[:1], ())

    def _freed_input(self, memory: Memory, where: Lines) -> None:
        freed = f" at {memory.freed[0]}" if memory.freed else ""
        message = f"a graph uses {memory.name}, which was freed{freed}: keep what a graph uses"
        self._add(Finding("graph", message, memory.name, memory.names), memory, where)

    def _access(self, touch: Touch) -> Access:
        how = "writes" if touch.writes else "reads"
        how = "allocates" if touch.phase == "caller" and touch.region is NOTHING else how
        graph = " in a graph" if touch.phase == "replay" else ""
        what = f"{touch.what} {how}{graph}"
        return Access(what, self._stream(touch.queue), touch.lines, touch.number)

    def _stream(self, queue: Queue | None) -> str:
        if queue is None:
            return "the host"
        kind = self.gpus.kind
        if queue.name:
            return f"{queue.name} on {kind}:{queue.device}"
        if queue.number == 0:
            return f"the default stream of {kind}:{queue.device}"
        return f"stream {self._variable(queue) or queue.number} of {kind}:{queue.device}"

    def _called(self, queue: Queue | None) -> str:
        """Return how the user can write a stream."""
        assert queue is not None
        found = self._variable(queue)
        if queue.number == 0:
            return found or f"torch.cuda.default_stream({queue.device})"
        return found or f"stream_{queue.number}"

    def _variable(self, queue: Queue) -> str:
        """Return what the user calls a stream."""
        if not self.streams.get(queue):
            self.streams[queue] = variable(
                lambda item: isinstance(item, Stream) and item.queue is queue
            )
        return self.streams[queue]

    def _add(self, finding: Finding, what: Any, where: Lines) -> None:
        key = finding.kind, what, where[:1], finding.tensor, finding.names
        known = self.found.get(key)
        if known is not None:
            self.found[key] = replace(known, times=known.times + 1)
        elif finding.second is None and where:
            self.found[key] = replace(finding, message=f"{finding.message}\n      {where[0]}")
        else:
            self.found[key] = finding

    # ---- the end

    def returned(self, results: Any, given: Iterable[Any]) -> None:
        """Let the caller use results and arguments on its current streams, and allocate there."""
        following = Memory("next tensor of the caller", ())
        for queue in self.gpus.current.values():
            self._step("following", queue, queue, following)
        leaves = tree_leaves(results)
        if any(hasattr(leaf, "wait_event") or hasattr(leaf, "record") for leaf in leaves):
            return  # the caller gets an event to wait for
        for item in [*leaves, *given]:
            if isinstance(item, torch.Tensor) and item.layout == torch.strided:
                block = block_of(item)
                memory = block.memory_known if block is not None else _pinned_memory(item)
                current = None if block is None else self.gpus.current[block.queue.device]
                if memory is not None:
                    facts = (current, memory, region_of(item))
                    self._step("used", current or HOST, *facts)

    def work(self) -> tuple[Work, ...]:
        """Return the work of streams and the host, for pictures."""
        last: dict[Any, int] = {}
        marks: dict[Any, int] = {}
        behind: dict[Any, list[int]] = {}
        found = []
        for step in self.steps:
            if step.kind in ("touch", "replay"):
                queue = None if step.actor == HOST else step.actor
                what = "graph" if step.kind == "replay" else str(step.facts[1])
                after = tuple(behind.pop(step.actor, ()))
                name = what.removeprefix("aten.").partition(".")[0]
                found.append(Work(step.number, self._stream(queue), name, after))
                last[step.actor] = step.number
            elif step.kind == "record":
                marks[step.facts[0]] = last.get(step.actor, 0)
            elif step.kind in ("wait", "synchronize") and step.facts[0] in marks:
                behind.setdefault(step.actor, []).append(marks[step.facts[0]])
        return tuple(found)

    def findings(self) -> tuple[Finding, ...]:
        """Return what was found; an event that was never recorded is noticed now."""
        for event, (where, queue) in self.unrecorded.items():
            if event is not None and event.mark is None:
                message = f"{self._stream(queue)} waits for an event that is never recorded"
                self._add(Finding("event", message), event, where)
        self.unrecorded.clear()
        return tuple(self.found.values())

    def advice(self) -> tuple[Advice, ...]:
        """Return the lines of waits and synchronisations, any one of which can go.

        They order what is ordered already, or nothing that this run needs.
        """
        found = []
        for where, (kind, implied) in self.asked.items():
            who = "the stream waits" if kind == "wait" else "the host waits"
            if implied:
                found.append(Advice(f"what {who} for here is ordered already", (where,)))
            elif self._goes_without(where):
                found.append(Advice(f"nothing in this run needs that {who} here", (where,)))
        return tuple(found)

    def _goes_without(self, where: Line) -> bool:
        """Whether the same would be found if the waits of a line were left out."""
        if self.is_cut or len(self.steps) * len(self.asked) > _MOST_WORK:
            return False
        counts = []
        for without in (None, where):
            conflicts: list[Any] = []
            told = partial(_keep, conflicts)
            order = Order(told, told, without)
            order.graphs = self.order.graphs
            for step in self.steps:
                order.take(step)
            counts.append(len(conflicts))
        return counts[0] == counts[1]


def _keep(found: list[Any], *facts: Any) -> None:
    found.append(facts)


def _pinned_memory(item: torch.Tensor) -> Memory | None:
    """Return what is known of a tensor of the host that copies use."""
    if block_of(item) is not None or item.device.type != "cpu" or item.layout != torch.strided:
        return None
    return getattr(item.untyped_storage(), "memory_known", None)
