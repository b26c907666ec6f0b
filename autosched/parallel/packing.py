"""Pack tensors into few messages, in memory that is used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autosched._lib.holders import holders

__all__ = ["Reusing", "flat", "laid_out", "pack", "unpack_"]


class Reusing:
    """A function whose result is where its last one was, once nothing else refers to that.

    The memory of large tensors goes back to the system when they are freed, and is mapped again
    page by page, which takes longer than to write it. ``fn`` takes ``out``, and its results are
    always alike. It may be called by several threads.

    >>> total = Reusing(torch.add)
    >>> address = total(torch.ones(2), torch.ones(2)).data_ptr()
    >>> again = total(torch.ones(2), torch.ones(2))
    >>> again.data_ptr() == address, total(again, again).data_ptr() == address
    (True, False)
    """

    def __init__(self, fn: Callable[..., torch.Tensor]):
        self.__name__ = fn.__name__
        self._fn = fn
        self._last: list[torch.Tensor] = []  # at most one

    def __call__(self, *args: Any) -> torch.Tensor:
        """Return the function's result."""
        last = self._take()
        result = self._fn(*args, out=last)
        self._last[:] = [result]
        return result

    def _take(self) -> torch.Tensor | None:
        """Return the last result if it is free; another thread finds none then."""
        try:
            last = self._last.pop()
        except IndexError:
            return None
        # While torch.compile evaluates frames, each argument has one reference more.
        alone = torch.empty(0)
        return last if holders(last) == holders(alone) else None

    def release(self) -> None:
        """Forget the last result."""
        self._last.clear()


def flat(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return all elements of tensors in one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=out)


def laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor with other strides."""
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all elements of tensors, in one tensor for each dtype."""
    return [flat(group) for group in _by_dtype(tensors)]


def unpack_(tensors: Sequence[torch.Tensor], packed: Sequence[torch.Tensor]) -> None:
    """Copy what was packed into tensors like those."""
    for group, whole in zip(_by_dtype(tensors), packed, strict=True):
        parts = torch.split(whole, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
