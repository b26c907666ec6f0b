"""Tensors of a run in their slots, and what inputs must be like.

Knows no instruction but by the slots that it reads and fills, and no stream and no event.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cached_property
from itertools import pairwise
from typing import Any

from autosched._lib.aliasing import Extent, are_apart, extents, first_meeting, overlaps_itself
from autosched._lib.copying import span
from autosched._lib.tensor_guards import Recognizer, recognizer
from autosched._lib.tree import flatten
from autosched.codegen.slots import Slots
from autosched.errors import GraphError, HazardError
from autosched.graph.effects import COUNTS_IN_MEMORY, function_name
from autosched.graph.graph import Graph
from autosched.program.program import Copy, Program, Receive, Run, Send
from autosched.runtime.backends import Located

_ATTEMPTS = 16  # at knowing inputs, each of which takes longer than a check
_MANY = 16  # inputs; fewer are checked faster than they are recognized


class Memory(Slots):
    """The slots of a program, and what is in them during a run."""

    def __init__(self, program: Program, graph: Graph, located: Located | None = None):
        super().__init__(program, graph)
        self.program = program
        self.graph = graph
        self.located = located
        present = [value for value in graph.sources if value.name in self.homes]
        self.names = [value.name for value in present if value.tensor is None]
        constants = [value for value in present if value.tensor is not None]
        self.constants = {value.name: value.tensor for value in constants}
        index = {name: graph.value(name).index for name, _ in program.inputs}
        self.written = {name for name in index if graph.last_version(index[name])}
        self._used = {name for name in index if graph.is_used(index[name])}
        # The inputs, by name, and constants that must not share memory, if tasks write some.
        self.kept_apart = (
            [name for name in self.names if name in self._used] if self.written else []
        )
        self.used_constants = [item for name, item in self.constants.items() if name in self._used]
        self._in_parts = {name for name in self.written if graph.in_parts(index[name])}
        self._blank: list[Any] = [None] * self.count
        for name, tensor in self.constants.items():
            self._blank[self.homes[name]] = tensor
        self.data = self._blank.copy()
        copied = {i.value for i in program if isinstance(i, (Copy, Send, Receive))}
        self._counted = _counted(program, graph)
        # Inputs with several tensors, each of which is written by itself, or copied by itself.
        self._separate = self._in_parts | self.written & copied
        placed = [(name, self.place(device)) for name, device in program.inputs]
        self._placed = [(name, device) for name, device in placed if device is not None]
        self._entangled: set[str] = set()
        self._known: Recognizer | None = None  # whether inputs are like some that passed all checks
        self._attempts = 0  # at knowing inputs
        self._addresses: dict[str, int] = {}  # of the inputs that were checked last

    # ---- during a run

    def fill(self, inputs: Mapping[str, Any], are_known: bool = False) -> None:
        """Put the caller's inputs into their slots. Raises as ``check`` does, unless they are known."""
        if not are_known:
            self.check(inputs)
        self.data[1 : 1 + len(self.names)] = self.in_order(inputs)

    def place(self, device: str) -> Any:
        """Return the ``.device`` of tensors on a device, None where any is accepted."""
        return None if self.located is None else self.located.place(device)

    def in_order(self, inputs: Mapping[str, Any]) -> Iterable[Any]:
        """Return the inputs in the order of their slots, of which the first is slot 1."""
        if list(inputs) == self.names:
            return inputs.values()
        return map(inputs.__getitem__, self.names)

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise GraphError for missing and unknown inputs, and for inputs on other devices.

        Raises HazardError if one that tasks write shares its memory with another, or a constant, or
        itself.
        """
        if list(inputs) != self.names and inputs.keys() != {*self.names}:
            self.graph.bind(inputs)
        self._entangled = set()
        if not self.written and not self._placed:
            return
        if self._known is not None and self._known(inputs):
            return
        given = {**self.constants, **inputs}
        apart = not self.written or (
            are_apart(item for name, item in given.items() if name in self._used)
            and all(given[name].is_contiguous() for name in self._in_parts)
        )
        if not apart:
            self._check_apart(given)
        for name, device in self._placed:
            for leaf in flatten(given[name]):
                if getattr(leaf, "device", device) != device:
                    raise GraphError(
                        f"input {name!r} is on {leaf.device}, and the schedule expects it on "
                        f"{device}; move it, or say where it lives: "
                        f"schedule(..., inputs={{{name!r}: ...}})"
                    )
        if apart and len(inputs) > _MANY and self._attempts < _ATTEMPTS:
            self._know(inputs)

    def _know(self, inputs: Mapping[str, Any]) -> None:
        """Note inputs that passed all checks, so that similar ones are recognized.

        Those stay where they are that are at the same addresses as in the last check.
        """
        if not all(hasattr(item, "data_ptr") for item in inputs.values()):
            return
        before = self._addresses
        self._addresses = {name: item.data_ptr() for name, item in inputs.items()}
        if before:
            self._attempts += 1
            fixed = {name for name, at in self._addresses.items() if before.get(name) == at}
            self._known = recognizing(inputs, fixed, self.used_constants, self.kept_apart)

    def _check_apart(self, given: Mapping[str, Any]) -> None:
        """Raise HazardError if inputs overlap, and note which share a storage."""
        written = self.written
        used = [(name, item) for name, item in given.items() if name in self._used]
        owned = [(name, extent) for name, item in used for extent in extents(item)]
        self._entangled = _sharing_storage(owned, written)

        def matters(a: str, b: str) -> bool:
            return a in self._separate if a == b else a in written or b in written

        shared = first_meeting(owned, matters)
        if shared is not None and shared[0] == shared[1]:
            raise HazardError(
                f"tensors in {shared[0]!r} share memory with each other, and it is written in "
                "place; pass clones, or give each tensor an input of its own"
            )
        if shared is not None:
            a, b = shared
            raise HazardError(
                f"{a!r} and {b!r} share memory, and {(a if a in written else b)!r} is written in "
                "place; pass a clone, or make one a view of the other in the graph"
            )
        for name, extent in owned:
            if name in self._in_parts and overlaps_itself(extent.tensor):
                raise HazardError(
                    f"{name!r} overlaps itself in memory, strides {_strides(extent.tensor)}, and "
                    "parts of it are written in place; pass a clone"
                )

    def is_counted(self, copy: Copy) -> bool:
        """Whether ``as_strided`` counts elements in the memory of what is copied."""
        return (self.graph.value(copy.value).root, copy.destination) in self._counted

    def check_copy(self, copy: Copy, item: Any) -> None:
        """Raise HazardError if ``as_strided`` would find other elements in a copy of this."""
        value = self.graph.value(copy.value)
        absolute = self._counted.get((value.root, copy.destination))
        for leaf in flatten(item) if absolute is not None else ():
            if not hasattr(leaf, "storage_offset") or not leaf.numel():
                continue
            if absolute and leaf.storage_offset():
                raise HazardError(
                    f"{copy.value!r} begins at element {leaf.storage_offset()} of its memory, from "
                    f"which as_strided counts, and its copy on {copy.destination} has a memory of "
                    "its own; pass a clone, leave storage_offset out, or let the task run on "
                    f"{copy.source}"
                )
            if _has_gaps(leaf):
                raise HazardError(
                    f"{copy.value!r} has gaps in memory (strides {_strides(leaf)}) that as_strided "
                    f"may read, and its copy on {copy.destination} has other numbers there; pass a "
                    f"clone, or let the task run on {copy.source}"
                )

    def is_entangled(self, value: int) -> bool:
        """Whether an input (an index) shares a storage with others, some of which tasks write."""
        return self.graph.values[value].name in self._entangled

    def outputs(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return {label: self.data[slot] for label, slot in self.outputs_at}

    def clear(self) -> None:
        """Drop everything but the constants."""
        self.data[:] = self._blank

    def leave(self, free: Callable[[Any], None]) -> None:
        """Do to all that the run has left what is done to freed memory.

        Inputs, constants and outputs are kept, and what shares memory with them.
        """
        for slot in self._own:
            if self.data[slot] is not None:
                free(self.data[slot])

    @cached_property
    def _own(self) -> list[int]:
        """The slots whose memory belongs to the run."""
        kept = [*self.homes.values(), *(slot for _, slot in self.outputs_at)]
        others = {slot for one in kept for slot in self.sharing[one]}
        return [slot for slot in self.sharing if slot not in others]

    def arguments(self, i: int) -> list[Any]:
        """Return the current values that a run or a copy reads; nothing for other instructions."""
        return [self.data[slot] for slot in self.reads.get(i, ())]

    def results(self, i: int) -> list[Any]:
        """Return the current results of a run, without those that nothing uses."""
        return [self.data[slot] for slot in self.made[i] if slot is not None]


def _counted(program: Program, graph: Graph) -> dict[tuple[int, str], bool]:
    """Return the values (by root) in whose memory on a device ``as_strided`` counts.

    True if it counts from the beginning of the memory.
    """
    found: dict[tuple[int, str], bool] = {}
    for instruction in program:
        task = graph.task(instruction.task) if isinstance(instruction, Run) else None
        if task is None or task.fn is None or function_name(task.fn) not in COUNTS_IN_MEMORY:
            continue
        if task.reads and not task.writes:
            last = 4 if "scatter" in function_name(task.fn) else 3
            offset = task.args[last] if len(task.args) > last else task.kwargs.get("storage_offset")
            key = graph.values[task.reads[0].value].root, instruction.stream.device
            found[key] = found.get(key, False) or offset is not None
    return found


def _has_gaps(tensor: Any) -> bool:
    """Whether there is memory between a tensor's elements that does not belong to it."""
    own = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return bool(span(tensor) > own)


