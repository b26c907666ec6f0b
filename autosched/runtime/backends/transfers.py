"""Copy tensors between devices, with page-locked staging memory where needed.

    host, page-locked -> GPU              one copy
    host, pageable    -> GPU              moved to pinned pieces by the host, and copied from there
    GPU               -> host             one copy, into memory that is page-locked
    GPU               -> pageable memory  of the caller: into pinned pieces, then moved by the host
    GPU               -> GPU, peers       one copy; the current streams of both wait for each other
    GPU               -> GPU, no peers    into pinned pieces, and on from there: two copies for each
    GPU               -> itself           one copy, from one logical device to another

A copy has the strides of the original, because sums over other strides differ in the last bits. A
tensor with gaps is packed before the copy and spread after it, so that the bytes transferred are
those that were predicted; this takes memory for the gaps, which no prediction includes.

Copies are whole; only staging is divided into pieces. A task needs all of what it reads, so parts
that arrive earlier would not let anything begin. Pieces let both copies between GPUs that are no
peers proceed concurrently.

Pageable memory is moved by the thread that issues the copy. The handshakes with a separate thread
would cost a run more than small inputs take, and large inputs are better pinned by their owner, as
``explain`` advises. What is written back to a caller's pageable memory is moved there when the host
waits for it anyway: before a CPU task, or at the end of the run.

All work is put on the given streams, which are current. The host waits here only to overwrite host
memory that has gaps, and to send on data that has not yet been moved to its destination.
"""

from __future__ import annotations

import copy as copying
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from autosched._lib.copying import span
from autosched._lib.tree import transform
from autosched.runtime.backends.host import as_it_is, as_parameter, overwritten
from autosched.runtime.backends.pinned import PIECE, Pinned

__all__ = ["Way", "are_peers"]


