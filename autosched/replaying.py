"""Replaying: which runs of a schedule are recorded, which are replayed, and why others are neither.

The first run of inputs of a kind is an ordinary one: it warms up what libraries set up at their first use. The second
is recorded, those that follow are replayed. What a recording is, and what it must keep, ``recording`` knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from autosched.program import Copy
from autosched.recording import Parts, Recording
from autosched.tree import flatten
from autosched.workers import Tape

__all__ = ["Replaying"]

_MOST = 8  # kinds of inputs that are recorded: each recording keeps memory of its own


class Replaying:
    """The recordings of an executor, by the kind of inputs that each is for. ``plain`` is the tape of ordinary runs."""

    def __init__(self, parts: Parts, plain: Tape):
        self.parts, self.plain = parts, plain
        self.reason: str | None = parts.backend.refusal()
        self.recordings: dict[Hashable, Recording] = {}
        self.seen: dict[Hashable, Mapping[str, Hashable]] = {}  # by kind, where inputs were in the last ordinary run
        self.moving: set[str] = set()  # inputs on devices that do not come at the same address each time
        self.now: tuple[Hashable, Recording] | None = None  # of the run at hand
        program, real = parts.cut.whole, parts.real
        self._here = [name for name, device in program.inputs if real[device] and name in parts.given]
        there = {i.value for i in program if isinstance(i, Copy) and real[i.destination]}
        self._fixed = {name for name in parts.given if name in there or name in self._here}

    def tape(self, inputs: Mapping[str, Any], timed: bool) -> Tape:
        """Return the steps of a run, whose inputs are in their slots already. One that is ``timed`` is not recorded."""
        self.now = None
        kind, places = self._kind(inputs), self._places(inputs)
        recording = self.recordings.get(kind)
        if recording is not None and (moved := recording.moved(places)):
            self.moving.update(moved)
            del self.recordings[kind]
            recording, self.seen[kind] = None, places
        if recording is None and (timed or not self._may_record(kind)):
            self.note(inputs)
            return self.plain
        if recording is None:
            self.moving.update(name for name, place in self.seen[kind].items() if place != places[name])
            recording = Recording(
                self.parts, inputs, {name: places[name] for name in places if name not in self.moving}
            )
        self.now = kind, recording
        return recording.tape(inputs)

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note that inputs of this kind have been run."""
        if self.reason is None:
            self.seen[self._kind(inputs)] = self._places(inputs)

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the run at hand, when the caller's streams are behind it."""
        if self.now is None:
            return self.parts.memory.outputs()
        kind, recording = self.now
        outputs = recording.outputs(inputs)
        if recording.reason is None:
            self.recordings[kind] = recording
        else:
            self._refuse(recording.reason)
        return outputs

    def _may_record(self, kind: Hashable) -> bool:
        if self.reason is None and kind in self.seen and len(self.recordings) == _MOST:
            self._refuse(f"inputs are of more than {_MOST} kinds: shapes, strides, dtypes and numbers make a kind")
        return self.reason is None and kind in self.seen

    def _refuse(self, reason: str) -> None:
        """Record nothing from now on. What is recorded goes on being replayed."""
        self.reason = reason
        warnings.warn(f"runs are not replayed from graphs: {reason}", RuntimeWarning, stacklevel=5)

    def _kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """Return what must be the same for a recording to fit: all of inputs but where tensors are, and their numbers.

        Of what stays on the host, and is no tensor, nothing counts.
        """
        return tuple(
            (name, type(leaf), *_look(leaf)) if hasattr(leaf, "data_ptr") else (name, type(leaf), _hashable(leaf))
            for name, item in inputs.items()
            for leaf in flatten(item)
            if hasattr(leaf, "data_ptr") or name in self._fixed
        )

    def _places(self, inputs: Mapping[str, Any]) -> dict[str, Hashable]:
        """Return the addresses of inputs that are on devices."""
        return {
            name: tuple(leaf.data_ptr() for leaf in flatten(inputs[name]) if hasattr(leaf, "data_ptr"))
            for name in self._here
        }


def _look(tensor: Any) -> tuple[Hashable, ...]:
    strides = tensor.stride() if "strided" in str(tensor.layout) else tensor.layout
    return tensor.dtype, tensor.shape, strides, tensor.device, tensor.requires_grad


def _hashable(leaf: Any) -> Hashable:
    """Return a number or a word as it is, and of anything else which one it is."""
    return leaf if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)) else id(leaf)
