"""Track which versions of values are on which devices, in issue order.

A write replaces a version by the next one. Tasks that write disjoint regions of a value may run in
another order than that of its versions; then the value keeps its version until the missing writes
have happened. ``Buffers`` walks a whole program, for all that read one. Passes that insert copies
use the table directly, and ``verify`` has a traversal of its own on purpose.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from autosched.program.program import Copy, Free, Instruction, Receive, Record, Run, Wait

if TYPE_CHECKING:
    from autosched.graph.graph import Graph, Task
    from autosched.graph.regions import Region

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")

_NOWHERE: Mapping[str, Any] = {}


class Residency(Generic[Name, Item]):
    """A table of items by value, version and device; its callers choose what an item is.

    >>> table = Residency()
    >>> table.put("x", 0, "cpu", "memory")
    >>> table.change("x", 1, "cpu"), table.get("x", 0, "cpu"), table.held("x", "cpu")
    (None, None, 'memory')
    >>> table.change("x", 0, "cpu"), table.get("x", 2, "cpu"), table.devices("x", 2)
    (2, 'memory', ['cpu'])
    """

    def __init__(self) -> None:
        # By version, then by device, in the order in which they received it.
        self.items: dict[tuple[Name, int], dict[str, Item]] = {}
        self._latest: dict[tuple[Name, str], int] = {}  # if it is not 0
        self._early: dict[tuple[Name, str], set[int]] = {}  # versions written before their turn

    def put(self, value: Name, version: int, device: str, item: Item) -> None:
        """Store an item for a version of a value that is on a device now."""
        devices = self.items.get((value, version))
        if devices is None:
            self.items[value, version] = {device: item}
        else:
            devices[device] = item
        if version or self._latest:
            self._latest[value, device] = version
            self._early.pop((value, device), None)

    def get(self, value: Name, version: int, device: str) -> Item | None:
        """Return the item of a version on a device; None unless all its regions are there."""
        if self._early and (value, device) in self._early:
            return None
        return self.items.get((value, version), _NOWHERE).get(device)

    def held(self, value: Name, device: str) -> Item | None:
        """Return the item of a value on a device in any version; None if it is not there."""
        version = self._latest.get((value, device), 0)
        return self.items.get((value, version), _NOWHERE).get(device)

    def drop(self, value: Name, version: int, device: str) -> None:
        """Remove this version from this device."""
        self.items.get((value, version), {}).pop(device, None)

    def change(self, value: Name, version: int, device: str) -> int | None:
        """Apply a write to this version; return the new version, or None if it is not due yet."""
        if device not in self.items.get((value, version), {}):
            self._early.setdefault((value, device), set()).add(version)
            return None
        item = self.items[value, version].pop(device)
        early = self._early.get((value, device), set())
        version += 1
        while version in early:
            early.remove(version)
            version += 1
        if not early:
            self._early.pop((value, device), None)
        self.items.setdefault((value, version), {})[device] = item
        self._latest[value, device] = version
        return version

    def devices(self, value: Name, version: int) -> list[str]:
        """Return the devices that hold this version, in the order in which they received it."""
        return list(self.items.get((value, version), ()))


@dataclass(eq=False, slots=True)
class Buffer:
    """A value (an index) on a device; an in-place write leaves the next version in it."""

    value: int
    version: int
    device: str
    maker: int  # position of the run or copy that made it; -1 if present from the start
    base: Buffer | None = None  # the buffer whose memory it shares

    @property
    def block(self) -> Buffer:
        """The buffer that was allocated with this memory: itself, unless it is a view."""
        return self.base or self


class Step(NamedTuple):
    """A run, copy (or half of one) or free, its position, and the buffers that it uses."""

    at: int
    instruction: Instruction
    task: Task | None  # of a run
    reads: Sequence[Buffer]  # arguments, source of a copy or send, or what is freed
    made: Sequence[Buffer | None]  # results; None for a result that nothing uses


class Buffers:
    """The buffers of a graph while a program is walked; ``homes`` has devices of its sources.

    With ``values`` (indices), those of others are left out.
    """

    def __init__(
        self, graph: Graph, homes: Mapping[int, str], values: Container[int] | None = None
    ):
        self.graph = graph
        self._values = range(len(graph.values)) if values is None else values
        self._table: Residency[int, Buffer] = Residency()
        self.sources = {value: self._new(value, 0, home, -1) for value, home in homes.items()}

    def walk(self, instructions: Iterable[Instruction]) -> Iterator[Step]:
        """Yield the steps of runs, copies, sends, receives and frees in issue order."""
        for i, instruction in enumerate(instructions):
            if isinstance(instruction, (Record, Wait)):
                continue
            device = instruction.stream.device
            if isinstance(instruction, Run):
                task = self.graph.task(instruction.task)
                yield Step(i, instruction, task, *self._run(i, task, device))
                continue
            value = self.graph.value(instruction.value).index
            if value not in self._values:
                continue
            version = instruction.version
            reads: list[Buffer] = []
            made: list[Buffer | None] = []
            if not isinstance(instruction, Receive):
                source = instruction.source if isinstance(instruction, Copy) else device
                reads = [self.find(value, version, source)]
            if isinstance(instruction, (Copy, Receive)):
                target = instruction.destination if isinstance(instruction, Copy) else device
                made = [self._put(i, value, version, target, instruction.overwrite)]
            yield Step(i, instruction, None, reads, made)

    def accesses(self, step: Step) -> Iterator[tuple[Buffer, Region, bool]]:
        """Yield what a run, a copy or a half of one accesses: a part of a buffer, and if it writes."""
        values = self.graph.values
        task = step.task
        if task is not None:
            written = [use.value for use in task.writes]
            for buffer in step.reads:
                region = values[buffer.value].region
                if task.region is not None:
                    region = self.graph.touched(task, buffer.value) or region
                yield buffer, region, buffer.value in written
        elif not isinstance(step.instruction, Free):
            for source in step.reads:
                yield source, values[source.value].region, False
            if isinstance(step.instruction, (Copy, Receive)) and step.instruction.overwrite:
                (target,) = step.made
                assert target is not None
                yield target, values[target.value].region, True

    def find(self, value: int, version: int, device: str) -> Buffer:
        """Return the buffer of a version on a device, which must be there."""
        found = self._table.get(value, version, device)
        assert found is not None, f"{self.graph.values[value].name}@{version} is not on {device}"
        return found

    def _new(
        self, value: int, version: int, device: str, maker: int, base: Buffer | None = None
    ) -> Buffer:
        buffer = Buffer(value, version, device, maker, base)
        self._table.put(value, version, device, buffer)
        return buffer

    def _run(self, i: int, task: Task, device: str) -> tuple[list[Buffer], list[Buffer | None]]:
        graph = self.graph
        # 1. Find the arguments; any version will do for a task that touches only a region.
        reads = [
            self._argument(task, value, version, device)
            for value, version in task.reads
            if value in self._values
        ]
        # 2. Advance the versions of what it writes.
        for value, version in task.changes:
            new = self._table.change(value, version, device)
            changed = self._table.held(value, device)
            if new is not None and changed is not None:
                changed.version = new
        # 3. Add the results; a view shares the block of the argument with the same root.
        made: list[Buffer | None] = []
        for value, version in task.outputs:
            if value not in self._values:
                continue
            if not graph.is_used(value):
                made.append(None)
                continue
            base = None
            root = graph.values[value].root
            if root != value:
                base = next(b.block for b in reads if graph.values[b.value].root == root)
            made.append(self._new(value, version, device, i, base))
        return reads, made

    def _argument(self, task: Task, value: int, version: int, device: str) -> Buffer:
        """Return the buffer of an argument."""
        found = None
        if task.region is not None and self.graph.touched(task, value) is not None:
            found = self._table.held(value, device)
        return found or self.find(value, version, device)

    def _put(self, i: int, value: int, version: int, device: str, overwrite: bool) -> Buffer:
        if not overwrite:
            return self._new(value, version, device, i)
        home = self.sources[value]
        home.version = version
        home.maker = i
        self._table.put(value, version, device, home)
        return home
