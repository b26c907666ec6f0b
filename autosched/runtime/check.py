"""Compare what a task writes, shares and draws with its declaration.

Version counters of tensors are compared before and after a task, which costs almost nothing. Where
counters cannot decide, because tasks write parts of the same memory, copies of the arguments are
compared bit by bit; ``check="bytes"`` does so throughout. Counters do not see writes through
``.data`` or NumPy, nor those of some fused kernels.

Undeclared writes and aliases are errors, not warnings, because undeclared sharing makes it unsafe
to free memory. Undeclared random numbers are a warning in the first run, because another thread of
the user's program may have drawn them.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from autosched._lib.aliasing import Extent, extents, first_meeting, overlaps_itself
from autosched._lib.tree import flatten
from autosched.errors import HazardError, listed
from autosched.graph.effects import MOVE, RESHAPE, effects_of
from autosched.graph.graph import Graph, Task, Value

__all__ = ["Check", "Watcher"]

Check = bool | Literal["bytes"]
Values = Callable[[], Sequence[Any]]
_Owned = tuple[Value, Extent]


class Watcher:
    """Checks the tasks of one run at a time; several tasks may run concurrently."""

    def __init__(self, graph: Graph, check: Check, entangled: Callable[[int], bool]):
        self.graph = graph
        self.check = check
        self.entangled = (
            entangled  # whether an input (an index) shares a counter with one that is written
        )
        self._pieces: set[int] = set()  # results that share one with others of their task
        self._guard = threading.Lock()
        self._running: list[_Watch] = []

    def around(
        self, task: Task, call: Callable[[], None], arguments: Values, results: Values
    ) -> Callable[[], None]:
        """Return ``call`` with a check around it.

        The result raises HazardError naming task, argument and line.

        ``arguments`` and ``results`` return what the task's ``reads`` and its used ``outputs`` hold, in order.
        """
        looks = [self._look(task, use.value) for use in task.reads]

        def step() -> None:
            given = list(arguments())  # the call may drop them
            watch = _Watch(self.graph, task, looks)
            self._enter(watch)
            try:
                before = watch.state(given)
                drawn = _generators()
                call()
                after = watch.state(given)
                drawn_then = _generators()
            finally:
                self._running.remove(watch)
            watch.compare(before, after)
            if not _same(drawn, drawn_then):
                self._tell(watch)
            self._pieces.update(watch.look_at(given, results()))

        return step

    def _look(self, task: Task, value: int) -> Callable[[Any], Any]:
        """Return a function that detects whether an argument was written; None where it may be."""
        root = self.graph.values[value].root
        part = self.graph.values[value].region
        written = [self.graph.values[use.value] for use in task.writes]
        if any(other.root == root and other.region.overlaps(part) for other in written):
            known = effects_of(task.fn, task.args, task.kwargs).name if task.fn is not None else ""
            return (
                _strides if self.graph.in_parts(value) and known not in RESHAPE | MOVE else _nothing
            )
        if self.graph.touched(task, value) is not None:  # a view, which others may write meanwhile
            return _nothing
        if self.check == "bytes" or (self.graph.in_parts(value) and self.graph.last_version(root)):
            return _bytes
        return lambda item: (
            _bytes(item) if root in self._pieces or self.entangled(root) else _versions(item)
        )

    def _enter(self, watch: _Watch) -> None:
        with self._guard:
            for other in self._running:
                other.beside.append(watch.task)
                watch.beside.append(other.task)
            self._running.append(watch)

    def _tell(self, watch: _Watch) -> None:
        """Warn of undeclared random numbers, unless a task that declared them ran at the same time."""
        beside = [watch.task, *watch.beside]
        if any(task.random for task in beside):
            return
        names = listed(task.name for task in beside)
        one = f"task {names}" if len(beside) == 1 else f"one of the tasks {names}"
        what = f"{one} drew random numbers without declaring it: graph.add(..., random=True)"
        what += f"\n    added at {watch.task.source}"
        if self.check:
            raise HazardError(what)
        warnings.warn(
            what, stacklevel=2
        )  # it may have been another thread, of which we do not know


class _Watch:
    """The check of one run of one task."""

    def __init__(self, graph: Graph, task: Task, looks: Sequence[Callable[[Any], Any]]):
        self.graph = graph
        self.task = task
        self.looks = looks
        self.names = [graph.values[use.value].name for use in task.reads]
        self.made = [graph.values[use.value] for use in task.outputs if graph.is_used(use.value)]
        self.beside: list[Task] = []  # tasks that ran at the same time

    def state(self, given: Sequence[Any]) -> list[Any]:
        """Return what must not change, except as the task declared."""
        return [look(item) for look, item in zip(self.looks, given, strict=True)]

    def compare(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Raise HazardError if the two states differ."""
        for name, look, old, new in zip(self.names, self.looks, before, after, strict=True):
            if look is _strides and old != new:
                raise self._error(
                    f"changed the shape of {name!r} in place, of which there are views; make a new tensor"
                )
            if not _same(old, new):
                raise self._error(
                    f"wrote its argument {name!r} in place without declaring it: graph.add(..., writes=[{name}])"
                )

    def look_at(self, given: Sequence[Any], results: Sequence[Any]) -> list[int]:
        """Raise HazardError if results share memory without a declaration.

        Return those that share a storage.
        """
        lent = list(_owned([self.graph.values[use.value] for use in self.task.reads], given))
        made = list(_owned(self.made, results))
        for value, extent in made:
            near = [(v, e) for v, e in lent if e.storage == extent.storage or e.meets(extent)]
            near = [(v, e) for v, e in near if e.meets(extent)] or near
            if (
                near
                and all(v.root != value.root for v, _ in near)
                and self._matters((value, extent), near[-1])
            ):
                raise self._shares(value.name, near[-1][0].name)
            if (
                self.graph.in_parts(value.index)
                and value.root == value.index
                and overlaps_itself(extent.tensor)
            ):
                raise self._error(
                    f"returned {value.name!r}, parts of which are written, lying on itself in memory; clone it"
                )
        shared = first_meeting([(pair, pair[1]) for pair in made], self._matters)
        if shared is not None and shared[0][0] is shared[1][0]:
            raise self._error(
                f"returned {shared[0][0].name!r}, which is written, with tensors that share memory with each other; "
                f"clone them, or give each a name: graph.add(..., outputs=...)"
            )
        if shared is not None:
            raise self._shares(shared[1][0].name, shared[0][0].name)
        storages = Counter(extent.storage for _, extent in made)
        return [value.root for value, extent in made if storages[extent.storage] > 1]

    def _matters(self, a: _Owned, b: _Owned) -> bool:
        """Whether shared memory matters.

        An array keeps its memory alive, so it matters only if it is written.
        """
        (one, extent), (other, also) = a, b
        written = self.graph.last_version(one.root) or self.graph.last_version(other.root)
        if one is other:
            return one.root == one.index and written > 0
        arrays = not hasattr(extent.tensor, "untyped_storage") and not hasattr(
            also.tensor, "untyped_storage"
        )
        return one.root != other.root and (written > 0 or not arrays)

    def _shares(self, result: str, other: str) -> HazardError:
        return HazardError(
            f"result {result!r} of task {self.task.name!r} shares memory with {other!r} without declaring it: "
            f"graph.add(..., aliases={other}), or return a copy\n    added at {self.task.source}"
        )

    def _error(self, what: str) -> HazardError:
        return HazardError(f"task {self.task.name!r} {what}\n    added at {self.task.source}")


