"""Cache recordings of runs by the kind of their inputs.

The first run with inputs of a kind is an ordinary one: it warms up what libraries initialise at
their first use. The second is recorded, and those after it are replayed. Also reports why a run was
not replayed. A recording that failed for a reason that may pass, such as memory that was short, is
tried again in the next run. Recordings themselves, and what they must keep, are in ``recording``.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from autosched._lib.tree import flatten
from autosched.program.program import Copy
from autosched.runtime.backends import Replayable
from autosched.runtime.compiler import Compiler
from autosched.runtime.replay.outputs import is_strided
from autosched.runtime.replay.recording import Parts, Recording
from autosched.runtime.replay.segments import Segmented

__all__ = ["Recordings"]

_MOST = 8  # kinds of inputs that are recorded: each recording keeps memory of its own
_ATTEMPTS = 3  # recordings that may fail for reasons that pass, before runs are ordinary for good
_SEEN = 64  # kinds that are remembered until they come again
_Addresses = Mapping[str, Hashable]  # of the tensors of each input on a device


class _Pending(NamedTuple):
    """The recording of the run in progress, and the kind of its inputs."""

    kind: Hashable
    recording: Recording


class Recordings:
    """The recordings of a schedule, by the kind of their inputs.

    ``physical`` is the physical device of each name; None for the host's.
    """

    def __init__(
        self,
        cut: Segmented,
        physical: Mapping[str, str | None],
        compiler: Compiler,
        backend: Replayable,
    ):
        self.parts = Parts(cut, physical, compiler, backend)
        self.reason = backend.refusal()
        self.by_kind: dict[Hashable, Recording] = {}
        self.seen: dict[Hashable, _Addresses] = {}  # by kind, in the last ordinary run
        self.moving: set[str] = set()  # inputs that do not come at the same address each time
        self.pending: _Pending | None = None
        self.failures = 0
        # The recording that was replayed last, of ``by_kind``; to look it up takes long.
        self.last: _Pending | None = None
        # Of these inputs devices read numbers that are not tensors.
        copies = [i for i in cut.whole if isinstance(i, Copy) and physical[i.destination]]
        copied = {copy.value for copy in copies} | self.parts.on_devices.keys()
        self.with_numbers = copied.intersection(compiler.graph.input_names)

    def find_last(self, inputs: Mapping[str, Any]) -> Recording | None:
        """Return the recording that was replayed last, if it recognizes the inputs."""
        last = self.last
        if last is None or not last.recording.recognizes(inputs):
            return None
        self._drop_pending()
        self.pending = last
        return last.recording

    def find(self, inputs: Mapping[str, Any], has_deadline: bool) -> Recording | None:
        """Return the recording that replays, or is made by, a run on these inputs.

        None for an ordinary run. A run with a deadline is not recorded.
        """
        self._drop_pending()
        kind = self._kind(inputs)
        addresses = self._addresses(inputs)
        recording = self.by_kind.get(kind)
        if recording is not None and (moved := recording.moved(addresses)):
            self.moving.update(moved)
            self.by_kind.pop(kind).close()
            self.last = None
            self.seen[kind] = addresses
            recording = None
        if recording is None:
            if has_deadline or not self._may_record(kind, inputs):
                self.note(inputs)
                return None
            last = self.seen[kind]
            self.moving.update(name for name in last if last[name] != addresses[name])
            fixed = {name: at for name, at in addresses.items() if name not in self.moving}
            recording = Recording(self.parts, inputs, fixed)
        self.pending = _Pending(kind, recording)
        return recording

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note that there is an ordinary run with inputs of this kind."""
        if self.reason is None:
            if len(self.seen) >= _SEEN:
                self.seen.clear()
            self.seen[self._kind(inputs)] = self._addresses(inputs)

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of the run, when the caller's streams wait for them."""
        assert self.pending is not None
        kind, recording = self.pending
        outputs = recording.outputs(inputs)
        if self.pending is self.last:
            return outputs
        if recording.reason is None:
            self.by_kind[kind] = recording
            self.last = self.pending
        else:
            self.failures += 1
            if not recording.may_succeed_later or self.failures == _ATTEMPTS:
                self._refuse(recording.reason)
        return outputs

    def _drop_pending(self) -> None:
        """Drop a recording whose run did not finish."""
        if self.pending is not None and self.pending is not self.last:
            kind, recording = self.pending
            if self.by_kind.get(kind) is not recording:
                recording.close()
        self.pending = None

    def _may_record(self, kind: Hashable, inputs: Mapping[str, Any]) -> bool:
        if self.reason is not None or kind not in self.seen:
            return False
        for name, device in self.parts.on_devices.items():
            for leaf in flatten(inputs[name]):
                if hasattr(leaf, "data_ptr") and (what := self.parts.backend.stays(leaf, device)):
                    self._refuse(f"input {name!r} is {what}")
        if len(self.by_kind) == _MOST:
            what = "shapes, strides, dtypes and numbers make a kind"
            self._refuse(f"inputs are of more than {_MOST} kinds: {what}")
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
            for name in self.parts.on_devices
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
