"""Run each instruction immediately, in the calling thread, in issue order.

Streams and events do nothing. This is the simplest backend, and it does not need torch. Copies
between devices are copies in host memory, because a program relies on their being separate.
"""

from __future__ import annotations

import copy as copying
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autosched._lib.tree import transform
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Stream
from autosched.runtime.backends import Step, Transfer
from autosched.runtime.threads.tapes import Team
from autosched.runtime.threads.thread_team import Crew

__all__ = ["ALIGNMENT", "Host", "copy_in_host_memory"]

# Bytes of a cache line, and of the widest vectors of CPUs. Torch allocates at multiples of it.
ALIGNMENT = 64


class Host:
    """See ``autosched.runtime.backends``."""

    def __init__(self) -> None:
        self.begun = 0.0

    def open(self, program: Program, machine: Machine) -> None:
        """Do nothing."""

    def place(self, device: str) -> Any:
        """Accept tensors on any device."""
        return None

    def thread(self, stream: Stream) -> str | None:
        """Issue every stream from the calling thread."""
        return None

    def crew(self, threads: Sequence[str]) -> Team:
        """Return a team with these threads."""
        return Crew(threads, self.prepare)

    def prepare(self) -> None:
        """Set up a thread of the team: its autograd mode and intra-op threads.

        Autograd is disabled if torch is imported, and the number of intra-op threads is that of the
        calling thread. torch gives a new thread as many intra-op threads as the process has when
        that thread first asks; oneDNN does not ask, and other numbers of threads sum in another
        order.
        """
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(False)
            torch.get_num_threads()

    def enter(self, streams: Sequence[Stream]) -> Step | None:
        """Do nothing."""
        return None

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call the function immediately."""
        return call

    def transfer(self, copy: Copy) -> Transfer:
        """Copy in host memory."""
        return copy_in_host_memory

    def record(self, stream: Stream, event: int) -> Step | None:
        """Do nothing: what was issued before has finished."""
        return None

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Do nothing."""
        return None

    def free(self, stream: Stream) -> Callable[[Any], None] | None:
        """Do nothing: reference counts free the memory."""
        return None

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Read the clock."""
        return time.perf_counter

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def join(self) -> None:
        """Do nothing: all work has finished."""

    def hand_out(self, outputs: Mapping[str, Any]) -> None:
        """Do nothing: reference counts free the memory."""

    def seconds(self, stamp: Any) -> float:
        """Return seconds since ``begin``."""
        return float(stamp - self.begun)

    def close(self) -> None:
        """Do nothing."""


def copy_in_host_memory(source: Any, into: Any) -> Any:
    """Copy a tensor, a tree of tensors, or any other result of a task.

    Over ``into`` if that is given.
    """
    return transform(_copied, source) if into is None else overwritten(into, source)


def overwritten(old: Any, new: Any, put: Callable[[Any, Any], Any] | None = None) -> Any:
    """Copy a tensor, an array, or a tree of them over another.

    Return the old one, or the new one if it is immutable.

    ``put`` copies a tensor over another and returns the latter; by default torch does.
    """
    if isinstance(old, (dict, list, tuple)):
        if len(old) != len(new) or (isinstance(old, dict) and old.keys() != new.keys()):
            raise ValueError(
                f"a task changed how many items the {type(old).__name__} has, and it lives elsewhere"
            )
        if isinstance(old, dict):
            old.update({key: overwritten(old[key], item, put) for key, item in new.items()})
            return old
        items = [overwritten(*pair, put) for pair in zip(old, new, strict=True)]
        if isinstance(old, list):
            old[:] = items
        return old
    if not hasattr(old, "shape"):
        return copying.deepcopy(new)
    if old.shape != new.shape:
        raise ValueError(
            f"a task changed its shape to {tuple(new.shape)}, and it lives elsewhere as {tuple(old.shape)}"
        )
    if hasattr(old, "copy_"):
        over, source = _once(old, new)
        if put is None:
            over.copy_(source, non_blocking=True)
        else:
            put(over, source)
        return old
    old[...] = new
    return old


def _once(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the distinct elements of two expanded tensors, because torch does not write elements that share memory."""
    if "strided" not in str(old.layout) or "strided" not in str(new.layout):
        return old, new
    strides = zip(old.shape, old.stride(), new.stride(), strict=True)
    expanded = [n > 1 and own == other == 0 for n, own, other in strides]
    for dim in (dim for dim, is_expanded in enumerate(expanded) if is_expanded):
        old = old.narrow(dim, 0, 1)
        new = new.narrow(dim, 0, 1)
    return old, new