def _owned(values: Sequence[Value], items: Sequence[Any]) -> Iterator[_Owned]:
    for value, item in zip(values, items, strict=True):
        yield from ((value, extent) for extent in extents(item))


def _nothing(item: Any) -> None:
    pass


def _strides(item: Any) -> list[Any]:
    """Return the addresses and strides of tensors."""
    return [
        (extent.tensor.shape, extent.tensor.stride())
        for extent in extents(item)
        if hasattr(extent.tensor, "stride")
    ]


def _versions(item: Any) -> list[Any]:
    """Return the version counters of tensors, and the bytes of arrays and inference tensors, which have none."""
    return [
        _version(leaf) if hasattr(leaf, "untyped_storage") else _copied(leaf)
        for leaf in flatten(item)
        if hasattr(leaf, "untyped_storage") or hasattr(leaf, "tobytes")
    ]


def _version(tensor: Any) -> Any:
    """Return a value that changes when a tensor is written; for one without elements, its shape."""
    if tensor.is_inference():
        return _copied(tensor)
    return tensor._version if next(extents(tensor), None) is not None else tuple(tensor.shape)


def _bytes(item: Any) -> list[Any]:
    """Return copies of the bytes of tensors and arrays; other leaves as they are."""
    return [_copied(leaf) for leaf in flatten(item)]


def _copied(leaf: Any) -> Any:
    if hasattr(leaf, "untyped_storage"):
        if next(extents(leaf), None) is None:
            return None
        leaf = (
            leaf.int_repr() if leaf.is_quantized else leaf
        )  # another look at a quantized one's bytes crashes
        plain = (
            leaf.detach()
            .resolve_conj()
            .resolve_neg()
            .clone(memory_format=sys.modules["torch"].contiguous_format)
        )
        return plain.reshape(-1).view(sys.modules["torch"].uint8)
    return leaf.tobytes() if hasattr(leaf, "tobytes") else leaf


def _generators() -> list[Any]:
    """Return the states of torch's random number generators that are in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += [generator.get_state() for generator in torch.cuda.default_generators]
    return states


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "untyped_storage"):
        return bool(a.shape == b.shape and (a == b).all())
    try:
        return a is b or bool(a == b)
    except Exception:  # it cannot be compared, so nothing can be said
        return True
