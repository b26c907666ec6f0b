"""Recognize tensors that are like earlier ones, in one pass of compiled code.

Where the code of ``native_check`` cannot be used, the pass is one of the guards of
``torch.compile``, and Python compares the rest. Python imports these guards together with
``torch._dynamo``, which takes seconds. So they are used only where something else, such as a
capture, has imported them. This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from autosched._lib.native_check import native_recognizer

__all__ = ["have_hooks", "recognizer"]

Recognizer = Callable[[Mapping[str, Any]], bool]


def recognizer(
    tensors: Mapping[str, Any],
    fixed: Collection[str] = (),
    without_grad: Collection[str] = (),
    bare: bool = False,
) -> Recognizer | None:
    """Return a function that tests whether tensors are like these, and named in the same order.

    Compared are classes, dtypes, devices, shapes, strides, ``requires_grad``, and dispatch keys,
    which tell layouts, conjugated tensors and inference tensors apart; not elements. Those that are
    ``fixed`` must be at the same addresses, and those ``without_grad`` must have no gradient. If
    they must be ``bare``, none may have hooks. A dict that contains one tensor twice is compared
    like any other. Keeps no tensor alive. None where tensors cannot be compared in compiled code.

    >>> import torch, torch._dynamo
    >>> is_alike = recognizer({"x": torch.zeros(2, 3)})
    >>> is_alike({"x": torch.ones(2, 3)}), is_alike({"x": torch.ones(3, 2).t()})
    (True, False)
    """
    native = native_recognizer(tensors, fixed, without_grad, bare)
    return native or _by_torch(tensors, fixed, without_grad, bare)


def have_hooks(tensors: Iterable[Any]) -> bool:
    """Whether a tensor has hooks for its gradient."""
    hooks = [item._backward_hooks or item._post_accumulate_grad_hooks for item in tensors]
    return any(hooks)


def _by_torch(
    tensors: Mapping[str, Any], fixed: Collection[str], without_grad: Collection[str], bare: bool
) -> Recognizer | None:
    """Return the recognizer that uses torch's guards; None where they are not imported."""
    if "torch._dynamo.guards" not in sys.modules:
        return None
    torch = sys.modules["torch"]
    root = torch._C._dynamo.guards.RootGuardManager()
    names = list(tensors)
    try:
        for number, (name, tensor) in enumerate(tensors.items()):
            facts = list(tensor.shape), list(tensor.stride())
            kind = type(tensor), torch._C._dispatch_keys(tensor)
            manager = root.list_getitem_manager(number, f"[{number}]", tensor, None)
            manager.add_tensor_match_guard(tensor, *facts, f"[{number}]", [""], None, *kind)
            if name in without_grad:
                grad = manager.grad_manager(f"[{number}].grad", None, None)
                grad.add_none_match_guard([""], None)
        addresses = [(name, tensors[name].data_ptr()) for name in names if name in fixed]
    except Exception:  # no tensor, or one without shape, strides or memory
        return None

    def check(found: Mapping[str, Any]) -> bool:
        # A guard that raises leaves functions of tensors disabled: restore what they were.
        with torch._C.DisableTorchFunction():
            try:
                return (
                    list(found) == names
                    and bool(root.check(list(found.values())))
                    and all(found[name].data_ptr() == at for name, at in addresses)
                    and not (bare and have_hooks(found.values()))
                )
            except Exception:
                return False

    return check
