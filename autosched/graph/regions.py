"""Determine which elements of a storage a view covers.

A *region* is a set of elements of a storage. A graph knows no shapes, so regions are described by
coordinates, not by bytes. Each dimension of a tensor gives an element two coordinates: its distance
from the front, and its (negative) distance from the end. ``x[2:5]`` bounds the first, ``x[-3:]``
the second. Two regions with disjoint bounds in a common coordinate have no element in common, for
every shape:

    x[:4]  and  x[4:]        disjoint, by rows from the front
    x[1:-1]  and  x[-1]      disjoint, by rows from the end
    x[:, :2]  and  x.t()[2:] disjoint, by columns
    x[:4]  and  x[-4:]       perhaps disjoint, so they are assumed to overlap

A view whose elements cannot be derived (``view``, ``T``, the pieces of ``chunk``) has a coordinate
frame of its own, within the region of the view that it was made from. A view whose elements may
overlap each other (``expand``) has no coordinates. ``as_strided`` may cover the whole storage.

Lowering and ``verify`` ask about the same regions. Hypothesis tests compare the answers with the
strides of real tensors: regions that overlap are never reported as disjoint.

This module knows torch functions by name, and no graph.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Generic, NamedTuple, TypeVar

from autosched._lib.tree import flatten

Axis = tuple[int, int, bool]  # frame, dimension, whether counted from the end
Bounds = tuple[float, float, int]  # first, end (exclusive), step


class _Dimension(NamedTuple):
    """The coordinates of a dimension: element i is at ``offset + step * i`` on axis ``front``.

    Counted from the end, element -i is at ``back_offset - i`` on ``back``.
    """

    front: Axis
    offset: float
    step: int
    back: Axis
    back_offset: float


@dataclass(frozen=True, slots=True)
class Region:
    """A set of elements of a storage, by bounds; and the coordinates of the view that sees them.

    >>> frames = Frames()
    >>> x = frames.root()
    >>> upper, lower, last = (frames.item(x, key) for key in (slice(4), slice(4, None), -1))
    >>> upper.overlaps(lower), lower.overlaps(last), x.covers(lower), lower.covers(x)
    (False, True, True, False)
    """

    bounds: tuple[tuple[Axis, Bounds], ...] = ()
    frame: int = field(default=-1, compare=False)  # -1: no coordinates
    lead: tuple[_Dimension, ...] = field(default=(), compare=False)  # the first dimensions
    # The further dimensions are those of this frame, from this number on.
    tail: tuple[int, int] = field(default=(-1, 0), compare=False)

    def overlaps(self, other: Region) -> bool:
        """Whether the two regions may have an element in common."""
        if not self.bounds or not other.bounds:
            return True
        theirs = dict(other.bounds)
        return not any(
            axis in theirs and _disjoint(bounds, theirs[axis]) for axis, bounds in self.bounds
        )

    def covers(self, other: Region) -> bool:
        """Whether this region overlaps all that the other does: it has no other bounds."""
        theirs = dict(other.bounds)
        return all(axis in theirs and _within(theirs[axis], bounds) for axis, bounds in self.bounds)

    def renumbered(self, frame: Callable[[int], int]) -> Region:
        """Return the same elements with other numbers of frames."""

        def moved(axis: Axis) -> Axis:
            return frame(axis[0]), axis[1], axis[2]

        bounds = tuple(sorted((moved(axis), bound) for axis, bound in self.bounds))
        lead = tuple([d._replace(front=moved(d.front), back=moved(d.back)) for d in self.lead])
        return Region(bounds, frame(self.frame), lead, (frame(self.tail[0]), self.tail[1]))

    def dimension(self, number: int) -> _Dimension:
        """Return a dimension; negative numbers count from the last."""
        if 0 <= number < len(self.lead):
            return self.lead[number]
        frame, shift = self.tail if number >= 0 else (self.frame, 0)
        return _dimension(frame, number + shift)


def _dimension(frame: int, number: int) -> _Dimension:
    return _Dimension((frame, number, False), 0, 1, (frame, number, True), 0)


def _disjoint(a: Bounds, b: Bounds) -> bool:
    step = math.gcd(a[2], b[2])
    return max(a[0], b[0]) >= min(a[1], b[1]) or (step > 1 and (a[0] - b[0]) % step != 0)


def _within(inner: Bounds, outer: Bounds) -> bool:
    steps = outer[2] == 1 or (inner[2] % outer[2] == 0 and (inner[0] - outer[0]) % outer[2] == 0)
    return inner[0] >= outer[0] and inner[1] <= outer[1] and steps


_OPAQUE = frozenset("broadcast_to expand expand_as unfold".split())
_SAME = frozenset("alias detach".split())
_PIECES = frozenset(
    "chunk dsplit hsplit split split_with_sizes tensor_split unbind unsafe_chunk vsplit".split()
)
# These split at indices, which need not be increasing.
_SPLITS_AT = frozenset("dsplit hsplit tensor_split vsplit".split())


class Frames:
    """The coordinate frames of one graph; the same view made twice has one frame."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._count = 0

    def root(self) -> Region:
        """Return the whole of a new storage."""
        return self._framed((), self._new())

    def opaque(self, base: Region) -> Region:
        """Return an unknown region within ``base``."""
        return Region(base.bounds)

    def reshaped(self, region: Region) -> Region:
        """Return the same region after its dimensions were changed in place."""
        frame = self._new()
        return region if region.frame < 0 else self._framed(region.bounds, frame)

    def view(
        self, base: Region, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Region:
        """Return the region that a view of ``base`` sees, made by a torch function."""
        if name == "as_strided":
            return Region()  # relative to the storage, not to the base
        if base.frame < 0 or name in _OPAQUE:
            return self.opaque(base)
        numbers = all(isinstance(item, int) for item in (*args, *kwargs.values()))
        if name in _SPLITS_AT and not numbers:
            return self.opaque(base)
        match name, args:
            case (("getitem" | "__getitem__"), [key]) if is_basic(key):
                return self.item(base, key)
            case "select", [int(number), int(key)]:
                return self._along(base, number, key)
            case "narrow", [int(number), int(start), int(length)] if start >= 0:
                return self._along(base, number, slice(start, start + length))
            case "slice", [int(number), start, stop, *step]:  # the ATen operator
                return self._along(base, number, slice(start, stop, *step))
            case (("transpose" | "swapaxes" | "swapdims"), [int(a), int(b)]) if min(a, b) >= 0:
                return self._swapped(base, a, b)
            case "t", []:
                return self._swapped(base, 0, 1)  # a single dimension then has the number 1
        if name in _SAME:
            return base
        return self._framed(base.bounds, self._frame((base.frame, name, _key((args, kwargs)))))

    def pieces(self, whole: Region, name: str, count: int) -> list[Region]:
        """Return the regions of the results of a function that splits ``whole``."""
        return [
            self.item(whole, i) if name in _PIECES else self.opaque(whole) for i in range(count)
        ]

    def item(self, base: Region, key: Any) -> Region:
        """Return the region that ``tensor[key]`` sees, for a basic index.

        1. Up to an ellipsis, keys narrow the first dimensions, counted from the first. Each
           integer removes one, each None inserts one; the remaining ones form the new lead.
        2. Keys after an ellipsis narrow the last dimensions, counted from the last.
        3. Dimensions without a key keep their coordinates. After an ellipsis, their number is
           unknown, so they get the new frame.
        4. An empty region is treated as its base, because its readers still read the shape.
        """
        if base.frame < 0:
            return base
        keys = list(key) if isinstance(key, tuple) else [key]
        keys = [int(k) if isinstance(k, Integral) else k for k in keys]
        new = self._frame((base.frame, "getitem", _key(keys)))
        bounds = dict(base.bounds)
        lead = list[_Dimension]()
        # 1. Keys before an ellipsis.
        number = 0
        while keys and keys[0] is not ...:
            first = keys.pop(0)
            dimension = _dimension(new, len(lead))
            if first is not None:
                rest = _narrowed(bounds, base.dimension(number), first, dimension)
                number += 1
                if rest is None:
                    continue
                dimension = rest
            lead.append(dimension)
        # 2. Keys after an ellipsis; a second ellipsis makes their dimensions unknown.
        last = [k for k in keys[1:] if k is not None]
        for from_end, k in enumerate(reversed(last if ... not in last else []), 1):
            dimension = base.dimension(-from_end)
            _narrowed(bounds, dimension, k, dimension)
        # 3. Dimensions without a key.
        tail = new, 0
        if not keys:
            tail = base.tail[0], base.tail[1] + number - len(lead)
            lead += base.lead[number:]
        # 4. An empty region.
        if any(low >= high for low, high, _ in bounds.values()):
            bounds = dict(base.bounds)
        return Region(tuple(sorted(bounds.items())), new, tuple(lead), tail)

    def imported(self, owner: object, frame: int) -> int:
        """Return the frame for one of another graph; ``owner`` identifies that graph."""
        return self._frame((owner, frame))

    def _along(self, base: Region, number: int, key: Any) -> Region:
        if number >= 0:
            return self.item(base, (slice(None),) * number + (key,))
        return self.item(base, (..., key) + (slice(None),) * (-number - 1))

    def _swapped(self, base: Region, a: int, b: int) -> Region:
        lead = [base.dimension(number) for number in range(max(a, b, len(base.lead) - 1) + 1)]
        lead[a], lead[b] = lead[b], lead[a]
        frame = self._frame((base.frame, "transpose", a, b))
        return Region(base.bounds, frame, tuple(lead), base.tail)

    def _framed(self, bounds: tuple[tuple[Axis, Bounds], ...], frame: int) -> Region:
        return Region(bounds, frame, (), (frame, 0))

    def _frame(self, key: Any) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new()
        return found

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def is_basic(key: Any) -> bool:
    """Whether an index makes a view; masks and tensors of numbers make a copy."""
    if isinstance(key, tuple):
        return all(is_basic(item) and not isinstance(item, tuple) for item in key)
    if isinstance(key, Integral):
        return not isinstance(key, bool)
    return key is None or key is ... or isinstance(key, slice)


def _narrowed(
    bounds: dict[Axis, Bounds], old: _Dimension, key: Any, fresh: _Dimension
) -> _Dimension | None:
    """Add the bounds of an integer or slice in a dimension; return the rest of it, if any.

    1. An integer bounds one axis to one element, and removes the dimension.
    2. A slice bounds the front axis where it counts from the front, and the back axis where it
       counts from the end.
    3. The rest keeps the axis in which its first (or last) element is known; ``fresh`` has new
       axes for the others.
    """
    # 1. An integer.
    if isinstance(key, int):
        first = old.offset + old.step * key if key >= 0 else old.back_offset + key
        _bound(bounds, old.front if key >= 0 else old.back, (first, first + 1, 1))
        return None
    start = key.start
    stop = key.stop
    step = 1 if key.step is None else key.step
    if not all(isinstance(item, int) for item in (start or 0, stop or 0, step)) or step < 1:
        return fresh
    # 2. A slice, from the front. Its step has a meaning only if its start is known.
    first = old.offset + old.step * max(start or 0, 0)
    known = start is None or start >= 0
    end = math.inf if stop is None or stop < 0 else old.offset + old.step * stop
    _bound(bounds, old.front, (first, end, old.step * (step if known else 1)))
    # A slice, from the end.
    low = old.back_offset + start if start is not None and start < 0 else -math.inf
    high = old.back_offset + (stop if stop is not None and stop < 0 else 0)
    _bound(bounds, old.back, (low, high, 1))
    # 3. The rest of the dimension.
    if known:
        fresh = fresh._replace(front=old.front, offset=first, step=old.step * step)
    if step == 1 and (stop is None or stop < 0):
        fresh = fresh._replace(back=old.back, back_offset=high)
    return fresh


def _bound(bounds: dict[Axis, Bounds], axis: Axis, new: Bounds) -> None:
    """Narrow the bounds of an axis; a bound that excludes nothing is left out."""
    old = bounds.get(axis)
    first, last = (-math.inf, 0) if axis[2] else (0, math.inf)
    if old is not None:
        low = max(old[0], new[0])
        bounds[axis] = (low, min(old[1], new[1]), new[2] if low == new[0] else old[2])
    elif new[2] > 1 or new[0] > first or new[1] < last:
        bounds[axis] = new


_BASIC = (int, float, str, slice, type(...), type(None))


def _key(tree: Any) -> Any:
    """Return a key that is equal only for equal arguments of basic types."""
    return repr(tree) if all(isinstance(leaf, _BASIC) for leaf in flatten(tree)) else object()


Item = TypeVar("Item")
_UNBOUNDED = (-math.inf, math.inf, 1)


class RegionIndex(Generic[Item]):
    """Items by region of one storage, with a lookup of those that overlap a region.

    >>> frames, index = Frames(), RegionIndex()
    >>> x = frames.root()
    >>> [index.setdefault(frames.item(x, slice(i, i + 2)), i) for i in range(4)]
    [0, 1, 2, 3]
    >>> [item for _, item in index.overlapping(frames.item(x, 1))]
    [0, 1]
    """

    def __init__(self) -> None:
        self._items: dict[Region, Item] = {}
        # By axis, the regions whose first bound is on it, sorted by start; and the length of the
        # longest.
        self._along: dict[Axis | None, list[tuple[float, int, Region]]] = {}
        self._longest: dict[Axis | None, float] = {}

    def setdefault(self, region: Region, item: Item) -> Item:
        """Return the item of exactly this region; if there is none, add ``item``."""
        if region not in self._items:
            axis, (low, high, _) = region.bounds[0] if region.bounds else (None, (0, math.inf, 1))
            insort(self._along.setdefault(axis, []), (low, len(self._items), region))
            self._longest[axis] = max(self._longest.get(axis, 0), high - low)
            self._items[region] = item
        return self._items[region]

    def overlapping(self, region: Region) -> Iterator[tuple[Region, Item]]:
        """Yield the regions that may overlap this one, with their items."""
        if not region.bounds:
            yield from self._items.items()
            return
        bounds = dict(region.bounds)
        for axis, along in self._along.items():
            low, high, _ = _UNBOUNDED if axis is None else bounds.get(axis, _UNBOUNDED)
            for i in range(bisect_left(along, (low - self._longest[axis],)), len(along)):
                begin, _, other = along[i]
                if begin >= high:
                    break
                if other.overlaps(region):
                    yield other, self._items[other]


class Accesses:
    """The readers and writers of each region of a storage that a later access may conflict with.

    >>> frames, accesses = Frames(), Accesses()
    >>> x = frames.root()
    >>> accesses.write(frames.item(x, 0), 7), accesses.write(frames.item(x, 1), 8)
    (([], []), ([], []))
    >>> accesses.read(x, 9), accesses.write(x, 10), accesses.read(x, 11)
    ([7, 8], ([7, 8], [9]), [10])
    """

    __slots__ = ("_read", "_regions", "_wrote")

    def __init__(self) -> None:
        self._wrote: list[int] = []  # of the whole storage
        self._read: list[int] = []
        # By region, its writers and readers; None if all accesses were to the whole storage.
        self._regions: RegionIndex[tuple[list[int], list[int]]] | None = None

    def writers(self, region: Region) -> list[int]:
        """Return the writers of a region that an access to it must follow."""
        if self._regions is None:
            return self._wrote.copy()
        found = self._regions.overlapping(region)
        return self._wrote + [who for _, (wrote, _) in found for who in wrote]

    def read(self, region: Region, who: int) -> list[int]:
        """Add a read; return the writers that it must follow."""
        if self._regions is None and not region.bounds:
            self._read.append(who)
            return self._wrote.copy()
        writers = self.writers(region)
        self._of(region)[1].append(who)
        return writers

    def write(self, region: Region, who: int) -> tuple[list[int], list[int]]:
        """Add a write; return the writers and the readers that it must follow."""
        writers = self._wrote
        readers = self._read
        if self._regions is None and not region.bounds:
            self._wrote = [who]
            self._read = []
            return writers, readers
        if region.bounds:
            writers = writers.copy()
            readers = readers.copy()
        for other, (wrote, read) in (
            self._regions.overlapping(region) if self._regions is not None else ()
        ):
            writers += wrote
            readers += read
            # What follows this write also follows the accesses that it covers.
            if region.covers(other):
                wrote.clear()
                read.clear()
        if not region.bounds:
            self._wrote = []
            self._read = []
            self._regions = None
        self._of(region)[0].append(who)
        return writers, readers

    def _of(self, region: Region) -> tuple[list[int], list[int]]:
        if not region.bounds:
            return self._wrote, self._read
        if self._regions is None:
            self._regions = RegionIndex()
        return self._regions.setdefault(region, ([], []))
