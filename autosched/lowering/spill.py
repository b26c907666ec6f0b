"""Insert copies and spills where memory is limited.

Copies are as late as possible, and values that do not fit are spilled until they are needed again.
In issue order no device holds more than its limit. Where a block does not fit, blocks are evicted
in this order:

1. Blocks that nothing reads any more, the least recently used first.
2. By Belady's rule, blocks whose next read is latest. They are spilled to the host, or to another
   device with room, unless another device holds a copy already.

A spilled block is reloaded immediately before its next use, or earlier if memory is free. What is
recomputed is decided before, in the graph. What was read from a file is not spilled: storage still
has it, and it is read again. Nothing is spilled to storage. Memory that is written in parts is never
moved. Copies to devices without a limit are prefetched in the same way, where memory is always free.

Each free that makes room is in the program. ``hazards`` finds what must happen after it. Belady's
rule (IBM Systems Journal 5, 1966) needs to know the next reads of values while runs are walked;
their positions are those of runs in issue order, and a value that is needed at the end has a next
use at ``len(runs)``. This module knows the bytes of values and no times.

A device has room for two blocks, and its runs read these values of one block each:

    run             1       2       3                       4       5
    reads           a       b       c                       a       b
    in memory       a .     a b     a c                     a c     a b
    before it       copy a  copy b  spill b, copy c                 free c, reload b

Before run 3 one of a and b must go. The next read of a is at 4, that of b at 5, so b goes to the host.
After run 3 nothing reads c, so c is the first to go, and nothing needs to be copied for that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

from autosched._lib.allowed import is_storage
from autosched.errors import MemoryLimitError
from autosched.graph.graph import Graph, Task, Use
from autosched.lowering.copies import CopyMaker, missing
from autosched.lowering.hazards import owner_of
from autosched.problem import Problem
from autosched.program.program import Copy, Free, Run, Stream
from autosched.program.residency import Residency


class Future:
    """The remaining reads of each version by device, and all uses of memory written by regions."""

    def __init__(
        self, graph: Graph, tasks: Sequence[Task], runs: Sequence[Run], outputs: Mapping[str, str]
    ):
        self.graph = graph
        self.reads: dict[Use, dict[str, deque[int]]] = {}
        self.touches: dict[tuple[int, str], deque[int]] = {}  # by root and device
        self.runs: dict[str, deque[Task]] = {}  # by device
        self.anywhere: set[Use] = set()  # outputs that may be on any device at the end
        self.partial = {
            value.root
            for value in graph.values
            if graph.in_parts(value.index)
            and any(map(graph.last_version, graph.members(value.index)))
        }
        for i, (task, run) in enumerate(zip(tasks, runs, strict=True)):
            self._add(i, task, run.stream.device)
        for label, index in graph.outputs.items():
            use = Use(index, graph.last_version(index))
            if label in outputs:
                self.reads.setdefault(use, {}).setdefault(outputs[label], deque()).append(len(runs))
            else:
                self.anywhere.add(use)

    def _add(self, i: int, task: Task, device: str) -> None:
        self.runs.setdefault(device, deque()).append(task)
        for use in self.needs(task):
            self.reads.setdefault(use, {}).setdefault(device, deque()).append(i)
        for root in self._roots(task):
            if root in self.partial:
                self.touches.setdefault((root, device), deque()).append(i)

    def needs(self, task: Task) -> Iterator[Use]:
        """Yield the versions that a task needs; any will do of memory written by regions."""
        for use in task.reads:
            if self.graph.touched(task, use.value) is None:
                yield use
            elif self.graph.values[use.value].root not in self.partial:
                yield Use(use.value, 0)

    def done(self, task: Task, device: str) -> None:
        """Remove the reads of a task that has been issued on its device."""
        self.runs[device].popleft()
        for use in self.needs(task):
            self.reads[use][device].popleft()
        for root in self._roots(task):
            touches = self.touches.get((root, device))
            if touches:
                touches.popleft()

    def _roots(self, task: Task) -> dict[int, None]:
        return dict.fromkeys(
            self.graph.values[use.value].root for use in (*task.reads, *task.outputs)
        )

    def next_read(self, use: Use, device: str) -> float:
        """Return when a device reads a version next; infinity if it does not."""
        positions = self.reads.get(use, {}).get(device)
        return positions[0] if positions else math.inf

    def next_touch(self, root: int, device: str) -> float:
        """Return when a device next touches memory written by regions; infinity if it does not."""
        positions = self.touches.get((root, device))
        return positions[0] if positions else math.inf

    def readers(self, use: Use) -> list[str]:
        """Return the devices that still read a version."""
        return [device for device, positions in self.reads.get(use, {}).items() if positions]


_AHEAD = 32  # number of runs of a device whose reads are prefetched
_MOST_NAMED = 8


@dataclass(eq=False, slots=True)
class _Block:
    """Memory on one device; ``holds`` has the versions of the values that are in it."""

    device: str
    nbytes: float
    owner: Stream | None  # frees it; None until a stream of its device uses it
    holds: dict[int, int] = field(default_factory=dict)
    users: set[Stream] = field(default_factory=set)
    next_use: float = -1.0  # the next run that reads it there; infinity if none does
    kept: bool = False


def spill_copies(
    problem: Problem, tasks: Sequence[Task], runs: Sequence[Run]
) -> tuple[list[Run | Copy | Free], dict[str, str]]:
    """Return the runs with copies and frees inserted, and the final device of each output.

    ``tasks`` are those of the runs, in the same order. Raises ScheduleError if something does not
    fit, naming the blocks that are in use.
    """
    outputs = problem.constraints.outputs
    walk = _Walk(problem, Future(problem.graph, tasks, runs, outputs))
    for device in problem.devices:
        walk.prefetch(device)
    for task, run in zip(tasks, runs, strict=True):
        walk.run(task, run)
    return walk.result, walk.end(outputs)


class _Walk:
    """The blocks on each device, while runs are walked in issue order."""

    def __init__(self, problem: Problem, future: Future):
        self.graph = problem.graph
        self.machine = machine = problem.machine
        self.future = future
        self.nbytes = [problem.costs.value_nbytes(value) for value in self.graph.values]
        self.result: list[Run | Copy | Free] = []
        self.limit = {device.name: device.nbytes for device in machine.devices}
        self.held = dict.fromkeys(machine.names, 0.0)
        self.blocks: dict[str, dict[_Block, None]] = {name: {} for name in machine.names}
        self.table: Residency[int, _Block] = Residency()
        # Blocks without a next use on their device.
        self.idle: dict[str, dict[_Block, None]] = {name: {} for name in machine.names}
        self.idle_bytes = dict.fromkeys(machine.names, 0.0)
        self.busy: set[_Block] = set()  # blocks that the current run needs, never evicted
        self.maker = CopyMaker(problem)
        for value, device in self.maker.home.items():
            self._put(Use(value, 0), device, None).kept = True
        for device, held in self.held.items():
            if held > self.limit[device]:
                self._fail(device, 0.0, "more")

    # ---- runs and outputs

    def run(self, task: Task, run: Run) -> None:
        """Copy what a run reads, make room for its results, and issue it."""
        device = run.stream.device
        self.busy = set()
        # 1. Copy what the task reads, and make room for its results.
        lacking = missing(self.table, self.graph, task, device)
        lacked = {use.value for use in lacking}
        there = [use for use in task.reads if use.value not in lacked]
        self.busy.update(self._argument(task, use, device) for use in there)
        for use in lacking:
            self.busy.add(self._bring(use, device, f"for task {task.name!r}"))
        made = [use for use in task.outputs if self._takes_memory(use)]
        self._make_room(
            device,
            sum(self.nbytes[use.value] for use in made),
            f"for what task {task.name!r} makes",
        )
        # 2. Issue the run, and advance the versions that it writes and makes.
        self.result.append(run)
        blocks: dict[int, _Block] = {}
        for use in reversed(task.reads):
            block = self._argument(task, use, device)
            self._use(block, run.stream)
            blocks[self.graph.values[use.value].root] = block
        changed = list(self._change(task, device))
        for use in task.outputs:
            if self._takes_memory(use):
                blocks[use.value] = self._put(use, device, run.stream)
            elif self.graph.is_used(use.value):
                self._share(use, blocks[self.graph.values[use.value].root])
        self.future.done(task, device)
        self.busy = set()
        for block in dict.fromkeys(blocks.values()):
            self._update_next_use(block)
        # 3. Copy the new versions back to the caller.
        self._copy_back(changed, device)
        # 4. Free blocks that are dead already, if only their owner's stream has used them.
        #    So no stream has to wait for these frees.
        for block in dict.fromkeys(blocks.values()) if self.limit[device] < math.inf else ():
            if block.users <= {block.owner} and self._is_dead(block):
                self._free(block)
        # 5. Prefetch for the devices that may now copy more.
        left = [*changed, *(use for use in task.outputs if self.graph.is_used(use.value))]
        readers = (reader for use in left for reader in self.future.readers(use))
        for reader in dict.fromkeys([device, *readers]):
            self.prefetch(reader)

    def end(self, outputs: Mapping[str, str]) -> dict[str, str]:
        """Copy outputs to the devices where they are wanted, and return where each is."""
        places: dict[str, str] = {}
        self.busy = set()
        uses = {
            label: Use(index, self.graph.last_version(index))
            for label, index in self.graph.outputs.items()
        }
        for label, use in uses.items():
            found = self.table.get(*use, outputs[label]) if label in outputs else None
            if found is not None:
                self.busy.add(found)

        def may_leave(label: str) -> bool:
            """Whether an output is in memory, and may be on any device."""
            held = not all(map(is_storage, self.table.devices(*uses[label])))
            return held and label not in outputs

        # What may leave comes last, for it may have to. What was placed stays.
        for label in sorted(uses, key=may_leave):
            use = uses[label]
            holders = self.table.devices(*use)
            places[label] = device = outputs.get(label) or self.maker.origin(use, holders)
            if device not in holders:
                self._bring(use, device, f"for output {label!r}")
            block = self.table.get(*use, device)
            assert block is not None
            self.busy.add(block)
        return {label: places[label] for label in uses}

    def prefetch(self, device: str) -> None:
        """Copy what the next runs of a device read, as far as it fits without eviction."""
        need = 0.0  # bytes that those runs read and their device lacks
        expected: set[Use] = set()
        for task in islice(self.future.runs.get(device, ()), _AHEAD):
            for use in self.future.needs(task):
                holders = self.table.devices(*use)
                if device in holders or use in expected:
                    continue
                expected.add(use)
                if not holders:
                    need += self.nbytes[use.value]
                elif not self._prefetched(use, device, need + self.nbytes[use.value]):
                    return
            made = [use for use in task.outputs if self._takes_memory(use)]
            expected.update(
                task.outputs, (Use(value, version + 1) for value, version in task.changes)
            )
            need += sum(self.nbytes[use.value] for use in made)

    def _prefetched(self, use: Use, device: str, nbytes: float) -> bool:
        """Copy a version to a device if this many bytes are free there; return whether it did."""
        if not self._reclaim(device, nbytes):
            return False
        for stop in self.maker.stops(self.table.devices(*use), device):
            if not self._reclaim(stop, self.nbytes[use.value]):
                return False
            self._copy(use, stop)
        self._copy(use, device)
        return True

    def _takes_memory(self, use: Use) -> bool:
        return self.graph.values[use.value].root == use.value and self.graph.is_used(use.value)

    def _argument(self, task: Task, use: Use, device: str) -> _Block:
        """Return the block of an argument; any version will do where a task touches a region."""
        if self.graph.touched(task, use.value) is None:
            block = self.table.get(*use, device)
        else:
            block = self.table.held(use.value, device)
        assert block is not None
        return block

    def _use(self, block: _Block, stream: Stream) -> None:
        if block.owner is None and stream.device == block.device:
            block.owner = stream
        block.users.add(stream)

    def _change(self, task: Task, device: str) -> Iterator[Use]:
        """Advance the versions that a task writes; yield the resulting ones."""
        for value, version in task.changes:
            new = self.table.change(value, version, device)
            block = self.table.held(value, device)
            if new is not None and block is not None:
                block.holds[value] = new
                yield Use(value, new)

    def _copy_back(self, changed: Sequence[Use], device: str) -> None:
        for use in changed:
            where = self.maker.home.get(use.value, device)
            if where != device and use.version == self.graph.last_version(use.value):
                self._bring(use, where, f"for {self.graph.values[use.value].name!r}")

    # ---- copies

    def _bring(self, use: Use, device: str, why: str) -> _Block:
        for stop in self.maker.stops(self.table.devices(*use), device):
            self.busy.add(self._bring(use, stop, why))
        overwrites = self.maker.overwrites(use, device)
        self._make_room(device, 0.0 if overwrites else self.nbytes[use.value], why)
        return self._copy(use, device)

    def _copy(self, use: Use, device: str) -> _Block:
        copy = self.maker.copy(use, self.table.devices(*use), device)
        stream = copy.stream
        read = self.table.get(*use, copy.source)
        assert read is not None
        self.result.append(copy)
        self._use(read, stream)
        if not copy.overwrite:
            return self._put(use, device, owner_of(copy), stream)
        block = self.table.held(self.graph.values[use.value].root, device)
        assert block is not None
        self.table.drop(use.value, block.holds[use.value], device)
        self._share(use, block)
        return block

    # ---- blocks

    def _put(
        self, use: Use, device: str, owner: Stream | None, user: Stream | None = None
    ) -> _Block:
        block = _Block(device, self.nbytes[use.value], owner)
        self.held[device] += block.nbytes
        self.blocks[device][block] = None
        self._share(use, block)
        if stream := owner or user:
            self._use(block, stream)
        self._update_next_use(block)
        return block

    def _update_next_use(self, block: _Block) -> None:
        """Update when a block is used next, which changes only after a run of its device."""
        block.next_use = self._next_use(block)
        idle = self.idle[block.device]
        held = self._is_partial(block) or block.next_use == math.inf
        if not block.kept and held != (block in idle):
            self.idle_bytes[block.device] += block.nbytes if held else -block.nbytes
            if held:
                idle[block] = None
            else:
                del idle[block]

    def _share(self, use: Use, block: _Block) -> None:
        block.holds[use.value] = use.version
        self.table.put(*use, block.device, block)

    def _free(self, block: _Block) -> None:
        """Free a block, which must be dead or copied elsewhere."""
        value, version = next(iter(block.holds.items()))
        owner = block.owner or Stream(block.device, "compute")
        self.result.append(Free(owner, self.graph.values[value].name, version))
        for use in block.holds.items():
            self.table.drop(*use, block.device)
        del self.blocks[block.device][block]
        if block in self.idle[block.device]:
            del self.idle[block.device][block]
            self.idle_bytes[block.device] -= block.nbytes
        self.held[block.device] -= block.nbytes

    # ---- room

    def _make_room(self, device: str, nbytes: float, why: str) -> None:
        """Free or spill blocks until a new one fits. Raises ScheduleError if that is not enough."""
        while not self._reclaim(device, nbytes):
            blocks = sorted(self.blocks[device], key=lambda block: block.next_use, reverse=True)
            if not any(self._is_movable(block) and self._spill(block) for block in blocks):
                self._fail(device, nbytes, why)

    def _reclaim(self, device: str, nbytes: float) -> bool:
        """Free dead blocks, the oldest first, if they give enough room; return whether they do."""
        missing = self.held[device] + nbytes - self.limit[device]
        if missing <= 0:
            return True
        if missing > self.idle_bytes[device]:
            return False
        found: list[_Block] = []
        for block in filter(self._is_dead, self.idle[device]):
            found.append(block)
            missing -= block.nbytes
            if missing <= 0:
                for dead in found:
                    self._free(dead)
                return True
        return False

    def _is_dead(self, block: _Block) -> bool:
        """Whether a block is no longer needed, also not as the source of a copy."""
        if block.kept or block in self.busy or not self._is_whole(block):
            return False
        if (self._next_use(block) if self._is_partial(block) else block.next_use) < math.inf:
            return False
        return all(len(self.table.devices(*use)) > 1 for use in self._live(block))

    def _is_whole(self, block: _Block) -> bool:
        """Whether a block holds its versions with all their parts."""
        return all(
            self.table.get(value, version, block.device) is block
            for value, version in block.holds.items()
        )

    def _is_movable(self, block: _Block) -> bool:
        evictable = not block.kept and block not in self.busy
        return evictable and not self._is_partial(block) and self._is_whole(block)

    def _is_partial(self, block: _Block) -> bool:
        return self._root(block) in self.future.partial

    def _root(self, block: _Block) -> int:
        return self.graph.values[next(iter(block.holds))].root

    def _next_use(self, block: _Block) -> float:
        """Return when a block is next used on its device."""
        reads = [self.future.next_read(Use(*use), block.device) for use in block.holds.items()]
        return min(*reads, self.future.next_touch(self._root(block), block.device))

    def _live(self, block: _Block) -> list[Use]:
        """Return the versions in a block that are still read or are outputs.

        They are read on this device, or on one that does not hold them yet.
        """
        found: list[Use] = []
        for use in map(Use._make, block.holds.items()):
            others = set(self.table.devices(*use)) - {block.device}
            if use in self.future.anywhere or not others.issuperset(self.future.readers(use)):
                found.append(use)
        return found

    def _spill(self, block: _Block) -> bool:
        """Spill a block: copy out what no other device holds, and free it. Return success."""
        out = [use for use in self._live(block) if len(self.table.devices(*use)) == 1]
        need = sum(self.nbytes[use.value] for use in out)
        target = self._spill_target(block.device, need) if out else block.device
        if target is None:
            return False
        for use in out:
            self._copy(use, target)
        self._free(block)
        return True

    def _spill_target(self, device: str, nbytes: float) -> str | None:
        """Return a device with room that a link joins with this one; the host if possible."""
        for other in dict.fromkeys([self.machine.host, *self.machine.computing]):
            if self.machine.link(device, other) and self._reclaim(other, nbytes):
                return other
        return None

    def _fail(self, device: str, nbytes: float, why: str) -> NoReturn:
        blocks = sorted(self.blocks[device], key=lambda block: -block.nbytes)
        names = [self.graph.values[next(iter(block.holds))].name for block in blocks]
        sizes = [
            f"{name!r} ({block.nbytes:,.0f} B)" for name, block in zip(names, blocks, strict=True)
        ]
        more = f" and {len(sizes) - _MOST_NAMED} more" if len(sizes) > _MOST_NAMED else ""
        raise MemoryLimitError(
            f"device {device!r} has {self.limit[device]:,.0f} B of memory, "
            f"holds {self.held[device]:,.0f} B that cannot leave "
            f"({', '.join(sizes[:_MOST_NAMED])}{more}), and needs {nbytes:,.0f} B {why}. "
            f"No schedule was found, which proves nothing"
        )
