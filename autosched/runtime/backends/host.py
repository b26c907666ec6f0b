"""Run each instruction immediately, in the calling thread, in issue order.

Streams and events do nothing. This is the simplest backend, and it does not need torch. Copies
between devices are copies in host memory, because a program relies on their being separate.
"""

from __future__ import annotations

import copy as copying
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from autosched._lib.allowed import is_storage
from autosched._lib.copying import clone
from autosched._lib.tree import sequence_like, transform
from autosched.graph.files import StoredTensor
from autosched.machine.machine import Machine
from autosched.program.program import Copy, Program, Stream
from autosched.runtime.backends import Backend, Step, Transfer
from autosched.runtime.threads.team import ThreadTeam


class Host:
    """See ``autosched.runtime.backends``."""

    def __init__(self) -> None:
        self.begun = 0.0

    def open(self, program: Program, machine: Machine) -> None:
        """Do nothing."""

    def thread(self, stream: Stream) -> str | None:
        """Issue every stream from the calling thread."""
        return None

    def team(self, threads: Sequence[str | None]) -> ThreadTeam:
        """Return a team with these threads."""
        return ThreadTeam(threads, self.prepare)

    def prepare(self) -> None:
        """Set up a thread of the team."""
        prepare_thread()

    def slot(self) -> Backend:
        """Return a copy: only the clock is its own."""
        return copying.copy(self)

    def adopting(self) -> Step:
        """Return a step that does nothing: no stream is current."""
        return _nothing

    def launch(self, streams: Sequence[Stream], seconds: float, call: Step) -> Step:
        """Call the function immediately."""
        return call

    def transfer(self, copy: Copy) -> Transfer:
        """Copy in host memory, or read a file into it."""
        return read_file if is_storage(copy.source) else copy_in_host_memory

    def record(self, stream: Stream, event: int) -> Step | None:
        """Do nothing: what was issued before has finished."""
        return None

    def wait(self, stream: Stream, event: int) -> Step | None:
        """Do nothing."""
        return None

    @property
    def doubt(self) -> float:
        """Nothing: there is one clock."""
        return 0.0

    def stamp(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Read the clock."""
        return time.perf_counter

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def join(self) -> None:
        """Do nothing: all work has finished."""

    def seconds(self, stamp: Any) -> float:
        """Return seconds since ``begin``."""
        return float(stamp - self.begun)

    def close(self) -> None:
        """Do nothing."""


def _nothing() -> None:
    pass


def prepare_thread() -> None:
    """Set up a thread: disable autograd, and take over the number of intra-op threads.

    torch gives a new thread as many intra-op threads as the process has when that thread first
    asks; oneDNN does not ask, and other numbers of threads sum in another order.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_grad_enabled(False)
        torch.get_num_threads()


def read_file(stored: StoredTensor, into: None, pinned: bool = False) -> Any:
    """Read a tensor from a file, while other threads run."""
    return stored.read(pinned)


def copy_in_host_memory(source: Any, into: Any) -> Any:
    """Copy a tensor, a tree of tensors, or any other object; over ``into`` if that is given."""
    return transform(_copied, source) if into is None else overwritten(into, source)


def overwritten(old: Any, new: Any, put: Callable[[Any, Any], Any] | None = None) -> Any:
    """Copy a tensor, an array, or a tree of them over another.

    Return the old one, or a new one if it is immutable. ``put`` copies a tensor over another; by
    default torch does. Raises ValueError where one is of another kind or size.
    """
    if not isinstance(old, (dict, list, tuple)) and not hasattr(old, "shape"):
        return copying.deepcopy(new)
    if _kind(old) != _kind(new):
        raise ValueError(
            f"a task put a {_described(new)} where a {_described(old)} was, and it lives elsewhere"
        )
    if isinstance(old, (dict, list, tuple)):
        if len(old) != len(new) or (isinstance(old, dict) and old.keys() != new.keys()):
            kind = type(old).__name__
            raise ValueError(
                f"a task changed how many items the {kind} has, and it lives elsewhere"
            )
        if isinstance(old, dict):
            old.update({key: overwritten(old[key], item, put) for key, item in new.items()})
            return old
        items = [overwritten(*pair, put) for pair in zip(old, new, strict=True)]
        if isinstance(old, tuple):
            return sequence_like(old, items)
        old[:] = items
        return old
    if old.shape != new.shape:
        raise ValueError(
            f"a task changed its shape to {tuple(new.shape)}, and it lives elsewhere as "
            f"{tuple(old.shape)}"
        )
    if not hasattr(old, "copy_"):
        old[...] = new
        return old
    over, source = _distinct(old, new)
    if put is None:
        over.copy_(source, non_blocking=True)
    else:
        put(over, source)
    return old


def _kind(item: Any) -> tuple[Any, ...]:
    """Return what two items have in common if one can be copied over the other."""
    tree = isinstance(item, dict), isinstance(item, (list, tuple))
    return *tree, hasattr(item, "copy_"), getattr(item, "dtype", None)


def _described(item: Any) -> str:
    dtype = getattr(item, "dtype", None)
    return type(item).__name__ + ("" if dtype is None else f" of {dtype}")


def _distinct(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the distinct elements of expanded tensors: torch does not write to shared ones."""
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
    return as_parameter(as_it_is(clone, leaf.detach()), leaf)


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


def as_parameter(copy: Any, leaf: Any) -> Any:
    """Return a copy that requires gradients if the original, a leaf of autograd, does."""
    return copy.requires_grad_() if leaf.requires_grad and leaf.is_leaf else copy
