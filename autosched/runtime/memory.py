"""Tensors of an executor, and the steps that change them.

Tensors are in numbered slots; run, copy and free become steps that read and write slots.
A slot is a value on a device; an in-place write leaves the next version in the same slot. A result
that nothing uses gets no slot: it is dropped immediately. Knows no stream and no event: others
decide when a step may be called.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import pairwise
from operator import itemgetter, setitem
from typing import Any

from autosched._lib.aliasing import Extent, are_apart, extents, first_meeting, overlaps_itself
from autosched._lib.allowed import is_storage
from autosched._lib.copying import span
from autosched._lib.tensor_guards import recognizer
from autosched._lib.tree import flatten, transform
from autosched.errors import GraphError, HazardError
from autosched.graph.effects import COUNTS_IN_MEMORY, function_name
from autosched.graph.graph import Graph, Here, Task, Value
from autosched.program.program import Copy, Free, Program, Receive, Run, Send
from autosched.program.residency import Buffers
from autosched.runtime.backends import Emulating, Located, Step, Transfer
from autosched.runtime.threads.tapes import Call

__all__ = ["Known", "Memory"]

_ATTEMPTS = 16  # at knowing inputs, each of which takes longer than a check
_MANY = 16  # inputs; fewer are checked faster than they are recognized


class Memory:
    """The slots of a program, and the effect of its instructions on them."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        located: Located | None = None,
        emulating: Emulating | None = None,
    ):
        self.program = program
        self.graph = graph
        self.located = located
        self.emulating = emulating
        self.data: list[Any] = [None]  # slot 0 is for results that nothing uses
        self.reads: dict[int, list[int]] = {}  # of each run and copy, the slots it reads
        self.made: dict[int, list[int | None]] = {}  # and fills; None for unused results
        self.freed: dict[int, list[int]] = {}
        self.sharing: dict[int, list[int]] = {}  # slots that share memory, by each of them
        self._outputs: list[tuple[str, int]] = []
        sources = self._assign()
        present = [value for value in graph.sources if value.index in sources]
        self._names = [value.name for value in present if value.tensor is None]
        constants = [value for value in present if value.tensor is not None]
        self._constants = {value.name: value.tensor for value in constants}
        index = {name: graph.value(name).index for name, _ in program.inputs}
        self.written = {name for name in index if graph.last_version(index[name])}
        self._used = {name for name in index if graph.is_used(index[name])}
        # The inputs, by name, and constants that must not share memory, if tasks write some.
        self.kept_apart = (
            [name for name in self._names if name in self._used] if self.written else []
        )
        self.used_constants = [item for name, item in self._constants.items() if name in self._used]
        self._in_parts = {name for name in self.written if graph.in_parts(index[name])}
        self.homes = {graph.values[index].name: slot for index, slot in sources.items()}
        copied = {i.value for i in program if isinstance(i, (Copy, Send, Receive))}
        self._counted = _counted(program, graph)
        # Inputs with several tensors, each of which is written by itself, or copied by itself.
        self._separate = self._in_parts | self.written & copied
        placed = [(name, self._place(device)) for name, device in program.inputs]
        self._placed = [(name, device) for name, device in placed if device is not None]
        self._entangled: set[str] = set()
        self._known: Known | None = None
        self._attempts = 0  # at knowing inputs
        self._addresses: dict[str, int] = {}  # of the inputs that were checked last
        self._blank = self.data.copy()

    # ---- during a run

    def fill(self, inputs: Mapping[str, Any], is_checked: bool = False) -> None:
        """Put the caller's inputs into their slots. Raises as ``check`` does."""
        if not is_checked:
            self.check(inputs)
        in_order = list(inputs) == self._names
        items = inputs.values() if in_order else map(inputs.__getitem__, self._names)
        self.data[1 : 1 + len(self._names)] = items

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise GraphError for missing and unknown inputs, and for inputs on other devices.

        Raises HazardError if one that tasks write shares its memory with another, or a constant, or
        itself.
        """
        if list(inputs) != self._names and inputs.keys() != {*self._names}:
            self.graph.bind(inputs)
        self._entangled = set()
        if not self.written and not self._placed:
            return
        if self._known is not None and self._known.recognizes(inputs):
            return
        given = {**self._constants, **inputs}
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
        if apart:
            self._know(inputs)

    def _know(self, inputs: Mapping[str, Any]) -> None:
        """Note inputs that passed all checks, so that similar ones are recognized.

        Those stay where they are that are at the same addresses as in the last check.
        """
        is_worthwhile = len(inputs) > _MANY and self._attempts < _ATTEMPTS
        if not is_worthwhile or not all(hasattr(item, "data_ptr") for item in inputs.values()):
            return
        before = self._addresses
        self._addresses = {name: item.data_ptr() for name, item in inputs.items()}
        if before:
            self._attempts += 1
            fixed = {name for name, at in self._addresses.items() if before.get(name) == at}
            self._known = Known.of(inputs, fixed, self.used_constants, self.kept_apart)

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

    def check_copy(self, i: int, copy: Copy) -> None:
        """Raise HazardError if ``as_strided`` would find other elements in a copy."""
        value = self.graph.value(copy.value)
        absolute = self._counted.get((value.root, copy.destination))
        for leaf in flatten(self.data[self.reads[i][0]]) if absolute is not None else ():
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
        return {label: self.data[slot] for label, slot in self._outputs}

    def clear(self) -> None:
        """Drop everything but the constants."""
        self.data[:] = self._blank

    def spoil(self, spoil: Callable[[Any], None]) -> None:
        """Do to all that the run has left what is done to freed memory.

        Inputs, constants and outputs are kept, and what shares memory with them.
        """
        for slot in self._own:
            if self.data[slot] is not None:
                spoil(self.data[slot])

    @cached_property
    def _own(self) -> list[int]:
        """The slots whose memory belongs to the run."""
        kept = [*self.homes.values(), *(slot for _, slot in self._outputs)]
        others = {slot for one in kept for slot in self.sharing[one]}
        return [slot for slot in self.sharing if slot not in others]

    # ---- steps

    def call(self, i: int, task: Task, dropped: int) -> Call | None:
        """Return the call of a task with one result that is only ``fn(a)`` or ``fn(a, b)``.

        None for any other. The call drops slot ``dropped`` at its end.
        """
        if not isinstance(task.result, Value) or task.kwargs or not 1 <= len(task.args) <= 2:
            return None
        target = self.made[i][0]
        fn = task.fn
        if target is None or fn is None or not all(_is_whole(fn, arg) for arg in task.args):
            return None
        first, second = ([self._argument(i, task, arg) for arg in task.args] + [-1])[:2]
        return i, fn, target, first, second, dropped

    def run(self, i: int, task: Task, dropped: int) -> Step:
        """Return the call of any task as a step, which drops slot ``dropped`` at its end."""
        data = self.data
        made = self.made[i]
        call = self._called(i, task)
        if isinstance(task.result, Value) and (target := made[0]) is not None:

            def single() -> None:
                data[target] = call()
                data[dropped] = None

            return single

        def step() -> None:
            results = task.results(call())
            for slot, (_, item) in zip(made, results, strict=True):
                if slot is not None:
                    data[slot] = item
            data[dropped] = None

        return step

    def _called(self, i: int, task: Task) -> Callable[[], Any]:
        """Return a task's function with its arguments, evaluated at each call.

        On a storage device a task gives what it reads as it is: the copy from there reads it.
        """
        data = self.data
        fn = task.fn
        if is_storage(self.program.instructions[i].stream.device):
            return lambda: fn
        args = task.args
        kwargs = task.kwargs
        assert fn is not None
        if any(isinstance(leaf, Here) for leaf in flatten((args, kwargs))):

            def located(leaf: Any) -> Any:
                return self._here(i, leaf) if isinstance(leaf, Here) else leaf

            args, kwargs = transform(located, (args, kwargs))
        fixed = all(_is_fixed(fn, item) for item in kwargs.values())
        if args and fixed and all(_is_whole(fn, arg) for arg in args):
            slots = [self._argument(i, task, arg) for arg in args]
            if len(slots) == 1:
                (only,) = slots
                return lambda: fn(data[only], **kwargs)
            gather = itemgetter(*slots)
            return lambda: fn(*gather(data), **kwargs)
        slot_of = dict(zip((use.value for use in task.reads), self.reads[i], strict=True))

        def current(leaf: Any) -> Any:
            return data[slot_of[leaf.index]] if isinstance(leaf, Value) else leaf

        def general() -> Any:
            found, named = transform(current, (args, kwargs))
            return fn(*found, **named)

        return general

    def _argument(self, i: int, task: Task, arg: Any) -> int:
        """Return the slot of an argument. An argument that is not a Value gets a permanent slot."""
        if isinstance(arg, Value):
            return self.reads[i][[use.value for use in task.reads].index(arg.index)]
        if isinstance(arg, Here):
            arg = self._here(i, arg)
        self.data.append(arg)
        self._blank.append(arg)
        return len(self.data) - 1

    def _here(self, i: int, leaf: Here) -> Any:
        """Return the device that replaces ``Here`` in a run."""
        run = self.program.instructions[i]
        assert isinstance(run, Run)
        device = run.stream.device
        if self.emulating is not None:
            return self.emulating.here(device, leaf.usual)
        return self._place(device) or leaf.usual

    def _place(self, device: str) -> Any:
        """Return the ``.device`` of tensors on a device, None where any is accepted."""
        return None if self.located is None else self.located.place(device)

    def copy(self, i: int, copy: Copy, transfer: Transfer) -> Step:
        """Return a copy as a step."""
        data = self.data
        source = self.reads[i][0]
        target = self.made[i][0]
        assert target is not None

        def step() -> None:
            data[target] = transfer(data[source], data[target] if copy.overwrite else None)

        def checked() -> None:
            self.check_copy(i, copy)
            step()

        is_counted = (self.graph.value(copy.value).root, copy.destination) in self._counted
        return checked if is_counted else step

    def exchange(self, i: int, half: Send | Receive, transfer: Transfer) -> Step:
        """Return a send or a receive as a step."""
        data = self.data
        if isinstance(half, Send):
            (source,) = self.reads[i]
            return lambda: transfer(data[source], None)
        (target,) = self.made[i]
        assert target is not None

        def step() -> None:
            data[target] = transfer(None, data[target] if half.overwrite else None)

        return step

    def free(self, i: int, spoil: Callable[[Any], None] | None) -> Step:
        """Return a free as a step; ``spoil`` is what the backend does to freed memory."""
        data = self.data
        slots = self.freed[i]
        if spoil is None and len(slots) == 1:
            return partial(setitem, data, slots[0], None)

        def step() -> None:
            for slot in slots:
                if spoil is not None:
                    spoil(data[slot])
                data[slot] = None

        return step

    def arguments(self, i: int) -> list[Any]:
        """Return the current values that a run or a copy reads; nothing for other instructions."""
        return [self.data[slot] for slot in self.reads.get(i, ())]

    def results(self, i: int) -> list[Any]:
        """Return the current results of a run, without those that nothing uses."""
        return [self.data[slot] for slot in self.made[i] if slot is not None]

    # ---- numbering

    def _assign(self) -> dict[int, int]:
        """Give each buffer a slot; return the slots of inputs and constants by value (index)."""
        values = self.graph.values
        homes = dict(self.program.inputs)
        # Those of other ranks have no home in this one's part of a program.
        present = [value for value in self.graph.sources if value.name in homes]
        sources = {value.index: homes[value.name] for value in present}
        buffers = Buffers(self.graph, sources)
        # Inputs come first, so that a run can put them into their slots at once.
        given = sorted(buffers.sources.items(), key=lambda pair: values[pair[0]].tensor is not None)
        slots = {buffer: self._new(values[v].tensor) for v, buffer in given}
        for step in buffers.walk(self.program.instructions):
            for made in step.made:
                if made is not None and made not in slots:
                    slots[made] = self._new(None)
                    if made.base is not None:
                        self._share(slots[made], slots[made.base])
            if isinstance(step.instruction, Free):
                self.freed[step.at] = self.sharing[slots[step.reads[0]]]
            elif isinstance(step.instruction, (Run, Copy, Send, Receive)):
                self.reads[step.at] = [slots[buffer] for buffer in step.reads]
                self.made[step.at] = [None if made is None else slots[made] for made in step.made]
        for label, device in self.program.outputs:
            index = self.graph.outputs[label]
            final = buffers.find(index, self.graph.last_version(index), device)
            self._outputs.append((label, slots[final]))
        return {value: slots[buffer] for value, buffer in buffers.sources.items()}

    def _new(self, data: Any) -> int:
        slot = len(self.data)
        self.sharing[slot] = [slot]
        self.data.append(data)
        return slot

    def _share(self, slot: int, base: int) -> None:
        """Note that a slot shares memory with another."""
        self.sharing[base].append(slot)
        self.sharing[slot] = self.sharing[base]


def _is_whole(fn: Any, arg: Any) -> bool:
    """Whether an argument is the same in every run, or a single value."""
    return isinstance(arg, Value) or _is_fixed(fn, arg)


def _is_fixed(fn: Any, tree: Any) -> bool:
    """Whether an argument contains no value, and nothing that a run may change.

    Torch operators do not change lists.
    """
    if not isinstance(tree, (tuple, list, dict)):
        return not isinstance(tree, Value)
    if not isinstance(tree, tuple) and not hasattr(fn, "_schema"):
        return False
    return all(_is_fixed(fn, item) for item in (tree.values() if isinstance(tree, dict) else tree))


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


class Known:
    """Inputs with the same names, and with tensors of the same properties, as earlier ones.

    Properties are those of ``tensor_guards``. Inputs that are ``fixed`` must also be at the same
    addresses. Those named in ``apart`` must share no memory with each other or with ``constants``.

    >>> import torch, torch._dynamo
    >>> inputs = {"x": torch.zeros(3), "w": torch.zeros(3)}
    >>> known = Known.of(inputs, {"w"}, [], apart={"x", "w"})
    >>> known.recognizes({"x": torch.ones(3), "w": inputs["w"]})
    True
    >>> known.recognizes({"x": torch.ones(3), "w": torch.zeros(3)})
    False
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        fixed: Collection[str],
        constants: Collection[Any],
        apart: Collection[str],
        are_alike: Callable[[Mapping[str, Any]], bool],
    ):
        self._are_alike = are_alike
        self._moving = [name for name in apart if name not in fixed]
        stay = [*(inputs[name] for name in apart if name in fixed), *constants]
        spans = sorted(map(_span, stay)) if apart else []
        self._firsts = [first for first, _ in spans]
        self._ends = [end for _, end in spans]

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, Any],
        fixed: Collection[str],
        constants: Collection[Any],
        apart: Collection[str],
    ) -> Known | None:
        """Return known inputs; None if they cannot be recognized.

        They must be tensors that ``tensor_guards`` can compare, and none of those that must be
        ``apart`` may share memory.
        """
        are_alike = recognizer(inputs, fixed)
        if are_alike is None:
            return None
        if apart and not are_apart([*map(inputs.__getitem__, apart), *constants]):
            return None
        return cls(inputs, fixed, constants, apart, are_alike)

    def recognizes(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether these inputs differ from the known ones only in what does not matter."""
        if not self._are_alike(inputs):
            return False
        return not self._moving or self._keeps_away(inputs[name] for name in self._moving)

    def _keeps_away(self, moving: Iterable[Any]) -> bool:
        """Return whether tensors share no memory with each other and with what stays."""
        spans = sorted(map(_span, moving))
        if any(end > after for (_, end), (after, _) in pairwise(spans)):
            return False
        # No span ends behind the beginning of this one and begins before its end.
        return all(
            bisect_right(self._ends, first) == bisect_left(self._firsts, end)
            for first, end in spans
        )


def _span(tensor: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's storage: the first, and that behind the last."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()
