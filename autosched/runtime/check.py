"""Check writes, aliases and random numbers of tasks against their declarations.

Version counters of tensors are compared before and after a task, which costs almost nothing. Where
counters cannot decide, because tasks write parts of the same memory, copies of the arguments are
compared bit by bit; ``check="bytes"`` does so throughout. Counters do not see writes through
``.data`` or NumPy, nor those of some fused kernels.

Undeclared writes and aliases are errors, not warnings, because undeclared sharing makes it unsafe
to free memory. Undeclared random numbers are a warning in the first run, because another thread of
the user's program may have used them.
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

Check = bool | Literal["bytes"]
Values = Callable[[], Sequence[Any]]
_Owned = tuple[Value, Extent]


class Watcher:
    """Checks the tasks of one run at a time; several tasks may run concurrently."""

    def __init__(self, graph: Graph, check: Check, entangled: Callable[[int], bool]):
        self.graph = graph
        self.check = check
        self.entangled = entangled  # whether an input shares a counter with a written one
        self._pieces: set[int] = set()  # results that share one with others of their task
        self._guard = threading.Lock()
        self._running: list[_Watch] = []

    def around(
        self, task: Task, call: Callable[[], None], arguments: Values, results: Values
    ) -> Callable[[], None]:
        """Return ``call`` with a check around it, which raises HazardError.

        ``arguments`` and ``results`` return the contents of the task's ``reads`` and of its used
        ``outputs``, in order.
        """
        states = [self._state(task, use.value) for use in task.reads]

        def step() -> None:
            given = list(arguments())  # the call may drop them
            watch = _Watch(self.graph, task, states)
            self._enter(watch)
            try:
                before = watch.state(given)
                generators = _generators()
                call()
                after = watch.state(given)
                generators_after = _generators()
            finally:
                self._running.remove(watch)
            watch.compare(before, after)
            watch.check_kept(given)
            if not _same(generators, generators_after):
                self._complain_of_random_numbers(watch)
            self._pieces.update(watch.check_results(given, results()))

        return step

    def _state(self, task: Task, value: int) -> Callable[[Any], Any]:
        """Return a function whose result changes if a task writes an argument that it must not."""
        root = self.graph.values[value].root
        part = self.graph.values[value].region
        written = [self.graph.values[use.value] for use in task.writes]
        if any(other.root == root and other.region.overlaps(part) for other in written):
            known = effects_of(task.fn, task.args, task.kwargs).name if task.fn is not None else ""
            reshapes = known in RESHAPE | MOVE
            return _strides if self.graph.in_parts(value) and not reshapes else _nothing
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
                other.concurrent.append(watch.task)
                watch.concurrent.append(other.task)
            self._running.append(watch)

    def _complain_of_random_numbers(self, watch: _Watch) -> None:
        """Warn, unless a task that declared random numbers ran at the same time."""
        suspects = [watch.task, *watch.concurrent]
        if any(task.random for task in suspects):
            return
        names = listed(task.name for task in suspects)
        one = f"task {names}" if len(suspects) == 1 else f"one of the tasks {names}"
        what = f"{one} drew random numbers without declaring it: graph.add(..., random=True)"
        what += f"\n    added at {watch.task.source}"
        if self.check:
            raise HazardError(what)
        warnings.warn(what, stacklevel=2)  # it may have been another thread of the user's


class _Watch:
    """The check of one run of one task."""

    def __init__(self, graph: Graph, task: Task, states: Sequence[Callable[[Any], Any]]):
        self.graph = graph
        self.task = task
        self.states = states
        self.names = [graph.values[use.value].name for use in task.reads]
        self.made = [graph.values[use.value] for use in task.outputs if graph.is_used(use.value)]
        self.concurrent: list[Task] = []  # tasks that ran at the same time

    def state(self, given: Sequence[Any]) -> list[Any]:
        """Return what must not change, except as the task declared."""
        return [state(item) for state, item in zip(self.states, given, strict=True)]

    def compare(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Raise HazardError if the two states differ."""
        for name, state, old, new in zip(self.names, self.states, before, after, strict=True):
            if state is _strides and old != new:
                raise self._error(
                    f"changed the shape of {name!r} in place, of which there are views; make a new "
                    "tensor"
                )
            if not _same(old, new):
                raise self._error(
                    f"wrote its argument {name!r} in place without declaring it: "
                    f"graph.add(..., writes=[{name}])"
                )

    def check_kept(self, given: Sequence[Any]) -> None:
        """Raise HazardError if the task put an argument into a list or dict that it writes.

        What is there would be freed with that argument, or change with it.
        """
        written = {use.value for use in self.task.writes}
        values = [self.graph.values[use.value] for use in self.task.reads]
        for value, item in zip(values, given, strict=True):
            if value.index not in written or not isinstance(item, (list, dict)):
                continue
            kept = [*extents(item)]
            for other, extent in _owned(values, given):
                if other.root != value.root and any(map(extent.meets, kept)):
                    raise self._error(
                        f"put {other.name!r} into {value.name!r}, which it writes; put a clone there"
                    )

    def check_results(self, given: Sequence[Any], results: Sequence[Any]) -> list[int]:
        """Raise HazardError if results share memory without a declaration.

        Return those that share a storage.
        """
        lent = list(_owned([self.graph.values[use.value] for use in self.task.reads], given))
        made = list(_owned(self.made, results))
        for value, extent in made:
            shared = [(v, e) for v, e in lent if e.storage == extent.storage or e.meets(extent)]
            shared = [(v, e) for v, e in shared if e.meets(extent)] or shared
            is_view = any(v.root == value.root for v, _ in shared)
            if shared and not is_view and self._matters((value, extent), shared[-1]):
                raise self._shares(value.name, shared[-1][0].name)
            in_parts = self.graph.in_parts(value.index) and value.root == value.index
            if in_parts and overlaps_itself(extent.tensor):
                raise self._error(
                    f"returned {value.name!r}, parts of which are written, and which "
                    "overlaps itself in memory; clone it"
                )
        found = first_meeting([(pair, pair[1]) for pair in made], self._matters)
        if found is not None:
            (one, _), (other, _) = found
            if one is not other:
                raise self._shares(other.name, one.name)
            raise self._error(
                f"returned {one.name!r}, which is written, with tensors that share memory with "
                "each other; clone them, or give each a name: graph.add(..., outputs=...)"
            )
        storages = Counter(extent.storage for _, extent in made)
        return [value.root for value, extent in made if storages[extent.storage] > 1]

    def _matters(self, a: _Owned, b: _Owned) -> bool:
        """Whether shared memory matters; that of arrays, which keep it alive, only if written."""
        (one, extent), (other, also) = a, b
        written = self.graph.last_version(one.root) or self.graph.last_version(other.root)
        if one is other:
            return one.root == one.index and written > 0
        tensors = any(hasattr(each.tensor, "untyped_storage") for each in (extent, also))
        return one.root != other.root and (written > 0 or tensors)

    def _shares(self, result: str, other: str) -> HazardError:
        return HazardError(
            f"result {result!r} of task {self.task.name!r} shares memory with {other!r} without "
            f"declaring it: graph.add(..., aliases={other}), or return a copy\n"
            f"    added at {self.task.source}"
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
    tensors = [extent.tensor for extent in extents(item)]
    return [(each.shape, each.stride()) for each in tensors if hasattr(each, "stride")]


def _versions(item: Any) -> list[Any]:
    """Return the version counters of tensors; of arrays, which have none, the bytes."""
    leaves = [each for each in flatten(item) if _is_tensor(each) or hasattr(each, "tobytes")]
    return [_version(leaf) if _is_tensor(leaf) else _copied(leaf) for leaf in leaves]


def _version(tensor: Any) -> Any:
    """Return a value that changes when a tensor is written; for one without elements, its shape."""
    if tensor.is_inference():
        return _copied(tensor)
    return tensor._version if next(extents(tensor), None) is not None else tuple(tensor.shape)


def _bytes(item: Any) -> list[Any]:
    """Return copies of the bytes of tensors and arrays; other leaves as they are."""
    return [_copied(leaf) for leaf in flatten(item)]


def _copied(leaf: Any) -> Any:
    if not _is_tensor(leaf):
        return leaf.tobytes() if hasattr(leaf, "tobytes") else leaf
    if next(extents(leaf), None) is None:
        return None
    torch = sys.modules["torch"]
    leaf = leaf.int_repr() if leaf.is_quantized else leaf  # any other view of it crashes
    resolved = leaf.detach().resolve_conj().resolve_neg()
    # In host memory: that of a device may be full.
    copied = resolved.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copied.reshape(-1).view(torch.uint8)


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "untyped_storage")


def _generators() -> list[Any]:
    """Return the states of torch's random number generators that are in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    states = [torch.get_rng_state()]
    if (kind := torch.accelerator.current_accelerator()) is not None:
        module = torch.get_device_module(kind)
        if getattr(module, "is_initialized", bool)():
            states += [generator.get_state() for generator in module.default_generators]
    return states


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if _is_tensor(a):
        return bool(a.shape == b.shape and (a == b).all())
    try:
        return a is b or bool(a == b)
    except Exception:  # they cannot be compared
        return True