def _copied(leaf: Any) -> Any:
    if not hasattr(leaf, "data_ptr"):
        return copying.deepcopy(leaf)
    return as_parameter(as_it_is(_with_its_strides, leaf.detach()), leaf)


def as_it_is(copied: Callable[[Any], Any], tensor: Any) -> Any:
    """Return a copy that has the conjugate and negative bits of the original.

    ``copied`` copies a tensor without these bits. ``clone`` would apply the bits; then
    ``view_as_real`` takes the copy only.
    """
    if tensor.is_conj():
        return as_it_is(copied, tensor.conj()).conj()
    if tensor.is_neg():
        negated = sys.modules["torch"]._neg_view
        return negated(as_it_is(copied, negated(tensor)))
    return copied(tensor)


def _with_its_strides(leaf: Any) -> Any:
    """Return a copy with the strides of the original, because sums over other strides differ in the last bits.

    So do products at another alignment: matrix kernels of CPUs take another path where data begins
    inside a vector word. Therefore the address of a copy in host memory is that of its source,
    modulo ``ALIGNMENT``.
    """
    if "strided" not in str(leaf.layout) or leaf.numel() == 0:
        return leaf.clone()
    if _is_plain_on_cpu(leaf) and (beyond := leaf.data_ptr() % ALIGNMENT):
        return _aligned(leaf, beyond)
    if leaf.is_contiguous():
        return leaf.clone()
    return leaf.as_strided((_span(leaf),), (1,)).clone().as_strided(leaf.shape, leaf.stride())


def _is_plain_on_cpu(leaf: Any) -> bool:
    """Whether a tensor is fully described by its bytes in host memory.

    A subclass may have other state.
    """
    torch = sys.modules.get("torch")
    if (
        torch is None
        or type(leaf) not in (torch.Tensor, torch.nn.Parameter)
        or leaf.device.type != "cpu"
    ):
        return False
    return not (leaf.is_conj() or leaf.is_neg() or leaf.is_quantized)


def _aligned(leaf: Any, beyond: int) -> Any:
    """Return a copy that begins ``beyond`` a multiple of ``ALIGNMENT``, at the beginning of a storage of its own.

    The storage begins there too, so that the offset of the copy in it is 0, as that of every copy.
    Only DLPack makes such a storage: of a slice of an allocation of torch's, which begins at a
    multiple.
    """
    torch = sys.modules["torch"]
    span = _span(leaf)
    room = torch.empty(span * leaf.element_size() + beyond, dtype=torch.uint8)
    start = (beyond - room.data_ptr()) % ALIGNMENT
    if start > beyond:  # of an allocator that aligns to less
        room = torch.empty(room.numel() + ALIGNMENT, dtype=torch.uint8)
        start = (beyond - room.data_ptr()) % ALIGNMENT
    part = room[start : start + span * leaf.element_size()]
    dlpack = torch.utils.dlpack  # whose two halves cost a tenth of ``torch.from_dlpack``
    storage = dlpack.from_dlpack(dlpack.to_dlpack(part)).untyped_storage()
    row = torch.empty(0, dtype=leaf.dtype).set_(storage, 0, (span,), (1,))
    row.copy_(leaf.as_strided((span,), (1,)))
    return row.set_(storage, 0, leaf.shape, leaf.stride())


def _span(leaf: Any) -> int:
    """Return the number of elements from a tensor's first to its last in memory, both included."""
    return 1 + sum(
        (int(n) - 1) * int(stride) for n, stride in zip(leaf.shape, leaf.stride(), strict=True)
    )


def as_parameter(copy: Any, leaf: Any) -> Any:
    """Return a copy that requires gradients if the original, a leaf of autograd, does."""
    return copy.requires_grad_() if leaf.requires_grad and leaf.is_leaf else copy
