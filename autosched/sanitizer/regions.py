"""Which bytes of a block of memory a tensor covers, exactly.

A region is a number of runs of bytes: ``width`` bytes from ``start``, repeated ``count`` times at
each ``step``, in each dimension. Whether two regions share a byte is decided by their runs, so
rows, columns and every second element of one tensor are told apart. Unlike ``graph.regions``, which
knows no shapes, this module has strides, and nothing is assumed but where there are too many runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MOST_RUNS = 2**20  # beyond, regions whose bounds overlap are taken to overlap


class Region(NamedTuple):
    """Bytes of a block."""

    start: int
    width: int
    dims: tuple[tuple[int, int], ...]  # count and step

    @property
    def end(self) -> int:
        """The first byte behind all of it."""
        return self.start + self.width + sum((count - 1) * step for count, step in self.dims)

    def covers(self, other: Region) -> bool:
        """Whether this certainly has all bytes of another."""
        within = not self.dims and self.start <= other.start and other.end <= self.end
        return within or self == other


NOTHING = Region(0, 0, ())


def region_of(tensor: torch.Tensor) -> Region:
    """Return what a tensor covers of its storage.

    >>> x = torch.zeros(4, 6)
    >>> region_of(x), region_of(x[:, 2:4])
    (Region(start=0, width=96, dims=()), Region(start=8, width=8, dims=((4, 24),)))
    """
    size = tensor.element_size()
    return _region(tensor.storage_offset() * size, size, tuple(tensor.shape), tensor.stride())


@lru_cache(4096)
def _region(start: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Region:
    if 0 in shape:
        return Region(start, 0, ())
    width = size
    dims: list[tuple[int, int]] = []
    for step, count in sorted((s * size, n) for n, s in zip(shape, strides, strict=True)):
        if count == 1 or step == 0:
            continue
        if not dims and step <= width:
            width = (count - 1) * step + width
        elif dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0] * count, dims[-1][1]
        else:
            dims.append((count, step))
    return Region(start, width, tuple(dims))


@lru_cache(4096)
def overlap(a: Region, b: Region) -> bool:
    """Whether two regions of one block share a byte.

    >>> x = torch.zeros(4, 6)
    >>> [overlap(region_of(x[:, :2]), region_of(part)) for part in (x[:, 2:], x[:, 1:], x[3])]
    [False, True, True]
    """
    if not (a.width and b.width) or a.end <= b.start or b.end <= a.start:
        return False
    if not (a.dims or b.dims):
        return True
    if _count(a) > MOST_RUNS or _count(b) > MOST_RUNS:
        return True
    one, other = _runs(a), _runs(b)
    after = np.searchsorted(one, other, side="right")  # the first run of a behind a run of b
    before = one[np.maximum(after - 1, 0)]
    meets = (after > 0) & (before + a.width > other)
    following = one[np.minimum(after, len(one) - 1)]
    return bool((meets | ((after < len(one)) & (following < other + b.width))).any())


def _count(region: Region) -> int:
    total = 1
    for count, _ in region.dims:
        total *= count
    return total


def _runs(region: Region) -> NDArray[np.int64]:
    """Return where the runs of a region begin, in order."""
    starts = np.array([region.start], np.int64)
    for count, step in region.dims:
        starts = (starts[:, None] + step * np.arange(count)).ravel()
    return np.sort(starts)
