"""Cache recordings of runs by the kind of their inputs.

The first run with inputs of a kind is an ordinary one: it warms up what libraries initialise at
their first use. The second is recorded, and those after it are replayed. Also reports why a run was
not replayed. A recording that failed for a reason that may pass, such as memory that was short, is
tried again in the next run.

A recorded segment reads and writes the addresses that it was recorded with. So everything that
crosses the border of a segment keeps its address:

    inputs on devices    are used where they are, if they come at the same addresses each time;
                         weights then need no copies. An input that comes from another address is
                         copied, on the caller's stream, into a buffer of the recording, and copied
                         back if tasks write it; this costs one more recording
    copies to devices    go into the memory that they went into during recording
    outputs              are returned as copies, so that the next replay does not change them; those
                         that are an input, or a view of one, are returned as that input or its view
    constants            are used where they are

All memory that a recording allocates, in segments and by copies between them, comes from one pool
per device, in which blocks are allocated and freed in the order of their streams, as the program
says. Frees are instructions, so a block that is reused within a run is reused in the same order in
each replay. So a recording needs no more memory than the program, and no separate memory plan.

A capture that fails has had no effect, so its segment and the rest of that run are executed as
usual, and allocate nothing from the pool. Knows that the backend can record what steps issue to a
device, and replay it, and not how.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autosched._lib.copying import span
from autosched._lib.logs import LOG
from autosched._lib.recent import MOST, Recent
from autosched._lib.tensor_guards import Recognizer
from autosched._lib.tree import flatten, transform
from autosched.codegen.threads import Emitted
from autosched.errors import ScheduleError
from autosched.program.program import Copy, Record, Run, Wait
from autosched.runtime.backends import Backend, Capabilities, Step
from autosched.runtime.compiler import Compiler, Part
from autosched.runtime.memory import recognizing
from autosched.runtime.replay.segments import Segment, Segmented

if TYPE_CHECKING:
    from autosched.runtime.replay.cuda_graphs import Replay

_ATTEMPTS = 3  # recordings that may fail for reasons that pass, before runs are ordinary for good
_SEEN = 64  # kinds that are remembered until they come again
_Addresses = Mapping[str, Hashable]  # of the tensors of each input on a device


class Recordings:
    """The recordings of a schedule, by the kind of their inputs.

    ``physical`` is the physical device of each name; None for the host's.
    """

    def __init__(
        self,
        cut: Segmented,
        physical: Mapping[str, str | None],
        compiler: Compiler,
        backend: Replay,
    ):
        self.cut = cut
        self.physical = physical
        self.compiler = compiler
        self.backend = backend
        self.graph = graph = compiler.graph
        self.memory = compiler.memory
        self.reason = backend.refusal()
        self.by_kind = Recent[Hashable, Recording](self._evict)
        self.seen = Recent[Hashable, _Addresses](most=_SEEN)  # by kind, in the last ordinary run
        self.moving: set[str] = set()  # inputs that do not come at the same address each time
        self.pending: Recording | None = None  # of the run in progress
        self.last: Recording | None = None  # that was replayed last; to look it up takes long
        self.failures = 0
        self.has_evicted = False
        # The inputs that are on accelerators, and their devices.
        homes = [(name, home) for name, home in cut.whole.inputs if name in graph.input_names]
        self.on_devices = {name: home for name, home in homes if physical[home]}
        self.written = [name for name in self.on_devices if name in self.memory.written]
        # Of these inputs devices read numbers that are not tensors.
        copies = [i for i in cut.whole if isinstance(i, Copy) and physical[i.destination]]
        copied = {copy.value for copy in copies} | self.on_devices.keys()
        self.with_numbers = copied.intersection(graph.input_names)

    def recognized(self, inputs: Mapping[str, Any]) -> Recording | None:
        """Return the recording that was replayed last, if it is certainly valid for these inputs."""
        last = self.last
        return None if last is None or last.known is None or not last.known(inputs) else last

    def find(
        self, inputs: Mapping[str, Any], known: Recording | None, has_deadline: bool
    ) -> Recording | None:
        """Return the recording that replays, or is made by, a run on these inputs.

        None for an ordinary run. A run with a deadline is not recorded. ``known`` is what
        ``recognized`` returned.
        """
        pending = self.pending  # of a run that did not finish
        if pending is not None and self.by_kind.get(pending.kind) is not pending:
            pending.close()
        self.pending = known or self._of_kind(inputs, has_deadline)
        return self.pending

    def _of_kind(self, inputs: Mapping[str, Any], has_deadline: bool) -> Recording | None:
        kind = self._kind(inputs)
        addresses = self._addresses(inputs)
        recording = self.by_kind.get(kind)
        before = self.seen.get(kind, {}) if recording is None else recording.fixed
        moved = [name for name, address in before.items() if addresses[name] != address]
        if recording is not None and not moved:
            return recording
        self.moving.update(moved)
        if recording is not None:
            self.by_kind.pop(kind).close()
            self.last = None
            self.seen.use(kind, addresses)
        if has_deadline or kind not in self.seen or not self._may_record(inputs):
            self.note(inputs)
            return None
        fixed = {name: at for name, at in addresses.items() if name not in self.moving}
        return Recording(self, kind, inputs, fixed)

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note that there is an ordinary run with inputs of this kind."""
        if self.reason is None:
            self.seen.use(self._kind(inputs), self._addresses(inputs))

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the run, when the caller's streams wait for them."""
        recording = self.pending
        assert recording is not None
        outputs = recording.outputs(inputs)
        if recording is self.last:
            return outputs
        if recording.reason is None:
            self.by_kind.use(recording.kind, recording)
            self.last = recording
        else:
            self.failures += 1
            if not recording.may_succeed_later or self.failures == _ATTEMPTS:
                self._refuse(recording.reason)
        return outputs

    def _evict(self, recording: Recording) -> None:
        recording.close()
        if not self.has_evicted:
            self.has_evicted = True
            what = f"inputs are of more than {MOST} kinds: shapes, strides, dtypes and numbers"
            message = f"recordings are dropped, and runs recorded again: {what} make a kind"
            warnings.warn(message, RuntimeWarning, stacklevel=6)

    def _may_record(self, inputs: Mapping[str, Any]) -> bool:
        for name, device in self.on_devices.items():
            for leaf in flatten(inputs[name]) if self.reason is None else ():
                if hasattr(leaf, "data_ptr") and (what := self.backend.stays(leaf, device)):
                    self._refuse(f"input {name!r} is {what}")
        return self.reason is None

    def _refuse(self, reason: str) -> None:
        """Record nothing from now on. Existing recordings are still replayed."""
        self.reason = reason
        warnings.warn(f"runs are not replayed: {reason}", RuntimeWarning, stacklevel=6)

    def _kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """Return what must be equal for a recording to apply.

        That is all of the inputs but addresses and elements of tensors. Host values that are not
        tensors are ignored.
        """
        return tuple(_key(item, name in self.with_numbers) for name, item in sorted(inputs.items()))

    def _addresses(self, inputs: Mapping[str, Any]) -> dict[str, Hashable]:
        """Return the addresses of inputs on devices."""
        return {
            name: tuple(leaf.data_ptr() for leaf in flatten(inputs[name]) if is_strided(leaf))
            for name in self.on_devices
        }


