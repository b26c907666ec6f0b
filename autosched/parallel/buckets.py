"""Gradient bucketing: group gradients that are reduced together.

A few large messages cost less than many small ones, but the first should be sent early, while
backward continues.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autosched import ScheduleError

__all__ = ["SIZES", "buckets", "check_sizes"]

SIZES = (2**20, 25 * 2**20)  # bytes: DistributedDataParallel's


def buckets(
    tensors: Sequence[tuple[str, int, Hashable]], sizes: Sequence[float] = SIZES
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the tensors in each bucket.

    ``tensors`` are ``(name, nbytes, dtype)`` in the order in which they become ready. A bucket has
    one dtype and is closed as soon as it has its size, so only its last tensor may exceed the size.
    The first size is for the first bucket of each dtype, the next for the next, the last for all
    others; 0 puts each tensor in a bucket of its own. Buckets are in the order of their first
    tensors. This is the rule of DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB
    2020). Raises ScheduleError for invalid or missing sizes.

    >>> tensors = [("fc.bias", 40), ("fc.weight", 4000), ("conv.weight", 600)]
    >>> buckets([(*tensor, "float32") for tensor in tensors], sizes=(1000, 5000))
    (('fc.bias', 'fc.weight'), ('conv.weight',))
    """
    check_sizes(sizes)
    made: list[list[str]] = []
    closed: dict[Hashable, int] = {}  # number by dtype
    open_: dict[Hashable, tuple[list[str], int]] = {}  # by dtype, and its bytes so far
    for name, nbytes, dtype in tensors:
        if dtype not in open_:
            made.append([])
        bucket, so_far = open_.pop(dtype, (made[-1], 0))
        bucket.append(name)
        count = closed.get(dtype, 0)
        if so_far + nbytes >= sizes[min(count, len(sizes) - 1)]:
            closed[dtype] = count + 1
        else:
            open_[dtype] = bucket, so_far + nbytes
    return tuple(map(tuple, made))


def check_sizes(sizes: Sequence[float]) -> None:
    """Raise ScheduleError unless these are sizes of buckets."""
    numbers = not isinstance(sizes, str) and isinstance(sizes, Sequence) and len(sizes) > 0
    if not numbers or not all(isinstance(size, (int, float)) and size >= 0 for size in sizes):
        raise ScheduleError(
            f"sizes of buckets must be one or more numbers of bytes, 0 or more, got {sizes!r}"
        )
