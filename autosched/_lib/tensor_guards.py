"""Recognize tensors that are like earlier ones, in one pass of compiled code.

The pass is one of the guards of ``torch.compile``. Python imports them together with
``torch._dynamo``, which takes seconds. So they are used only where something else, such as a
capture, has imported them. This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

__all__ = ["recognizer"]


def recognizer(
    tensors: Sequence[Any], without_grad: Collection[int] = ()
) -> Callable[[list[Any]], bool] | None:
    """Return a function that tests whether as many tensors are like these.

    Compared are classes, dtypes, devices, shapes, strides, ``requires_grad``, and dispatch keys,
    which tell layouts, conjugated tensors and inference tensors apart; not addresses, elements and
    hooks. Those in the places of tensors with the ids ``without_grad`` must have no gradient. A
    list that contains one tensor twice is compared like any other. Keeps no tensor alive. None
    where torch's guards are not imported, or cannot describe a tensor.

    >>> import torch, torch._dynamo
    >>> is_alike = recognizer([torch.zeros(2, 3)])
    >>> is_alike([torch.ones(2, 3)]), is_alike([torch.ones(3, 2).t()])
    (True, False)
    """
    if "torch._dynamo.guards" not in sys.modules:
        return None
    torch = sys.modules["torch"]
    root = torch._C._dynamo.guards.RootGuardManager()
    try:
        for number, tensor in enumerate(tensors):
            facts = list(tensor.shape), list(tensor.stride())
            kind = type(tensor), torch._C._dispatch_keys(tensor)
            manager = root.list_getitem_manager(number, f"[{number}]", tensor, None)
            manager.add_tensor_match_guard(tensor, *facts, f"[{number}]", [""], None, *kind)
            if id(tensor) in without_grad:
                grad = manager.grad_manager(f"[{number}].grad", None, None)
                grad.add_none_match_guard([""], None)
    except Exception:  # no tensor, or one without shape or strides
        return None
    count = len(tensors)

    def check(found: list[Any]) -> bool:
        # A guard that raises leaves functions of tensors disabled: restore what they were.
        with torch._C.DisableTorchFunction():
            try:
                return len(found) == count and bool(root.check(found))
            except Exception:
                return False

    return check