def _strides(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.stride() if hasattr(tensor, "stride") else tensor.strides)


def _sharing_storage(owned: Sequence[tuple[str, Extent]], written: Set[str]) -> set[str]:
    """Return the names of tensors that share a storage with others, one of which is written."""
    by_storage: dict[int, set[str]] = {}
    for name, extent in owned:
        by_storage.setdefault(extent.storage, set()).add(name)
    shared = [names for names in by_storage.values() if len(names) > 1 and names & written]
    return set().union(*shared)


# ---- inputs that were checked or recorded before
#
# Nothing of earlier inputs is kept but facts, so their memory can be freed, and other tensors with
# the same properties and addresses are recognized, too.


def recognizing(
    inputs: Mapping[str, Any],
    fixed: Collection[str],
    constants: Collection[Any],
    apart: Collection[str],
) -> Recognizer | None:
    """Return whether inputs are as these were, as far as matters; None if that is not known soon.

    Properties are those of ``tensor_guards``. Inputs that are ``fixed`` must also be at the same
    addresses. Those named in ``apart`` must share no memory with each other or with ``constants``.

    >>> import torch, torch._dynamo
    >>> inputs = {"x": torch.zeros(3), "w": torch.zeros(3)}
    >>> recognizes = recognizing(inputs, {"w"}, [], apart=["x", "w"])
    >>> recognizes({"x": torch.ones(3), "w": inputs["w"]}), recognizes({**inputs, "x": inputs["w"]})
    (True, False)
    """
    are_alike = recognizer(inputs, fixed)
    if are_alike is None:
        return None
    if apart and not are_apart([*map(inputs.__getitem__, apart), *constants]):
        return None
    moving = [name for name in apart if name not in fixed]
    if not moving:
        return are_alike
    stay = [*(inputs[name] for name in apart if name in fixed), *constants]
    spans = sorted(map(_span, stay))
    firsts, ends = [first for first, _ in spans], [end for _, end in spans]

    def are_separate(found: Mapping[str, Any]) -> bool:
        own = sorted(_span(found[name]) for name in moving)
        # No span of those that stay ends behind the beginning of this one and begins before its end.
        return all(end <= after for (_, end), (after, _) in pairwise(own)) and all(
            bisect_right(ends, first) == bisect_left(firsts, end) for first, end in own
        )

    return lambda found: are_alike(found) and are_separate(found)


def _span(tensor: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's storage: the first, and that behind the last."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()
