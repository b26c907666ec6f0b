"""Determine which elements of a storage a view covers.

``parts`` also answers whether two views of one storage can overlap. A graph knows no shapes, so
parts are described by coordinates, not by bytes. Each dimension of a tensor gives an element two
coordinates: its distance from the front, and its (negative) distance from the end. ``x[2:5]``
bounds the first, ``x[-3:]`` the second. Two parts with disjoint bounds in a common coordinate have
no element in common, for every shape:

    x[:4]  and  x[4:]        disjoint, by rows from the front
    x[1:-1]  and  x[-1]      disjoint, by rows from the end
    x[:, :2]  and  x.t()[2:] disjoint, by columns
    x[:4]  and  x[-4:]       perhaps disjoint, so they are assumed to overlap

A view whose elements cannot be derived (``view``, ``T``, the pieces of ``chunk``) has coordinates
of its own, and is a part of the view that it was made from. A view whose elements may overlap each
other (``expand``) has no coordinates. ``as_strided`` may cover the whole storage.

Lowering and ``verify`` ask the same question of the same parts. Hypothesis tests compare the
answers with the strides of real tensors: parts that overlap are never reported as disjoint.

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

__all__ = ["Accesses", "Index", "Looks", "Part", "is_basic"]

Axis = tuple[int, int, bool]  # look, dimension, whether counted from the end
Bounds = tuple[float, float, int]  # first, end (exclusive), step


class _Dimension(NamedTuple):
    """The coordinates of a dimension: element i is at ``offset + step * i`` on axis ``front``.

    Counted from the end, element -i is at ``behind - i`` on ``back``.
    """

    front: Axis
    offset: float
    step: int
    back: Axis
    behind: float


@dataclass(frozen=True, slots=True)
class Part:
    """A set of elements of a storage, by bounds; and the coordinates of the view that sees them.

    >>> looks = Looks()
    >>> x = looks.root()
    >>> upper, lower, last = looks.item(x, slice(4)), looks.item(x, slice(4, None)), looks.item(x, -1)
    >>> upper.overlaps(lower), lower.overlaps(last), x.covers(lower), lower.covers(x)
    (False, True, True, False)
    """

    bounds: tuple[tuple[Axis, Bounds], ...] = ()
    look: int = field(default=-1, compare=False)  # -1: no coordinates
    lead: tuple[_Dimension, ...] = field(default=(), compare=False)
    tail: tuple[int, int] = field(
        default=(-1, 0), compare=False
    )  # further dimensions: those of this look, from this number on

    def overlaps(self, other: Part) -> bool:
        """Whether the two parts may have an element in common."""
        if not self.bounds or not other.bounds:
            return True
        theirs = dict(other.bounds)
        return not any(
            axis in theirs and _apart(bounds, theirs[axis]) for axis, bounds in self.bounds
        )

    def covers(self, other: Part) -> bool:
        """Whether this part overlaps everything that the other does: it has no other bounds."""
        theirs = dict(other.bounds)
        return all(axis in theirs and _within(theirs[axis], bounds) for axis, bounds in self.bounds)

    def counted(self, look: Callable[[int], int]) -> Part:
        """Return the same elements with renumbered looks."""

        def axis(old: Axis) -> Axis:
            return look(old[0]), old[1], old[2]

        bounds = sorted((axis(old), bound) for old, bound in self.bounds)
        lead = [d._replace(front=axis(d.front), back=axis(d.back)) for d in self.lead]
        return Part(tuple(bounds), look(self.look), tuple(lead), (look(self.tail[0]), self.tail[1]))

    def dimension(self, number: int) -> _Dimension:
        """Return a dimension; negative numbers count from the last."""
        if 0 <= number < len(self.lead):
            return self.lead[number]
        look, shift = self.tail if number >= 0 else (self.look, 0)
        return _dimension(look, number + shift)


def _dimension(look: int, number: int) -> _Dimension:
    return _Dimension((look, number, False), 0, 1, (look, number, True), 0)


def _apart(a: Bounds, b: Bounds) -> bool:
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
_SPLITS_AT = frozenset(
    "dsplit hsplit tensor_split vsplit".split()
)  # at indices, which need not be increasing


class Looks:
    """The coordinate systems (looks) of one graph; the same view made twice has one look."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._count = 0

    def root(self) -> Part:
        """Return the whole of a new storage."""
        look = self._new()
        return Part((), look, (), (look, 0))

    def opaque(self, base: Part) -> Part:
        """Return an unknown part of ``base``."""
        return Part(base.bounds)

    def anew(self, part: Part) -> Part:
        """Return the same part after its dimensions were changed in place."""
        look = self._new()
        return part if part.look < 0 else Part(part.bounds, look, (), (look, 0))

    def view(self, base: Part, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Part:
        """Return the part that a view of ``base`` sees, made by a torch function and arguments."""
        if name == "as_strided":
            return Part()  # relative to the storage, not to the base
        if base.look < 0 or name in _OPAQUE:
            return self.opaque(base)
        if name in _SPLITS_AT and not all(
            isinstance(item, int) for item in (*args, *kwargs.values())
        ):
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
        look = self._look((base.look, name, _text((args, kwargs))))
        return Part(base.bounds, look, (), (look, 0))

    def pieces(self, whole: Part, name: str, count: int) -> list[Part]:
        """Return the parts of the results of a splitting function; ``whole`` is what it splits."""
        return [
            self.item(whole, i) if name in _PIECES else self.opaque(whole) for i in range(count)
        ]

    def item(self, base: Part, key: Any) -> Part:
        """Return the part that ``tensor[key]`` sees, for a basic index."""
        if base.look < 0:
            return base
        keys = [
            int(k) if isinstance(k, Integral) else k
            for k in (key if isinstance(key, tuple) else (key,))
        ]
        new = self._look((base.look, "getitem", _text(keys)))
        bounds = dict(base.bounds)
        lead = list[_Dimension]()
        number = 0
        while keys and keys[0] is not ...:
            first = keys.pop(0)
            dimension = _dimension(new, len(lead))
            if first is not None:  # None makes a new dimension
                kept = _narrowed(bounds, base.dimension(number), first, dimension)
                number += 1
                if kept is None:
                    continue
                dimension = kept
            lead.append(dimension)
        behind = [key for key in keys[1:] if key is not None]
        for from_end, last in enumerate(reversed(behind if ... not in behind else []), 1):
            _narrowed(bounds, base.dimension(-from_end), last, base.dimension(-from_end))
        tail = (new, 0) if keys else (base.tail[0], base.tail[1] + number - len(lead))
        lead += () if keys else base.lead[number:]
        if any(low >= high for low, high, _ in bounds.values()):
            bounds = dict(
                base.bounds
            )  # an empty part; its readers still read the shape of its base
        return Part(tuple(sorted(bounds.items())), new, tuple(lead), tail)

    def _along(self, base: Part, number: int, key: Any) -> Part:
        """Return the part that an index selects in one dimension."""
        keys = (
            (slice(None),) * number + (key,)
            if number >= 0
            else (..., key) + (slice(None),) * (-number - 1)
        )
        return self.item(base, keys)

    def _swapped(self, base: Part, a: int, b: int) -> Part:
        lead = [base.dimension(number) for number in range(max(a, b, len(base.lead) - 1) + 1)]
        lead[a], lead[b] = lead[b], lead[a]
        return Part(base.bounds, self._look((base.look, "transpose", a, b)), tuple(lead), base.tail)

    def twin(self, owner: object, look: int) -> int:
        """Return the look for one of another graph; ``owner`` identifies that graph."""
        return self._look((owner, look))

    def _look(self, key: Any) -> int:
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
    return (
        key is None
        or key is ...
        or isinstance(key, slice)
        or (isinstance(key, Integral) and not isinstance(key, bool))
    )


def _narrowed(
    bounds: dict[Axis, Bounds], old: _Dimension, key: Any, fresh: _Dimension
) -> _Dimension | None:
    """Add the bounds of an integer or slice in a dimension; return the rest of it, if any."""
    if isinstance(key, int):
        axis, first = (
            (old.front, old.offset + old.step * key) if key >= 0 else (old.back, old.behind + key)
        )
        _bound(bounds, axis, (first, first + 1, 1))
        return None
    start = key.start
    stop = key.stop
    step = 1 if key.step is None else key.step
    if not all(isinstance(item, int) for item in (start or 0, stop or 0, step)) or step < 1:
        return fresh
    # Bounds from the front are known if start and stop are counted from there.
    first = old.offset + old.step * max(start or 0, 0)
    known = start is None or start >= 0
    end = math.inf if stop is None or stop < 0 else old.offset + old.step * stop
    _bound(bounds, old.front, (first, end, old.step * (step if known else 1)))
    if known:
        fresh = fresh._replace(front=old.front, offset=first, step=old.step * step)
    # Bounds from the end.
    low = old.behind + start if start is not None and start < 0 else -math.inf
    behind = old.behind + (stop if stop is not None and stop < 0 else 0)
    _bound(bounds, old.back, (low, behind, 1))
    if step == 1 and (stop is None or stop < 0):
        fresh = fresh._replace(back=old.back, behind=behind)
    return fresh


def _bound(bounds: dict[Axis, Bounds], axis: Axis, new: Bounds) -> None:
    """Narrow the bounds of an axis; a bound that excludes nothing is left out."""
    old = bounds.get(axis)
    if old is not None:
        low = max(old[0], new[0])
        bounds[axis] = (low, min(old[1], new[1]), new[2] if low == new[0] else old[2])
    elif (
        new[2] > 1
        or new[0] > (-math.inf if axis[2] else 0)
        or new[1] < (0 if axis[2] else math.inf)
    ):
        bounds[axis] = new


def _text(tree: Any) -> Any:
    """Return a key that is equal only for equal arguments of basic types."""
    plain = all(
        leaf is None or isinstance(leaf, (int, float, str, slice, type(...)))
        for leaf in flatten(tree)
    )
    return repr(tree) if plain else object()


Item = TypeVar("Item")


class Index(Generic[Item]):
    """Items by part of one storage, with a lookup of those that overlap a part.

    >>> looks, index = Looks(), Index()
    >>> x = looks.root()
    >>> [index.setdefault(looks.item(x, slice(i, i + 2)), i) for i in range(4)]
    [0, 1, 2, 3]
    >>> [item for _, item in index.overlapping(looks.item(x, 1))]
    [0, 1]
    """

    def __init__(self) -> None:
        self._items: dict[Part, Item] = {}
        # By axis, the parts whose first bound is on it, sorted by start; and the length of the
        # longest.
        self._along: dict[Axis | None, list[tuple[float, int, Part]]] = {}
        self._longest: dict[Axis | None, float] = {}

    def setdefault(self, part: Part, item: Item) -> Item:
        """Return the item of exactly this part; if there is none, add ``item``."""
        if part not in self._items:
            axis, (low, high, _) = part.bounds[0] if part.bounds else (None, (0, math.inf, 1))
            insort(self._along.setdefault(axis, []), (low, len(self._items), part))
            self._longest[axis] = max(self._longest.get(axis, 0), high - low)
            self._items[part] = item
        return self._items[part]

    def overlapping(self, part: Part) -> Iterator[tuple[Part, Item]]:
        """Yield the parts that may overlap this one, with their items."""
        if not part.bounds:
            yield from self._items.items()
            return
        bounds = dict(part.bounds)
        for axis, along in self._along.items():
            low, high, _ = bounds.get(axis, _ANY)  # type: ignore[arg-type]  # None bounds nothing
            for i in range(bisect_left(along, (low - self._longest[axis],)), len(along)):
                if along[i][0] >= high:
                    break
                if along[i][2].overlaps(part):
                    yield along[i][2], self._items[along[i][2]]


_ANY = (-math.inf, math.inf, 1)


class Accesses:
    """The readers and writers of each part of a storage that a later access may conflict with.

    >>> looks, accesses = Looks(), Accesses()
    >>> x = looks.root()
    >>> accesses.write(looks.item(x, 0), 7), accesses.write(looks.item(x, 1), 8), accesses.read(x, 9)
    (([], []), ([], []), [7, 8])
    >>> accesses.write(x, 10), accesses.read(x, 11)
    (([7, 8], [9]), [10])
    """

    __slots__ = ("_parts", "_read", "_wrote")

    def __init__(self) -> None:
        self._wrote: list[int] = []  # of the whole storage
        self._read: list[int] = []
        self._parts: Index[tuple[list[int], list[int]]] | None = None  # of parts of it

    def writers(self, part: Part) -> list[int]:
        """Return the writers of a part that an access to it must follow."""
        if self._parts is None:
            return self._wrote.copy()
        return self._wrote + [
            who for _, (wrote, _) in self._parts.overlapping(part) for who in wrote
        ]

    def read(self, part: Part, who: int) -> list[int]:
        """Add a read; return the writers that it must follow."""
        if self._parts is None and not part.bounds:
            self._read.append(who)
            return self._wrote.copy()
        writers = self.writers(part)
        self._of(part)[1].append(who)
        return writers

    def write(self, part: Part, who: int) -> tuple[list[int], list[int]]:
        """Add a write; return the writers and the readers that it must follow."""
        if self._parts is None and not part.bounds:
            found = self._wrote, self._read
            self._wrote = [who]
            self._read = []
            return found
        writers = self._wrote
        readers = self._read
        if part.bounds:
            writers = writers.copy()
            readers = readers.copy()
        for other, (wrote, read) in (
            self._parts.overlapping(part) if self._parts is not None else ()
        ):
            writers += wrote
            readers += read
            if part.covers(other):  # a successor of those accesses is a successor of this one
                wrote.clear()
                read.clear()
        if not part.bounds:
            self._wrote = []
            self._read = []
            self._parts = None
        self._of(part)[0].append(who)
        return writers, readers

    def _of(self, part: Part) -> tuple[list[int], list[int]]:
        if not part.bounds:
            return self._wrote, self._read
        if self._parts is None:
            self._parts = Index()
        return self._parts.setdefault(part, ([], []))
