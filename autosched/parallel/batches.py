"""Batches of tensors: their leaves, rows, shares and devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autosched import ScheduleError
from autosched._lib.containers import leaves, with_leaves
from autosched.parallel.template import Template


def batch_inputs(template: Template, batch: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch, by input."""
    tensors = [leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    return dict(zip(template.batch, tensors, strict=True))


def rows_cut(tensor: torch.Tensor, counts: Sequence[int], number: int) -> torch.Tensor:
    """Return the rows of one part of a tensor, which is divided into so many rows each."""
    if not tensor.dim():
        return tensor
    start = sum(counts[:number])
    return tensor[start : start + counts[number]]


def batch_homes(template: Template, batch: Sequence[Any]) -> dict[str, str]:
    """Return the devices of those tensors of a batch that are not on the CPU, by input."""
    tensors = batch_inputs(template, batch).items()
    elsewhere = ((n, t.device) for n, t in tensors if t.device.type not in ("cpu", "meta"))
    return {name: str(device) for name, device in elsewhere}


def first_rows(batch: Any, rows: int, device: str | None = None) -> Any:
    """Return the first rows of all tensors in a batch, on a torch device."""

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        part = _repeated(leaf, rows)[:rows] if leaf.dim() else leaf
        return part if device is None else part.to(device)

    return with_leaves(first, batch)


def _repeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with its rows as often as so many rows take; zeros if it has none."""
    count = len(tensor)
    if not count:
        return tensor.new_zeros(rows, *tensor.shape[1:])
    return torch.cat([tensor] * -(-rows // count)) if count < rows else tensor


def rows_of(batch: Sequence[Any], least: int = 1) -> int:
    """Return the size of the first dimension of all tensors in a batch.

    Raises ScheduleError if there is none, or if it is less than ``least``.
    """
    tensors = [leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    if not sizes or min(sizes) != max(sizes) or sizes[0] < least:
        found = ", ".join(map(str, dict.fromkeys(sizes))) or "none"
        raise ScheduleError(
            f"tensors of a batch need one first dimension, of {least} or more, to be cut along; got "
            f"{found}"
        )
    return int(sizes[0])


def shares(rows: int, count: int) -> tuple[int, ...]:
    """Divide this many rows into shares of nearly equal size, the larger ones first.

    Fewer if there are fewer rows.

    >>> shares(7, 2), shares(2, 3)
    ((4, 3), (1, 1))
    """
    check_count("chunks", count)
    return tuple(rows // count + (number < rows % count) for number in range(min(rows, count)))


def divided(rows: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide rows in proportion to weights; what is left goes to the largest remainders.

    >>> divided(7, (1, 1)), divided(8, (3, 0, 1))
    ((4, 3), (6, 0, 2))
    """
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    found = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(found)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: rows - sum(found)]:
        found[i] += 1
    return tuple(found)


def check_count(what: str, count: Any) -> None:
    """Raise ScheduleError unless a batch can be cut into so many parts."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ScheduleError(f"{what}: a batch can be cut into 1 or more parts, got {count!r}")
