"""Determine which bytes tensors and NumPy arrays occupy.

This module answers whether two of them overlap, without reading their elements. What is neither a
strided tensor with memory of its own nor an array (sparse, meta, a number) occupies no bytes. It
imports neither torch nor NumPy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import ne
from typing import Any, NamedTuple

from autosched._lib.copying import span
from autosched._lib.tree import flatten
from autosched.errors import HazardError


class Extent(NamedTuple):
    """The bytes of a tensor or array: from address ``first`` to before ``end``, in a storage.

    ``storage`` is the address of the storage.
    """

    first: int
    end: int
    storage: int
    tensor: Any

    def meets(self, other: Extent) -> bool:
        """Whether two tensors have a byte in common.

        >>> import torch
        >>> a, b = [next(extents(column)) for column in torch.zeros(4, 2).unbind(1)]
        >>> a.meets(b), a.meets(a)
        (False, True)
        """
        if self.first >= other.end or other.first >= self.end:
            return False
        a = self.tensor
        b = other.tensor
        if _is_array(a) and _is_array(b):
            return _arrays_meet(a, b)
        if _is_array(a) or _is_array(b):
            return True
        if self.storage != other.storage or a.element_size() != b.element_size():
            return True
        elements = a.untyped_storage().nbytes() // a.element_size()
        torch = sys.modules["torch"]
        taken = torch.zeros(elements, dtype=torch.bool, device="cpu")
        taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def extents(tree: Any) -> Iterator[Extent]:
    """Yield the extents of the tensors and arrays of a tree; those without elements have none."""
    for leaf in flatten(tree):
        if _is_array(leaf):
            if leaf.size:
                yield _extent_of_array(leaf)
            continue
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            storage = leaf.untyped_storage().data_ptr()
            if storage and leaf.numel():
                first = leaf.data_ptr()
                yield Extent(first, first + span(leaf) * leaf.element_size(), storage, leaf)


def first_meeting(
    owned: Sequence[tuple[Hashable, Extent]], matters: Callable[[Any, Any], bool] = ne
) -> tuple[Any, Any] | None:
    """Return two owners of overlapping tensors; None if no tensors overlap.

    ``matters`` decides which pairs of owners count (default: different ones).

    >>> import torch
    >>> x = torch.zeros(4)
    >>> owned = [(i, e) for i, t in enumerate([x[:2], x[2:], x[1:3]]) for e in extents(t)]
    >>> first_meeting(owned[:2]), first_meeting(owned)
    (None, (0, 2))
    """
    ordered = sorted(range(len(owned)), key=lambda i: owned[i][1].first)
    for at, i in enumerate(ordered):
        owner, extent = owned[i]
        for j in ordered[at + 1 :]:
            other, later = owned[j]
            if later.first >= extent.end:
                break
            if matters(owner, other) and extent.meets(later):
                return (owner, other) if i < j else (other, owner)
    return None


def check_written(
    given: Mapping[str, Any],
    written: Container[str],
    matters: Callable[[str, str], bool],
    cure: str,
) -> None:
    """Raise HazardError if two of these overlap that matter, of which one is written in place."""
    owned = [(name, extent) for name, item in given.items() for extent in extents(item)]
    if (pair := first_meeting(owned, matters)) is not None:
        a, b = pair
        one = a if a in written else b
        raise HazardError(f"{a!r} and {b!r} share memory, and {one!r} is written in place{cure}")


def are_apart(items: Iterable[Any]) -> bool:
    """Whether tensors have separate storages; False if a closer look is needed.

    Floats, which have none, are ignored.

    >>> import torch
    >>> x = torch.zeros(4)
    >>> are_apart([x, 0.5, torch.zeros(4)]), are_apart([x[:2], x[2:]]), are_apart([x, [torch.zeros(4)]])
    (True, False, False)
    """
    spans = []
    try:
        for item in items:
            if type(item) is float:
                continue
            storage = item.untyped_storage()
            first = storage.data_ptr()
            spans.append((first, first + storage.nbytes()))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    spans.sort()
    return all(end <= after for (_, end), (after, _) in pairwise(spans))


def overlaps_itself(tensor: Any) -> bool:
    """Whether elements of a strided tensor or array may overlap, as those of an expanded one do.

    >>> import torch
    >>> overlaps_itself(torch.zeros(3, 2).t()), overlaps_itself(torch.zeros(2).expand(3, 2))
    (False, True)
    """
    if _is_array(tensor):
        strides = [abs(stride) // tensor.itemsize for stride in tensor.strides]
    else:
        strides = tensor.stride()
    last = 0  # the largest offset that the dimensions so far reach
    for stride, n in sorted(zip(strides, tensor.shape, strict=True)):
        if n > 1:
            if stride <= last:
                return True
            last += (n - 1) * stride
    return False


def _is_array(leaf: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def _extent_of_array(array: Any) -> Extent:
    first = array.ctypes.data
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    end = first + sum(span for span in reach if span > 0) + array.itemsize
    owner = array
    while _is_array(owner.base):
        owner = owner.base
    tensor = getattr(owner.base, "untyped_storage", None)  # the tensor of which it is a view
    storage = owner.ctypes.data if tensor is None else tensor().data_ptr()
    return Extent(first + sum(span for span in reach if span < 0), end, storage, array)


def _arrays_meet(a: Any, b: Any) -> bool:
    numpy = sys.modules["numpy"]
    try:
        return bool(numpy.shares_memory(a, b, max_work=_MOST_WORK))
    except numpy.exceptions.TooHardError:
        return True


_MOST_WORK = 10_000  # limit of NumPy's exact search for a common element
