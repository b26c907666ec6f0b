"""Record one run segment by segment, and replay it.

A recorded segment reads and writes the addresses that it was recorded with. So everything that
crosses the border of a segment keeps its address:

    inputs on devices    are used where they are, if they come at the same addresses each time;
                         weights then need no copies. An input that comes from another address is
                         copied, on the caller's stream, into a buffer that the recording keeps, and
                         copied back if tasks write it; this costs one more recording
    copies to devices    go into the memory that they went into during recording
    outputs              are returned as copies, so that the next replay does not change them; those
                         that are an input, or a view of one, are returned as that input or its view
    constants            are used where they are

All memory that a recording allocates, in segments and by copies between them, comes from one pool
per device, in which blocks are allocated and freed in the order of their streams, as the program
says. Frees are instructions, so a block that is reused within a run is reused in the same order in
each replay. So a recording needs no more memory than the program, and no separate memory plan.

What cannot be recorded is run: a capture that fails has had no effect, so its segment and the rest
of that run are executed as usual.

Knows that the backend can record what steps issue to a device, and replay it. Does not know how.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autosched._lib.copying import span
from autosched._lib.tree import flatten, transform
from autosched.errors import ScheduleError
from autosched.graph.graph import Graph
from autosched.program.program import Copy, Record, Run, Wait
from autosched.runtime.backends import Backend, Capabilities, Replayable, Step
from autosched.runtime.compiler import Compiler, Lines
from autosched.runtime.memory import Memory
from autosched.runtime.replay.outputs import Outputs
from autosched.runtime.replay.segments import Segment, Segmented
from autosched.runtime.threads.tapes import Stretch, Tape

__all__ = ["Parts", "Recording"]


@dataclass(frozen=True)
class Parts:
    """Parts of an executor that recordings share.

    ``physical`` is the physical device of each name; None for the host's.
    """

    cut: Segmented
    physical: Mapping[str, str | None]
    compiler: Compiler
    backend: Replayable

    @property
    def graph(self) -> Graph:
        """The graph of the whole program."""
        return self.compiler.graph

    @property
    def memory(self) -> Memory:
        """The tensors of a run."""
        return self.compiler.memory

    @cached_property
    def on_devices(self) -> dict[str, str]:
        """The inputs that are on accelerators, and their devices."""
        given = {*self.graph.input_names}
        return {
            name: device
            for name, device in self.cut.whole.inputs
            if name in given and self.physical[device]
        }


class Recording:
    """A run of a segmented program for inputs of one kind.

    The first tape records; later ones replay.

    ``fixed`` are the inputs on devices that are used where they are, with their addresses.
    """

    def __init__(self, parts: Parts, inputs: Mapping[str, Any], fixed: Mapping[str, Hashable]):
        self.parts = parts
        self.fixed = fixed
        self.reason: str | None = None  # why it was given up
        self._recorder = parts.backend.recorder()
        self._buffers = {
            name: transform(_buffer, inputs[name]) for name in parts.on_devices if name not in fixed
        }
        self._graphs: dict[int, Step] = {}  # by position in the cut program
        self._held: dict[
            int, Any
        ] = {}  # by slot, the recording's memory that instructions outside segments access
        self._at = _positions(parts.cut)
        self._homes = {*parts.memory.homes.values()}
        self._replayed: Tape | None = None
        self._outputs: Outputs | None = None

    def moved(self, places: Mapping[str, Hashable]) -> list[str]:
        """Return the inputs that are not at the address of the recording."""
        return [name for name, place in self.fixed.items() if places[name] != place]

    def tape(self, inputs: Mapping[str, Any]) -> Tape:
        """Return the steps of a run, and fill its slots.

        Inputs that must be copied are copied immediately.
        """
        backend = self.parts.backend
        memory = self.parts.memory
        backend.settle()
        for name, buffer in self._buffers.items():
            _fill(buffer, inputs[name])
            memory.data[memory.homes[name]] = buffer
        for slot, item in self._held.items():
            memory.data[slot] = item
        return self._replayed or self._recording()

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs when the caller's streams wait for them, and leave inputs as tasks left them."""
        parts = self.parts
        memory = self.parts.memory
        for name in (name for name in parts.on_devices if name in memory.written):
            for leaf, new in zip(
                flatten(inputs[name]), flatten(self._buffers.get(name, inputs[name])), strict=True
            ):
                if leaf is new:
                    parts.backend.wrote(leaf)
                else:
                    leaf.copy_(new)
        outputs = memory.outputs()
        if self._outputs is None:
            here = {
                label: outputs[label]
                for label, device in parts.cut.whole.outputs
                if parts.physical[device]
            }
            lasting = {
                value.name: value.tensor
                for value in parts.graph.sources
                if value.tensor is not None
            }
            self._outputs = Outputs(
                here, {**inputs, **self._buffers}, lasting, self._recorder.borrowed
            )
            self._replayed = None if self.reason else self._replaying()
        outputs.update(self._outputs(inputs))
        parts.backend.settled()
        return outputs

    def close(self) -> None:
        """Release everything that was recorded."""
        self._recorder.close()

    # ---- recording

    def _recording(self) -> Tape:
        """Return steps for the calling thread that record each segment, and replay it immediately.

        If one cannot be recorded, it and all later ones are run as usual.
        """
        cut = self.parts.cut
        backend = self.parts.backend.alone(recording=False)
        works = _works(cut)
        calls: list[Step | None] = [None] * len(cut.program)
        for i, part in works.items():
            calls[i] = _Whole(i, part) if isinstance(part, Segment) else self._kept(part)
        tape = Tape()
        for position, step in self.parts.compiler.tape(
            Lines(cut.program, calls, self._at, backend)
        ).steps.get(None, ()):
            if isinstance(step, _Whole):
                for inner in self._whole(step, backend):
                    tape.add(None, *inner)
            else:
                tape.add(None, position, step)
        return tape

    def _whole(self, whole: _Whole, backend: Backend) -> Iterator[tuple[int, Step | None]]:
        """Yield a step that records a segment and replays it, and the steps that run it if that fails."""
        segment = whole.segment
        yield segment.positions[0], lambda: self._record(whole)
        for position, step in self._inside(segment, backend):
            yield position, lambda step=step: None if whole.at in self._graphs else step()  # type: ignore[misc]
        yield segment.positions[0], Capabilities(backend).enter((segment.stream,))
        yield segment.positions[0], lambda: self._replay(whole.at)

    def _replay(self, at: int) -> None:
        if at in self._graphs:
            self._graphs[at]()

    def _inside(self, segment: Segment, backend: Backend) -> list[tuple[int, Step]]:
        """Return the steps of a segment, one by one."""
        at = iter(segment.positions)
        where = [-1 if isinstance(each, (Record, Wait)) else next(at) for each in segment.program]
        calls = [
            None if position < 0 else self.parts.compiler.calls[position] for position in where
        ]
        where = [position if position >= 0 else segment.positions[0] for position in where]
        found: list[tuple[int, Step]] = []
        for position, step in self.parts.compiler.tape(
            Lines(segment.program, calls, where, backend)
        ).steps.get(None, ()):
            if isinstance(step, Stretch):
                found += [(call[0], Stretch(step.data, [call])) for call in step.calls]
            else:
                found.append((position, step))
        return found

    def _record(self, whole: _Whole) -> None:
        """Record a segment, or return why not, and leave its slots unchanged."""
        if self.reason is not None:
            return
        memory = self.parts.memory
        segment = whole.segment
        before = memory.data.copy()
        position = segment.positions[0]

        def drain() -> None:
            nonlocal position
            for position, step in self._inside(segment, self.parts.backend.alone(recording=True)):  # noqa: B007
                step()
            self._check(segment)

        tasks = [self.parts.graph.task(run.task) for run in segment.program if isinstance(run, Run)]
        try:
            if all(task.view for task in tasks) and not any(
                isinstance(each, Copy) for each in segment.program
            ):
                drain()
                self._graphs[whole.at] = _nothing
            else:
                used = [
                    leaf
                    for task in tasks
                    for leaf in (*task.shared, *flatten((task.args, dict(task.kwargs))))
                ]
                self._graphs[whole.at] = self._recorder.record(segment.stream, drain, used)
        except Exception as error:
            memory.data[:] = before
            instruction = self.parts.cut.whole.instructions[position]
            name = (
                f"task {instruction.task!r}" if isinstance(instruction, Run) else f"{instruction}"
            )
            self.reason = (
                str(error)
                if isinstance(error, _RefusalError)
                else f"{name} failed: {_first_line(error)}"
            )

    def _check(self, segment: Segment) -> None:
        """Raise _RefusalError if a task of a segment returned a result that no replay computes again."""
        for i in segment.positions:
            run = self.parts.cut.whole.instructions[i]
            if isinstance(run, Run):
                for leaf in flatten(self.parts.memory.results(i)):
                    if leaf is not None and (
                        what := self.parts.backend.stays(leaf, run.stream.device)
                    ):
                        raise _RefusalError(
                            f"task {run.task!r} returned {what}, which a replay would not make anew"
                        )

    def _kept(self, i: int) -> Step | None:
        """Return the step of an instruction outside segments, and keep the memory on devices that it accesses."""
        parts = self.parts
        call = self.parts.compiler.calls[i]
        instruction = self.parts.cut.whole.instructions[i]
        if not isinstance(instruction, Copy) or call is None:
            return call
        if parts.physical[instruction.destination] and not instruction.overwrite:
            call = self._recorder.taking(instruction.destination, call)

        def step(copy: Copy = instruction) -> None:
            if parts.physical[copy.source]:
                self._hold(parts.memory.reads[i][0])
            call()
            if parts.physical[copy.destination] and not copy.overwrite:
                self._arrived(copy, parts.memory.made[i][0] or 0)

        return step

    def _arrived(self, copy: Copy, slot: int) -> None:
        made = self.parts.graph.value(copy.value).producer is not None
        for leaf in flatten(self.parts.memory.data[slot]):
            what = None if leaf is None else self.parts.backend.stays(leaf, copy.destination)
            if what is not None and made:
                self.reason = (
                    self.reason or f"{copy.value!r}, which tasks make elsewhere, is {what}"
                )
        self._hold(slot)

    def _hold(self, slot: int) -> None:
        if slot not in self._homes:
            self._held[slot] = transform(self._recorder.borrowed, self.parts.memory.data[slot])

    # ---- replaying

    def _replaying(self) -> Tape:
        """Return the steps of a replay, thread by thread."""
        cut = self.parts.cut
        calls: list[Step | None] = [None] * len(cut.program)
        for i, part in _works(cut).items():
            calls[i] = self._again(i, part)
        return self.parts.compiler.tape(
            Lines(cut.program, calls, self._at, self.parts.compiler.backend)
        )

    def _again(self, i: int, part: Segment | int) -> Step | None:
        if isinstance(part, Segment):
            graph = self._graphs[i]
            return None if graph is _nothing else graph
        parts = self.parts
        instruction = self.parts.cut.whole.instructions[part]
        if (
            not isinstance(instruction, Copy)
            or not parts.physical[instruction.destination]
            or instruction.overwrite
        ):
            return parts.compiler.calls[part]
        data = parts.memory.data
        source = parts.memory.reads[part][0]
        target = parts.memory.made[part][0]
        assert target is not None
        transfer = parts.compiler.backend.transfer(instruction)
        into = self._held[target]
        name = instruction.value

        def step() -> None:
            _check_alike(data[source], into, name)
            parts.memory.check_copy(part, instruction)
            transfer(data[source], into)

        return step