class Way:
    """Moves tensors from a source to a target, at least one of which is an accelerator.

    ``streams`` are those that the copy occupies, the target's last. ``relayed``: the source may
    still be arriving in host memory, from another copy. ``in_use`` gets the streams that read host
    memory of others after the copy was issued.
    """

    def __init__(
        self,
        source: torch.device,
        target: torch.device,
        streams: Sequence[torch.Stream],
        pinned: Pinned,
        relayed: bool = False,
        in_use: set[torch.Stream] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.pinned = pinned
        self.relayed = relayed
        self.in_use: set[torch.Stream] = set() if in_use is None else in_use
        self.out = streams[0]
        self.into = streams[-1]
        self.to_host = target.type == "cpu"
        self.from_host = source.type == "cpu"
        self.peers = self.to_host or self.from_host or are_peers(source, target)
        self._carry = self._send if self.from_host else self._fetch if self.to_host else self._relay
        apart = not self.from_host and not self.to_host
        self.events = [torch.Event(stream.device) for stream in (self.out, self.into) if apart]

    def __call__(self, value: Any, into: Any) -> Any:
        """Copy a tensor, or a tree with tensors; over ``into`` if that is given."""
        if into is None:
            return transform(self._copied, value)
        return overwritten(into, value, self._put)

    def _copied(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copying.deepcopy(leaf)
        return as_parameter(as_it_is(self._alike, leaf.detach()), leaf)

    def _alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy with the same strides."""
        if tensor.device == self.source and _is_strided(tensor):
            return self._fresh(tensor)
        copy = self._direct(tensor)
        self._meet()
        return copy

    def _direct(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return torch's own copy, which may read host memory later."""
        self._reads_later()
        return tensor.to(self.target, non_blocking=True, copy=True)

    def _reads_later(self) -> None:
        if self.from_host:
            self.in_use.add(self.into)

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in newly allocated memory."""
        shape = tensor.shape
        strides = tensor.stride()
        is_dense = _is_dense(tensor)
        if is_dense and self._is_direct(tensor, None):
            return self._direct(tensor)
        if any(stride == 0 and n > 1 for n, stride in zip(shape, strides, strict=True)):
            return self._fresh(tensor.as_strided((span(tensor),), (1,))).as_strided(shape, strides)
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=self.target)
        if not is_dense:
            return self._spread(made, tensor)
        self._carry(_row(tensor), _row(made))
        return made

    def _put(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Copy over the memory of another tensor of the same shape."""
        tensor = new.detach()
        over = old.detach()
        is_here = tensor.device == self.source and over.device == self.target
        if not is_here or not _is_strided(tensor) or not _is_strided(over):
            self._reads_later()
            old.copy_(new, non_blocking=not self.to_host)
            self._meet()
            return old
        if tensor.dtype != over.dtype or tensor.stride() != over.stride() or not _is_dense(tensor):
            self._spread(over, tensor)
        elif self._is_direct(tensor, over):
            self._reads_later()
            over.copy_(tensor, non_blocking=True)
        else:
            self._carry(_row(tensor), _row(over))
        return old

    def _is_direct(self, tensor: torch.Tensor, over: torch.Tensor | None) -> bool:
        """Whether torch's own copy is asynchronous, and uses a connection that exists."""
        if self.from_host:
            return tensor.is_pinned()
        if self.to_host:
            return over is None or over.is_pinned()
        return self.peers

    def _spread(self, over: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that has gaps, or other strides than its destination.

        It is packed, and spread after its arrival.
        """
        packed = self._fresh(tensor.contiguous())
        if self.to_host:
            self.out.synchronize()
        over.copy_(packed)
        self._meet()
        return over

    def _meet(self) -> None:
        """Make the source's stream wait for the target's: others may wait for either."""
        if self.events:
            self._follow(self.out, self.into, self.events[1])

    # ---- through pieces, row by row of bytes

    def _send(self, row: torch.Tensor, over: torch.Tensor) -> None:
        """Copy from pageable memory. It is read immediately, so copies into it are unstaged."""
        if self.relayed:
            self.into.synchronize()
            self.pinned.unstage()
        for start, end in _pieces(row):
            piece = self.pinned.take(self.target, end - start)
            memory = piece.memory[: end - start]
            memory.copy_(row[start:end])
            over[start:end].copy_(memory, non_blocking=True)
            self.pinned.send(piece, self.into)

    def _fetch(self, row: torch.Tensor, over: torch.Tensor) -> None:
        for start, end in _pieces(row):
            piece = self.pinned.take(self.source, end - start)
            memory = piece.memory[: end - start]
            memory.copy_(row[start:end], non_blocking=True)
            self.pinned.send(piece, self.out, partial(over[start:end].copy_, memory))

    def _relay(self, row: torch.Tensor, over: torch.Tensor) -> None:
        """Copy between GPUs that cannot access each other; pieces leave while others arrive."""
        arrived, entered = self.events
        self._follow(self.out, self.into, entered)
        for start, end in _pieces(row):
            piece = self.pinned.take(self.target, end - start)
            memory = piece.memory[: end - start]
            memory.copy_(row[start:end], non_blocking=True)
            self._follow(self.into, self.out, arrived)
            over[start:end].copy_(memory, non_blocking=True)
            self.pinned.send(piece, self.into)
        self._follow(self.out, self.into, entered)

    @staticmethod
    def _follow(stream: torch.Stream, other: torch.Stream, event: torch.Event) -> None:
        """Make a stream wait for all work issued to another.

        Recording an event again does not affect earlier waits.
        """
        event.record(other)
        stream.wait_event(event)


def are_peers(source: torch.device, target: torch.device) -> bool:
    """Whether one device can access the memory of another; True if torch cannot tell."""
    ask = getattr(torch.get_device_module(source.type), "can_device_access_peer", None)
    if source == target or ask is None:
        return True
    return bool(ask(source.index, target.index))


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its bytes and strides, as parameters are."""
    kind = type(tensor)
    default = torch._C._disabled_torch_function_impl
    if kind is not torch.Tensor and kind.__torch_function__ is not default:
        return False
    if tensor.layout != torch.strided or tensor.numel() == 0 or hasattr(kind, "__tensor_flatten__"):
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps in memory, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and stride != step:
            return False
        step *= n
    return True


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(row: torch.Tensor) -> Iterator[tuple[int, int]]:
    for start in range(0, row.numel(), PIECE):
        yield start, min(start + PIECE, row.numel())
