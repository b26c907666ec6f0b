"""Recognize inputs for which a run was checked or recorded before.

Nothing of earlier inputs is kept but facts, so their memory can be freed, and other tensors with
the same properties and addresses are recognized, too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from autosched._lib.aliasing import are_apart
from autosched._lib.tensor_guards import recognizer

__all__ = ["Known"]


class Known:
    """Inputs with the same names, and with tensors of the same properties, as earlier ones.

    Properties are those of ``tensor_guards``. Inputs that are ``fixed`` must also be at the same
    addresses. Those named in ``apart`` must share no memory with each other or with ``constants``.

    >>> import torch, torch._dynamo
    >>> inputs = {"x": torch.zeros(3), "w": torch.zeros(3)}
    >>> known = Known.of(inputs, {"w"}, [], apart={"x", "w"})
    >>> known.recognizes({"x": torch.ones(3), "w": inputs["w"]})
    True
    >>> known.recognizes({"x": torch.ones(3), "w": torch.zeros(3)})
    False
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        fixed: Collection[str],
        constants: Collection[Any],
        apart: Collection[str],
        are_alike: Callable[[Mapping[str, Any]], bool],
    ):
        self._are_alike = are_alike
        self._moving = [name for name in apart if name not in fixed]
        stay = [*(inputs[name] for name in apart if name in fixed), *constants]
        spans = sorted(map(_span, stay)) if apart else []
        self._firsts = [first for first, _ in spans]
        self._ends = [end for _, end in spans]

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, Any],
        fixed: Collection[str],
        constants: Collection[Any],
        apart: Collection[str],
    ) -> Known | None:
        """Return known inputs; None if they cannot be recognized.

        They must be tensors that ``tensor_guards`` can compare, and none of those that must be
        ``apart`` may share memory.
        """
        are_alike = recognizer(inputs, fixed)
        if are_alike is None:
            return None
        if apart and not are_apart([*map(inputs.__getitem__, apart), *constants]):
            return None
        return cls(inputs, fixed, constants, apart, are_alike)

    def recognizes(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether these inputs differ from the known ones only in what does not matter."""
        if not self._are_alike(inputs):
            return False
        return not self._moving or self._keeps_away(inputs[name] for name in self._moving)

    def _keeps_away(self, moving: Iterable[Any]) -> bool:
        """Return whether tensors share no memory with each other and with what stays."""
        spans = sorted(map(_span, moving))
        if any(end > after for (_, end), (after, _) in pairwise(spans)):
            return False
        # No span ends behind the beginning of this one and begins before its end.
        return all(
            bisect_right(self._ends, first) == bisect_left(self._firsts, end)
            for first, end in spans
        )


def _span(tensor: Any) -> tuple[int, int]:
    """Return the addresses of a tensor's storage: the first, and that behind the last."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()
