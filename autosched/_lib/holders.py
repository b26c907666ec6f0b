"""Count who refers to a tensor and its memory, so that it can be used again when nobody does.

``_storage_Use_Count`` is private to torch: no public function counts what C++ holds of a storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_uses: Callable[[int], int] = torch._C._storage_Use_Count  # of a storage's address


def holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how many references there are to a tensor, and to its storage in Python and in C++.

    >>> tensor = torch.zeros(2)
    >>> before = holders(tensor)
    >>> twin = tensor.detach()
    >>> [now - then for now, then in zip(holders(tensor), before, strict=True)]
    [0, 0, 1]
    """
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor), sys.getrefcount(storage), _uses(storage._cdata)
