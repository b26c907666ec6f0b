"""Values as rows of bytes, and descriptions of them.

A value is a tensor, or a tree of tensors and plain data. Its description is JSON: shapes, strides and
dtypes of tensors, and plain data themselves. With it, a receiver makes rows of the right size, and
from these the value: with the strides of the original, and at its alignment, because results differ
in the last bits otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosched._lib.aliasing import overlaps_itself
from autosched._lib.copying import ALIGNMENT, span
from autosched._lib.holders import holders
from autosched._lib.tree import flatten
from autosched.errors import ScheduleError, shown

__all__ = ["Blank", "Description", "ReceiveBuffer", "description_of", "in_host_memory"]
__all__ += ["is_fixed", "is_row"]
__all__ += ["on_device", "rows", "signature", "sizes"]

Description = Any  # of JSON: a list that begins with the kind
Blank = Callable[[Sequence[int], Sequence[int], torch.dtype, int], torch.Tensor]


def description_of(value: Any, kind: str = "cpu") -> Description:
    """Describe a value whose tensors are on a kind of device.

    Raises ScheduleError for what cannot be sent.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", *_facts(value, kind)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [description_of(item, kind) for item in value]]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", {key: description_of(item, kind) for key, item in value.items()}]
    if type(value) in (str, int, float, bool, type(None)):
        return ["plain", value]
    allowed = "tensors, numbers, strings, None, and lists, tuples and dicts of them can"
    raise ScheduleError(f"{shown(value)[:80]} cannot be sent to another rank; {allowed}")


def is_fixed(description: Description) -> bool:
    """Whether a description tells no plain data, which may be others in the next run."""
    kind, *rest = description
    if kind in ("tensor", "plain"):
        return bool(kind == "tensor")
    return all(map(is_fixed, rest[0].values() if kind == "dict" else rest[0]))


def _facts(tensor: torch.Tensor, kind: str) -> list[Any]:
    """Return shape, strides, dtype, address modulo the alignment, and flags."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != kind:
        what = f"a tensor of {tensor.layout} on {tensor.device}"
        where = "the CPU" if kind == "cpu" else kind
        raise ScheduleError(f"{what} cannot be sent to another rank; dense ones on {where} can")
    flags = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad and tensor.is_leaf)
    dtype = str(tensor.dtype).removeprefix("torch.")
    at = tensor.data_ptr() % ALIGNMENT
    return [list(tensor.shape), list(tensor.stride()), dtype, at, *map(int, flags)]


def signature(value: Any) -> Any:
    """Return what must be the same in each run for a receiver to be ready.

    Alignment may differ. Of a tensor, it takes a microsecond.
    """
    if isinstance(value, torch.Tensor):
        flags = value.is_conj(), value.is_neg(), value.requires_grad
        return value.shape, value.stride(), value.dtype, flags
    if isinstance(value, dict):
        return dict, tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(signature, value))
    return type(value)


def sizes(value: Any) -> str:
    """Describe the tensors of a value for an error message."""
    tensors = [leaf for leaf in flatten(value) if isinstance(leaf, torch.Tensor)]
    found = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
    return ", ".join(found[:4]) + (" ..." if len(found) > 4 else "")


# ---- sending


def rows(value: Any) -> list[torch.Tensor]:
    """Return the bytes of each tensor of a value; they share memory with dense tensors."""
    tensors = (leaf for leaf in flatten(value) if isinstance(leaf, torch.Tensor) and leaf.numel())
    return [_row(tensor) for tensor in tensors]


def is_row(value: Any) -> bool:
    """Whether a value is one tensor that can be sent as it is, and so can those of its signature."""
    if not isinstance(value, torch.Tensor) or value.is_conj() or value.is_neg():
        return False
    return value.is_contiguous() and value.numel() > 0


def _row(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _physical(tensor.detach())
    if _goes_whole(tensor):
        return _whole(tensor)
    return _distinct(tensor).contiguous().view(-1).view(torch.uint8)


def _goes_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sent with the gaps between its elements, because there are hardly any."""
    return span(tensor) <= tensor.numel() or overlaps_itself(_distinct(tensor))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((span(tensor),), (1,)).view(torch.uint8)


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose bytes are in memory: without conjugate and negative bits."""
    if tensor.is_conj():
        return _physical(tensor.conj())
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return the distinct elements of an expanded tensor."""
    for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if n > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# ---- receiving


class ReceiveBuffer:
    """Memory for a value that arrives: ``rows`` to receive into, and ``value`` afterwards.

    It can serve the next run, too, if nothing else refers to the value any more. ``blank`` makes
    tensors: in host memory, which may be page-locked, or on a device.
    """

    def __init__(self, description: Description, blank: Blank):
        self.value = _make(description, blank)
        self.rows: list[torch.Tensor] = []
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tensors = [leaf for leaf in flatten(self.value) if isinstance(leaf, torch.Tensor)]
        for number in range(len(self._tensors)):
            self._add(number)
        self._held = [*map(holders, self._tensors)]  # no variable refers to a tensor here

    def _add(self, number: int) -> None:
        tensor = _physical(self._tensors[number].detach())
        if not tensor.numel():
            return
        if _goes_whole(tensor):
            self.rows.append(_whole(tensor))
            return
        apart = _distinct(tensor)
        row = torch.empty(apart.nbytes, dtype=torch.uint8, device=tensor.device)
        packed = row.view(tensor.dtype).view(apart.shape)
        self._packed.append((apart, packed))
        self.rows.append(row)

    def spread(self) -> None:
        """Put tensors that arrived packed in their places."""
        for apart, packed in self._packed:
            apart.copy_(packed)

    def is_free(self) -> bool:
        """Whether nothing else refers to the value, or to a view of it."""
        return self._held == [*map(holders, self._tensors)]


def _make(description: Description, blank: Blank) -> Any:
    """Return such a value; its tensors have no contents yet."""
    kind, *rest = description
    match kind:
        case "tensor":
            return _empty(blank, *rest)
        case "list":
            return [_make(item, blank) for item in rest[0]]
        case "tuple":
            return tuple([_make(item, blank) for item in rest[0]])
        case "dict":
            return {key: _make(item, blank) for key, item in rest[0].items()}
    return rest[0]


def _empty(
    blank: Blank,
    shape: Sequence[int],
    strides: Sequence[int],
    name: str,
    at: int,
    conj: int,
    neg: int,
    grad: int,
) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ScheduleError(f"another rank sent a tensor of an unknown dtype, {shown(name)}")
    tensor = blank(shape, strides, dtype, at)
    tensor = torch._neg_view(tensor) if neg else tensor
    tensor = tensor.conj() if conj else tensor
    return tensor.requires_grad_() if grad else tensor


def in_host_memory(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, at: int, pinned: bool = False
) -> torch.Tensor:
    """Return a tensor that begins ``at`` bytes after a multiple of 64, page-locked if asked."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    storage = _storage(0 if 0 in shape else reach * dtype.itemsize, at, pinned)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def on_device(
    device: torch.device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, at: int
) -> torch.Tensor:
    """Return a tensor on a device, allocated by its current stream."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _storage(size: int, at: int, pinned: bool) -> Any:
    """Return a storage of so many bytes that begins ``at`` bytes after a multiple of 64."""
    if not at:
        block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return block.untyped_storage()  # torch aligns it
    block = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = (at - block.data_ptr()) % ALIGNMENT
    dlpack: Any = torch.utils.dlpack
    row = dlpack.from_dlpack(dlpack.to_dlpack(block[start : start + size]))
    return row.untyped_storage()
