"""Decide which runs of a schedule are recorded and which are replayed.

The first run with inputs of a kind is an ordinary one: it warms up what libraries initialise at
their first use. The second is recorded, and those after it are replayed. Also reports why a run was
not replayed. Recordings themselves, and what they must keep, are in ``recording``.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from autosched._lib.tree import flatten
from autosched.program.program import Copy
from autosched.runtime.replay.outputs import is_plain
from autosched.runtime.replay.recording import Parts, Recording
from autosched.runtime.threads.tapes import Tape

__all__ = ["Replaying"]

_MOST = 8  # kinds of inputs that are recorded: each recording keeps memory of its own
_SEEN = 64  # kinds that are remembered until they come again


class Replaying:
    """The recordings of an executor, by the kind of their inputs.

    ``plain`` is the tape of ordinary runs.
    """

    def __init__(self, parts: Parts, plain: Tape):
        self.parts = parts
        self.plain = plain
        self.reason: str | None = parts.backend.refusal()
        self.recordings: dict[Hashable, Recording] = {}
        self.seen: dict[
            Hashable, Mapping[str, Hashable]
        ] = {}  # by kind, where inputs were in the last ordinary run
        self.moving: set[str] = (
            set()
        )  # inputs on devices that do not come at the same address each time
        self.now: tuple[Hashable, Recording] | None = None  # of the run at hand
        copied = {
            i.value for i in parts.cut.whole if isinstance(i, Copy) and parts.real[i.destination]
        }
        self._numbers = {
            name for name in parts.graph.input_names if name in copied or name in parts.here
        }

    def tape(self, inputs: Mapping[str, Any], timed: bool) -> Tape:
        """Return the steps of a run, whose inputs are in their slots already.

        A ``timed`` run is not recorded.
        """
        self._drop_unfinished()
        kind = self._kind(inputs)
        places = self._places(inputs)
        recording = self.recordings.get(kind)
        if recording is not None and (moved := recording.moved(places)):
            self.moving.update(moved)
            self.recordings.pop(kind).close()
            recording = None
            self.seen[kind] = places
        if recording is None and (timed or not self._may_record(kind, inputs)):
            self.note(inputs)
            return self.plain
        if recording is None:
            self.moving.update(
                name for name, place in self.seen[kind].items() if place != places[name]
            )
            fixed = {name: place for name, place in places.items() if name not in self.moving}
            recording = Recording(self.parts, inputs, fixed)
        self.now = kind, recording
        return recording.tape(inputs)

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note that a run with inputs of this kind has ended."""
        if self.reason is None:
            if len(self.seen) >= _SEEN:
                self.seen.clear()
            self.seen[self._kind(inputs)] = self._places(inputs)

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the current replay, when the caller's streams wait for them."""
        assert self.now is not None
        kind, recording = self.now
        outputs = recording.outputs(inputs)
        if recording.reason is None:
            self.recordings[kind] = recording
        else:
            self._refuse(recording.reason)
        return outputs

    def _drop_unfinished(self) -> None:
        """Drop a recording whose run did not finish."""
        if self.now is not None and self.recordings.get(self.now[0]) is not self.now[1]:
            self.now[1].close()
        self.now = None

    def _may_record(self, kind: Hashable, inputs: Mapping[str, Any]) -> bool:
        if self.reason is not None or kind not in self.seen:
            return False
        for name, device in self.parts.here.items():
            for leaf in flatten(inputs[name]):
                if hasattr(leaf, "data_ptr") and (what := self.parts.backend.stays(leaf, device)):
                    self._refuse(f"input {name!r} is {what}")
        if len(self.recordings) == _MOST:
            self._refuse(
                f"inputs are of more than {_MOST} kinds: shapes, strides, dtypes and numbers make a kind"
            )
        return self.reason is None

    def _refuse(self, reason: str) -> None:
        """Record nothing from now on. Existing recordings are still replayed."""
        self.reason = reason
        warnings.warn(f"runs are not replayed: {reason}", RuntimeWarning, stacklevel=6)

    def _kind(self, inputs: Mapping[str, Any]) -> Hashable:
        """Return what must be equal for a recording to apply.

        That is all of the inputs but addresses and elements of tensors.

        Host values that are not tensors are ignored.
        """
        return tuple(_look(item, name in self._numbers) for name, item in sorted(inputs.items()))

    def _places(self, inputs: Mapping[str, Any]) -> dict[str, Hashable]:
        """Return the addresses of inputs on devices."""
        return {
            name: tuple(leaf.data_ptr() for leaf in flatten(inputs[name]) if is_plain(leaf))
            for name in self.parts.here
        }


def _look(item: Any, numbers: bool) -> Hashable:
    """Return a key for the kind of a tree.

    Non-tensor leaves are included only if they are ``numbers`` that a device reads.
    """
    if is_plain(item):
        return (
            type(item).__name__,
            item.dtype,
            item.shape,
            item.stride(),
            item.device,
            item.requires_grad,
        )
    if isinstance(item, dict):
        return tuple((key, _look(part, numbers)) for key, part in item.items())
    if isinstance(item, (tuple, list)):
        return type(item).__name__, *(_look(part, numbers) for part in item)
    if item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
        return (type(item).__name__, item) if numbers else type(item).__name__
    return type(item).__name__, id(item) if numbers else None
