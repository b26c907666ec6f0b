"""Decide which accesses to a block of memory must be ordered.

Two accesses conflict if one of them writes, and the parts of the block that they touch may have an
element in common. The graph says what a task touches; these rules say what follows from that. They
are not those of ``graph.regions``, which make the dependencies of a graph and the hazards of
lowering. So if one of the two is wrong, this proof and those programs differ, and that is found.

A part is given by bounds. Each has an axis, and says which coordinates on it belong to the part:
``first``, ``first + step``, and so on, below ``end``. An axis without a bound is not restricted.

    x[:4]       rows 0 1 2 3
    x[4:]       rows         4 5 6 7 ...       apart from the first: their rows are
    x[::2]      rows 0   2   4   6   ...
    x[1::2]     rows   1   3   5   7 ...       apart from the one above: their remainders are
    x[:, :2]    columns 0 1                    may meet each of these: no axis has bounds of both
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from autosched.graph.regions import Axis, Bounds, Region

Part = tuple[tuple[Axis, Bounds], ...]


@dataclass(eq=False, slots=True)
class _Touched:
    """A part of a block; the writes since which it was not overwritten as such, and the reads."""

    part: Part
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


class Conflicts:
    """The accesses to a block, as far as a later one may conflict with them directly.

    Accesses are numbers, in the order in which they are added. One that another has replaced is
    left out: both are of the same part, the other is a write, and what follows it follows both.

    >>> from autosched.graph.regions import Frames
    >>> frames, conflicts = Frames(), Conflicts()
    >>> x = frames.root()
    >>> conflicts.write(frames.item(x, 0), 7), conflicts.write(frames.item(x, 1), 8)
    (([], []), ([], []))
    >>> conflicts.read(x, 9), conflicts.write(x, 10), conflicts.read(x, 11)
    ([7, 8], ([7, 8], [9]), [10])
    """

    __slots__ = ("_parts", "_rows", "_wide")

    def __init__(self) -> None:
        self._parts: dict[Part, _Touched] = {}
        # By axis and coordinate, those whose first bound is that coordinate alone; and all others.
        self._rows: dict[Axis, dict[float, list[_Touched]]] = {}
        self._wide: list[_Touched] = []

    def writers(self, region: Region) -> list[int]:
        """Return the writes that an access to a region must follow."""
        return [who for touched in self._meeting(region.bounds) for who in touched.writers]

    def read(self, region: Region, who: int) -> list[int]:
        """Add a read; return the writes that it must follow."""
        writers = self.writers(region)
        self._of(region.bounds).readers.append(who)
        return writers

    def write(self, region: Region, who: int) -> tuple[list[int], list[int]]:
        """Add a write; return the writes and the reads that it must follow."""
        meeting = list(self._meeting(region.bounds))
        writers = [who for touched in meeting for who in touched.writers]
        readers = [who for touched in meeting for who in touched.readers]
        if not region.bounds:  # it replaces all others
            self._parts.clear()
            self._rows.clear()
            self._wide.clear()
        own = self._of(region.bounds)
        own.writers = [who]
        own.readers = []
        return writers, readers

    def _of(self, part: Part) -> _Touched:
        found = self._parts.get(part)
        if found is None:
            found = self._parts[part] = _Touched(part)
            axis, (first, end, _) = part[0] if part else _WHOLE
            if end - first == 1:
                self._rows.setdefault(axis, {}).setdefault(first, []).append(found)
            else:
                self._wide.append(found)
        return found

    def _meeting(self, part: Part) -> Iterator[_Touched]:
        """Yield the parts that may have an element in common with one."""
        bounds = dict(part)
        near = [self._wide]
        for axis, rows in self._rows.items():
            first, end, _ = bounds.get(axis, _WHOLE[1])
            if end - first < len(rows):  # few of the many rows of a tensor
                near += [rows[row] for row in range(int(first), int(end)) if row in rows]
            else:
                near += rows.values()
        for touched in chain.from_iterable(near):
            if not _apart(part, touched.part):
                yield touched


_WHOLE = (-1, -1, False), (-math.inf, math.inf, 1)


def _apart(one: Part, other: Part) -> bool:
    """Whether two parts have no element in common, whatever the shape of the tensor is."""
    bounds = dict(other)
    for axis, (first, end, step) in one:
        if axis not in bounds:
            continue
        begin, stop, stride = bounds[axis]
        if end <= begin or stop <= first:
            return True
        common = math.gcd(step, stride)
        if common > 1 and first % common != begin % common:
            return True
    return False