def _key(item: Any, with_numbers: bool) -> Hashable:
    """Return a key for the kind of a tree; ``with_numbers`` also of leaves that are no tensors."""
    kind = type(item).__name__
    if is_strided(item):
        return kind, item.dtype, item.shape, item.stride(), item.device, item.requires_grad
    if isinstance(item, dict):
        return tuple((key, _key(part, with_numbers)) for key, part in item.items())
    if isinstance(item, (tuple, list)):
        return kind, *(_key(part, with_numbers) for part in item)
    if item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
        return (kind, item) if with_numbers else kind
    return kind, id(item) if with_numbers else None


class Recording:
    """A run of the segmented program of ``parts`` for inputs of one kind.

    The first functions record; later ones replay. ``fixed`` are the inputs on devices that are used
    where they are, with their addresses.
    """

    reason: str | None = None  # why it is not replayed
    may_succeed_later = False
    known: Recognizer | None = None  # whether it is certainly valid for inputs
    _ordinary: Emitted  # of the run that records
    _replayed: Emitted | None = None
    _outputs: Outputs | None = None

    def __init__(
        self,
        parts: Recordings,
        kind: Hashable,
        inputs: Mapping[str, Any],
        fixed: _Addresses,
    ):
        self.parts = parts
        self.kind = kind
        self.fixed = fixed
        self._recorder = parts.backend.recorder()
        self._buffers: dict[str, Any] = {}  # for inputs that are not fixed
        self._graphs: dict[int, Step | None] = {}  # by position in the segmented program
        # By slot, the recording's memory that instructions outside segments access.
        self._held: dict[int, Any] = {}
        self._homes = {*parts.memory.homes.values()}
        moving = [name for name in parts.on_devices if name not in fixed]
        try:
            self._buffers = {name: transform(_buffer, inputs[name]) for name in moving}
        except Exception as error:
            self._give_up("allocating buffers for inputs", error)

    def emitted(self, inputs: Mapping[str, Any]) -> Emitted:
        """Return the functions of a run, and fill its slots.

        Inputs that must be copied are copied immediately.
        """
        memory = self.parts.memory
        self.parts.backend.settle()
        for name, buffer in self._buffers.items():
            _fill(buffer, inputs[name])
            memory.data[memory.homes[name]] = buffer
        for slot, item in self._held.items():
            memory.data[slot] = item
        return self._replayed or self._recording()

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs, and leave inputs as tasks left them.

        The caller's streams must wait for the run first.
        """
        parts = self.parts
        outputs = parts.memory.outputs()
        for name in parts.written:
            new = flatten(self._buffers.get(name, inputs[name]))
            for leaf, changed in zip(flatten(inputs[name]), new, strict=True):
                if leaf is changed:
                    parts.backend.wrote(leaf)
                else:
                    leaf.copy_(changed)
        if self._outputs is None:
            self._recorded(inputs, outputs)
        else:
            outputs.update(self._outputs(inputs))
        parts.backend.settled()
        return outputs

    def close(self) -> None:
        """Release everything that was recorded."""
        self._recorder.close()

    # ---- recording

    def _recording(self) -> Emitted:
        """Return the functions of a run that records, all of which the calling thread executes."""
        backend = self.parts.backend.alone(recording=False)

        def call(i: int, part: Segment | int) -> Step | None:
            if isinstance(part, Segment):
                return partial(self._record_and_replay, i, part, backend)
            return self._outside(part)

        self._ordinary = self._emit(call, backend)
        return self._ordinary

    def _emit(self, call: Callable[[int, Segment | int], Step | None], backend: Backend) -> Emitted:
        """Return functions; ``call`` returns the effects of segments and other instructions."""
        cut = self.parts.cut
        calls = [None if part is None else call(i, part) for i, part in enumerate(cut.works)]
        return self.parts.compiler.emit(Part(cut.program, calls, cut.positions, backend))

    def _record_and_replay(self, at: int, segment: Segment, backend: Backend) -> None:
        """Record a segment, and replay it; run it if recording fails."""
        self._record(at, segment)
        if at not in self._graphs:
            inside = self._inside(segment, backend)
            self._ordinary.inner.insert(0, inside.module)  # it may raise there
            _execute(inside)
        if (enter := Capabilities(backend).enter((segment.stream,))) is not None:
            enter()
        if (replay := self._graphs.get(at)) is not None:
            replay()

    def _inside(self, segment: Segment, backend: Backend) -> Emitted:
        """Return the function of a segment."""
        compiler = self.parts.compiler
        rest = iter(segment.positions)
        own = [None if isinstance(i, (Record, Wait)) else next(rest) for i in segment.program]
        calls = [None if position is None else compiler.calls[position] for position in own]
        at = [segment.positions[0] if position is None else position for position in own]
        return compiler.emit(Part(segment.program, calls, at, backend))

    def _record(self, at: int, segment: Segment) -> None:
        """Record a segment, or note why not, and leave its slots unchanged."""
        if self.reason is not None:
            return
        parts = self.parts
        memory = parts.memory
        before = memory.data.copy()
        # Memory that the segment frees is not kept in use, or the segment could not allocate it
        # again as the program does. If recording fails, nothing else is allocated from the pool.
        for slot in (slot for i in segment.positions for slot in memory.freed.get(i, ())):
            before[slot] = transform(self._recorder.borrowed, before[slot])
        position = segment.positions[0]

        def issue() -> None:
            nonlocal position
            inside = self._inside(segment, parts.backend.alone(recording=True))
            try:
                _execute(inside)
            except Exception as error:
                position = inside.fault(error)
                raise
            self._check(segment)

        tasks = [parts.graph.task(run.task) for run in segment.program if isinstance(run, Run)]
        has_copies = any(isinstance(instruction, Copy) for instruction in segment.program)
        try:
            if has_copies or not all(task.view for task in tasks):
                arguments = [(*task.shared, task.args, dict(task.kwargs)) for task in tasks]
                self._graphs[at] = self._recorder.record(segment.stream, issue, flatten(arguments))
            else:
                issue()
                self._graphs[at] = None
        except _RefusalError as refusal:
            memory.data[:] = before
            self.reason = str(refusal)
        except Exception as error:
            memory.data[:] = before
            run = parts.cut.whole.instructions[position]
            name = f"task {run.task!r}" if isinstance(run, Run) else f"{run}"
            self._give_up(name, error, for_good=True)

    def _give_up(self, name: str, error: Exception, for_good: bool = False) -> None:
        """Note why this is not replayed. Raises an error for which a run would fail in any case."""
        self.may_succeed_later = self.parts.backend.may_pass(error)
        if not self.may_succeed_later and not for_good:
            raise error
        first_line = str(error).strip().partition("\n")[0]
        self.reason = f"{name} failed: {type(error).__name__}: {first_line}"
        LOG.debug("%s is not recorded", name, exc_info=True)

    def _check(self, segment: Segment) -> None:
        """Raise _RefusalError if a task returned a result that no replay computes again."""
        parts = self.parts
        for i in segment.positions:
            run = parts.cut.whole.instructions[i]
            if not isinstance(run, Run):
                continue
            for leaf in flatten(parts.memory.results(i)):
                what = None if leaf is None else parts.backend.stays(leaf, run.stream.device)
                if what:
                    raise _RefusalError(
                        f"task {run.task!r} returned {what}, which a replay would not compute again"
                    )

    def _outside(self, i: int) -> Step | None:
        """Return an instruction outside segments, which retains the memory it accesses."""
        parts = self.parts
        call: Step | None = parts.compiler.calls[i]
        copy = parts.cut.whole.instructions[i]
        if not isinstance(copy, Copy) or call is None:
            return call
        arrives = parts.physical[copy.destination] and not copy.overwrite

        def step() -> None:
            if parts.physical[copy.source]:
                self._hold(parts.memory.reads[i][0])
            if not arrives:
                call()
                return
            self._take(copy, call)
            slot = parts.memory.made[i][0] or 0
            made = parts.graph.value(copy.value).producer is not None
            for leaf in flatten(parts.memory.data[slot]):
                what = None if leaf is None else parts.backend.stays(leaf, copy.destination)
                if what is not None and made and self.reason is None:
                    self.reason = f"{copy.value!r}, which tasks make elsewhere, is {what}"
            self._hold(slot)

        return step

    def _take(self, copy: Copy, call: Step) -> None:
        """Copy into memory of the pool, unless recording has failed, or fails now."""
        if self.reason is None:
            try:
                with self._recorder.allocating(copy.destination):
                    call()
                return
            except Exception as error:
                self._give_up(f"{copy}", error)
                self._recorder.close()  # its memory may be what is missing
        call()

    def _hold(self, slot: int) -> None:
        if self.reason is None and slot not in self._homes:
            self._held[slot] = transform(self._recorder.borrowed, self.parts.memory.data[slot])

    def _recorded(self, inputs: Mapping[str, Any], outputs: dict[str, Any]) -> None:
        """Be ready to replay the run that was recorded, and replace its outputs by copies.

        If there is no room for these, the caller gets the outputs, and no replay will overwrite them.
        """
        parts = self.parts
        on_devices = [label for label, at in parts.cut.whole.outputs if parts.physical[at]]
        made = {label: outputs[label] for label in on_devices}
        self._outputs = Outputs(made, {**inputs, **self._buffers}, parts.memory.constants)
        try:
            outputs.update(self._outputs(inputs))
        except Exception as error:
            self._give_up("copying the outputs", error)
            if parts.compiler.can.hands_out is not None:
                parts.compiler.can.hands_out.hand_out(outputs)
        if self.reason is not None:
            return
        self._replayed = self._emit(self._again, parts.compiler.backend)
        if all(map(is_strided, inputs.values())):
            kept = parts.memory.used_constants, parts.memory.kept_apart
            self.known = recognizing(inputs, self.fixed, *kept)

    # ---- replaying

    def _again(self, at: int, part: Segment | int) -> Step | None:
        """Return the replay of a segment, or another instruction; copies go where they went."""
        if isinstance(part, Segment):
            return self._graphs[at]
        parts = self.parts
        memory = parts.memory
        copy = parts.cut.whole.instructions[part]
        if not isinstance(copy, Copy) or not parts.physical[copy.destination] or copy.overwrite:
            return parts.compiler.calls[part]
        data = memory.data
        source = memory.reads[part][0]
        transfer = parts.compiler.backend.transfer(copy)
        into = self._held[memory.made[part][0] or 0]

        def step() -> None:
            _check_alike(data[source], into, copy.value)
            memory.check_copy(copy, data[source])
            transfer(data[source], into)

        return step


class _RefusalError(Exception):
    """The reason why a segment was not recorded, for the user."""


def _execute(emitted: Emitted) -> None:
    """Execute a function of the calling thread."""
    for part in emitted.threads.get(None, ()):
        part([])


def _buffer(leaf: Any) -> Any:
    """Return uninitialized memory for an input."""
    if not hasattr(leaf, "data_ptr"):
        return leaf
    made = leaf.detach().new_empty_strided(leaf.shape, leaf.stride())
    return made.requires_grad_() if leaf.requires_grad else made


def _fill(buffer: Any, item: Any) -> None:
    for into, leaf in zip(flatten(buffer), flatten(item), strict=True):
        if hasattr(leaf, "data_ptr"):
            _row(into).copy_(_row(leaf))


def _row(tensor: Any) -> Any:
    """Return all memory that a tensor spans, so that one that overlaps itself can be copied."""
    return tensor.detach().as_strided((span(tensor) if tensor.numel() else 0,), (1,))


def _check_alike(new: Any, into: Any, name: str) -> None:
    """Raise ScheduleError for a tensor of another shape or dtype than the recorded one."""
    for leaf, old in zip(flatten(new), flatten(into), strict=True):
        if hasattr(old, "data_ptr") and (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            raise ScheduleError(
                f"{name!r} is {leaf.dtype}{list(leaf.shape)} now, and was recorded as "
                f"{old.dtype}{list(old.shape)}: what changes its shape from run to run cannot be "
                "replayed; leave replay=True out"
            )


# ---- outputs that later replays do not overwrite


class Outputs:
    """Returns copies of ``outputs``, by name, after each replay.

    ``lent`` are the inputs of the recorded run, ``lasting`` other memory that keeps its address.
    An output that is an input, or a view of one, is returned as that input or a view of it, as in
    any run. Outputs that share memory in the recording share it in the copy. Compares addresses,
    and reads no element.

    >>> import torch
    >>> x, y = torch.zeros(2), torch.ones(2)
    >>> again = Outputs({"same": x, "part": x[1:], "new": y}, {"x": x}, {})
    >>> found = again({"x": (other := torch.tensor([2.0, 3.0]))})
    >>> found["same"] is other, found["part"], found["new"], found["new"] is y
    (True, tensor([3.]), tensor([1., 1.]), False)
    """

    def __init__(
        self,
        outputs: Mapping[str, Any],
        lent: Mapping[str, Any],
        lasting: Mapping[str, Any],
    ):
        known = {_storage(leaf): (key, leaf) for key, leaf in _tensors(lent)}
        kept = {_storage(leaf) for _, leaf in _tensors(lasting)}
        self._rows: dict[Hashable, Any] = {}  # the bytes of storages, by their addresses
        self._viewed: dict[str, None] = {}  # the inputs that outputs are views of

        def found(leaf: Any) -> Any:
            """Return a tensor as a view; unchanged if its memory keeps its address or is unknown."""
            if not is_strided(leaf) or not leaf.numel() or (address := _storage(leaf)) in kept:
                return leaf
            of: Hashable = address
            if address in known:
                (name, number), base = known[address]
                of = name, number
                self._viewed[name] = None
            else:
                base = self._rows.setdefault(address, _bytes(leaf))
            first = leaf.data_ptr() - base.data_ptr()
            like = leaf.detach().new_empty(0)
            return _View(of, first, leaf is base, like, leaf.shape, leaf.stride())

        self._trees = {label: transform(found, tree) for label, tree in outputs.items()}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a replay on these inputs.

        The caller's streams must wait for the replay first.
        """
        bases = {address: row.clone() for address, row in self._rows.items()}
        bases.update(_tensors({name: inputs[name] for name in self._viewed}))

        def made(leaf: Any) -> Any:
            return leaf.on(bases[leaf.of]) if isinstance(leaf, _View) else leaf

        return {label: transform(made, tree) for label, tree in self._trees.items()}


@dataclass(frozen=True)
class _View:
    """A tensor that begins ``first`` bytes into memory that is different in each run."""

    of: Hashable
    first: int
    is_whole: bool
    like: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def on(self, tensor: Any) -> Any:
        """Return the view on a tensor's memory."""
        if self.is_whole:
            return tensor
        start = tensor.storage_offset() * tensor.element_size()
        offset = (self.first + start) // self.like.element_size()
        if tensor.dtype == self.like.dtype:
            return tensor.detach().as_strided(self.shape, self.stride, offset)
        return self.like.new_empty(0).set_(
            tensor.untyped_storage(), offset, self.shape, self.stride
        )


def is_strided(leaf: Any) -> bool:
    """Whether this is a tensor that is described by its memory and strides."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and not (leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)
    )


def _tensors(trees: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield the tensors of trees, with the name of the tree and the number of the leaf."""
    for name, tree in trees.items():
        for number, leaf in enumerate(flatten(tree)):
            if is_strided(leaf) and leaf.numel():
                yield (name, number), leaf


def _storage(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _bytes(tensor: Any) -> Any:
    """Return all bytes of a tensor's storage."""
    first = tensor.detach().as_strided((1,), (1,), 0).view(sys.modules["torch"].uint8)
    return first.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)
