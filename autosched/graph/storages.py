"""Track the versions of values, and which values share a storage.

A tensor and its views share a storage. A write to one of them creates the next versions of all
values that see the region that changes; other values keep theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain

from autosched.graph.regions import Accesses, Frames, Region, RegionIndex
from autosched.graph.task import Use
from autosched.graph.value import Value

Touched = tuple[int, Region] | None  # an argument (value index), of which a task touches only this


class Storages:
    """The versions of ``values``, and the accesses to each storage.

    A storage is named by its root: the value (index) that all others in it are views of.
    """

    def __init__(self, values: list[Value]):
        self.values = values
        self.frames = Frames()
        self.current: list[Use] = []  # by value, its present version
        self.writer: dict[Use, int] = {}  # version -> the task whose write created it
        self.used: set[int] = set()  # values that are read or are outputs
        self.reshaped: dict[int, Region] = {}  # by value whose shape was changed, its region since
        self.members: dict[int, list[int]] = {}  # root -> the values in it, for roots with views
        # root -> the number of tasks that write a region of it by an index
        self.partial_writes: dict[int, int] = {}
        self._by_region: dict[int, RegionIndex[list[int]]] = {}  # members, for roots with views
        self._accesses: dict[int, Accesses] = {}  # by root

    def snapshot(self, values: list[Value]) -> Storages:
        """Return a copy for queries, which does not change when more tasks are added."""
        twin = copy.copy(self)
        twin.values = values
        twin.current = self.current.copy()
        twin.writer = self.writer.copy()
        twin.used = self.used.copy()
        twin.reshaped = self.reshaped.copy()
        twin.members = {root: members.copy() for root, members in self.members.items()}
        twin.partial_writes = self.partial_writes.copy()
        return twin

    def add(self, value: Value) -> None:
        """Add a new value, which may be a view."""
        self.values.append(value)
        self.current.append(Use(value.index, 0))
        root = value.root
        if root != value.index:
            self.members.setdefault(root, [root]).append(value.index)
            members = self._by_region.setdefault(root, RegionIndex())
            members.setdefault(self.values[root].region, [root])
            members.setdefault(value.region, []).append(value.index)

    def reshape(self, value: int) -> None:
        """Forget the coordinates of all values that share a storage, one of which is reshaped."""
        for member in self.members.get(self.values[value].root, (value,)):
            self.reshaped[member] = self.frames.reshaped(self.region(self.values[member]))

    def region(self, value: Value) -> Region:
        """Return the region of a value, with the coordinates that it has by now."""
        return self.reshaped.get(value.index, value.region)

    def access(
        self, task: int, reads: Iterable[Value], writes: Iterable[Value], touched: Touched
    ) -> tuple[list[int], list[int]]:
        """Add the accesses of a task.

        Return the tasks that made or wrote what it accesses, and those that read what it writes.
        """
        makers: list[int] = []
        readers: list[int] = []
        written = {value.index for value in writes}
        for value in reads:
            self.used.add(value.index)
            region = value.region
            if touched is not None and touched[0] == value.index:
                region = touched[1]
            accesses = self._accesses.get(value.root)
            if accesses is None:
                accesses = self._accesses[value.root] = Accesses()
            if value.producer is not None:
                makers.append(value.producer)
            if value.index in written:
                writers, disturbed = accesses.write(region, task)
                readers += disturbed
            else:
                writers = accesses.read(region, task)
            makers += writers
        return makers, readers

    def change(self, task: int, writes: Sequence[Value], touched: Touched) -> tuple[Use, ...]:
        """Advance the versions of all values that see what a task writes; return the old ones."""
        changed: set[int] = set()
        for value in writes:
            region = value.region
            if touched is not None and touched[0] == value.index:
                region = touched[1]
                self.partial_writes[value.root] = self.partial_writes.get(value.root, 0) + 1
            members = self._by_region.get(value.root)
            if members is None:
                changed.add(value.index)
            else:
                changed.update(chain.from_iterable(m for _, m in members.overlapping(region)))
        uses = tuple([self.current[index] for index in sorted(changed)])
        for index, version in uses:
            new = self.current[index] = Use(index, version + 1)
            self.writer[new] = task
        return uses