class _RefusalError(Exception):
    """The reason why a segment was not recorded, for the user."""


@dataclass(frozen=True)
class _Whole:
    """A placeholder for a segment among steps; ``at`` is its position in the segmented program."""

    at: int
    segment: Segment

    def __call__(self) -> None:
        raise AssertionError("it is replaced by the steps of the segment")


def _nothing() -> None:
    pass


def _works(cut: Segmented) -> dict[int, Segment | int]:
    """Return the segment or instruction of each run, copy and free of a segmented program, by its position there."""
    works = [i for i, each in enumerate(cut.program) if not isinstance(each, (Record, Wait))]
    return dict(zip(works, cut.parts, strict=True))


def _positions(cut: Segmented) -> list[int]:
    """Return a position in the whole program for each instruction of the segmented one.

    An event has its neighbour's.
    """
    works = _works(cut)
    last = 0
    found = []
    for i in range(len(cut.program)):
        if i in works:
            part = works[i]
            last = part.positions[0] if isinstance(part, Segment) else part
        found.append(last)
    return found


def _buffer(leaf: Any) -> Any:
    if not hasattr(leaf, "data_ptr"):
        return leaf
    made = leaf.detach().new_empty_strided(leaf.shape, leaf.stride())
    return made.requires_grad_() if leaf.requires_grad else made


def _fill(buffer: Any, item: Any) -> None:
    for into, leaf in zip(flatten(buffer), flatten(item), strict=True):
        if hasattr(leaf, "data_ptr"):
            _line(into).copy_(_line(leaf))


def _line(tensor: Any) -> Any:
    """Return all memory that a tensor spans as a flat tensor, so that one that overlaps itself can be copied too."""
    return tensor.detach().as_strided((span(tensor) if tensor.numel() else 0,), (1,))


def _check_alike(new: Any, into: Any, name: str) -> None:
    """Raise ScheduleError for a tensor of another shape or dtype than the recorded one."""
    for leaf, old in zip(flatten(new), flatten(into), strict=True):
        if hasattr(old, "data_ptr") and (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            raise ScheduleError(
                f"{name!r} is {leaf.dtype}{list(leaf.shape)} now, and was recorded as {old.dtype}{list(old.shape)}: "
                f"what changes its shape from run to run cannot be replayed; leave replay=True out"
            )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
