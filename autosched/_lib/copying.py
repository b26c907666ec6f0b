"""Copy tensors so that results computed from the copies have the same bits.

Sums over other strides differ in the last bits. So do products at another alignment, because matrix
kernels of CPUs take another path where data begins inside a vector word.
"""

from __future__ import annotations

import sys
from typing import Any

# Bytes of a cache line, and of the widest vectors of CPUs. Torch allocates at multiples of it.
ALIGNMENT = 64


def span(tensor: Any) -> int:
    """Return the number of elements from a tensor's first to its last in memory, inclusive.

    >>> import torch
    >>> span(torch.zeros(4, 2)[:, 0])
    7
    """
    reach = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in reach)


def clone(tensor: Any) -> Any:
    """Return a copy with the strides, and in host memory with the address modulo ``ALIGNMENT``.

    >>> import torch
    >>> column = torch.arange(8.0).view(4, 2)[1:, 1]
    >>> copy = clone(column)
    >>> copy.stride(), (copy.data_ptr() - column.data_ptr()) % ALIGNMENT, copy.storage_offset()
    ((2,), 0, 0)
    """
    if "strided" not in str(tensor.layout) or tensor.numel() == 0:
        return tensor.clone()
    if _is_on_cpu(tensor) and (offset := tensor.data_ptr() % ALIGNMENT):
        return _clone_at(tensor, offset)
    if tensor.is_contiguous():
        return tensor.clone()
    return (
        tensor.as_strided((span(tensor),), (1,)).clone().as_strided(tensor.shape, tensor.stride())
    )


def _is_on_cpu(tensor: Any) -> bool:
    """Whether host memory has all of a tensor: a subclass may have other state."""
    torch = sys.modules.get("torch")
    if torch is None or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    special = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.device.type == "cpu" and not special


def _clone_at(tensor: Any, offset: int) -> Any:
    """Return a copy at this address modulo ``ALIGNMENT``; its storage begins there, as of any copy."""
    size = span(tensor)
    storage = storage_at(size * tensor.element_size(), offset)
    row = sys.modules["torch"].empty(0, dtype=tensor.dtype).set_(storage, 0, (size,), (1,))
    row.copy_(tensor.as_strided((size,), (1,)))
    return row.set_(storage, 0, tensor.shape, tensor.stride())


def storage_at(nbytes: int, offset: int, pinned: bool = False) -> Any:
    """Return a storage that begins ``offset`` bytes after a multiple of ``ALIGNMENT``.

    Only DLPack makes one that does not begin where torch allocates, which is at a multiple.
    """
    torch = sys.modules["torch"]
    room = nbytes + ALIGNMENT if offset else nbytes
    block = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
    if not offset:
        return block.untyped_storage()
    start = (offset - block.data_ptr()) % ALIGNMENT
    dlpack = torch.utils.dlpack  # its two halves cost a tenth of ``torch.from_dlpack``
    part = dlpack.from_dlpack(dlpack.to_dlpack(block[start : start + nbytes]))
    return part.untyped_storage()
