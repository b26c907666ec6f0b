"""Find inputs of a run that share memory with inputs of earlier runs under other names.

A program orders the runs' accesses to one input, which is the same memory in each run, or memory of
its own. It cannot know that a tensor which one run writes as ``a`` is the next run's ``b``, or
another part of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from autosched._lib.aliasing import Extent, extents, first_meeting

__all__ = ["Overlaps"]

_Owned = tuple[bool, str]  # whether it is the earlier run's; the name of an input


class Overlaps:
    """Overlaps of inputs of a program. ``written`` are the inputs that tasks write.

    >>> import torch
    >>> w, x = torch.zeros(4), torch.zeros(4)
    >>> overlaps = Overlaps({"w"})
    >>> overlaps.exist({"w": w, "x": torch.ones(4)}, [{"w": w, "x": x}])
    False
    >>> overlaps.exist({"w": w[:2], "x": x}, [{"w": w, "x": x}])
    True
    """

    def __init__(self, written: Set[str]):
        self._written = written

    def exist(self, inputs: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> bool:
        """Whether inputs overlap with those of earlier runs so that no program orders them."""
        return bool(self._written) and any(self._meet(other, inputs) for other in earlier)

    def _meet(self, other: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
        """Whether inputs overlap with those of an earlier run.

        What both runs have under one name was compared with the rest when either was checked. So
        each pair that is compared here has a tensor that only one of the runs has.
        """
        written = self._written
        changed = {name for name, item in inputs.items() if other.get(name) is not item}
        if not changed:
            return False
        compared = inputs.keys() if changed & written else written | changed
        owned: list[tuple[_Owned, Extent]] = [
            ((is_earlier, name), extent)
            for is_earlier, items in ((True, other), (False, inputs))
            for name in compared
            for extent in extents(items[name])
        ]
        same = {name for name in compared if _are_same(other[name], inputs[name])}

        def matters(a: _Owned, b: _Owned) -> bool:
            if a[0] == b[0] or not (a[1] in changed or b[1] in changed):
                return False
            if a[1] == b[1] in same:
                return False
            return a[1] in written or b[1] in written

        return first_meeting(owned, matters) is not None


def _are_same(one: Any, other: Any) -> bool:
    """Whether two inputs are the same tensors, or different views that are alike."""
    if one is other:
        return True
    a = [_shape(extent) for extent in extents(one)]
    return bool(a) and a == [_shape(extent) for extent in extents(other)]


def _shape(extent: Extent) -> Any:
    tensor = extent.tensor
    strides = tensor.stride() if hasattr(tensor, "stride") else tensor.strides
    return extent.first, tuple(tensor.shape), tuple(strides), tensor.dtype
