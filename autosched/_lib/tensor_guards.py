"""Recognize tensors that are like earlier ones, in one pass of compiled code.

The pass is one of the guards of ``torch.compile``, and Python compares the rest. Python imports
these guards together with ``torch._dynamo``, which takes seconds. So they are used only where
something else, such as a capture, has imported them. This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

Recognizer = Callable[[Mapping[str, Any]], bool]


def guard(tensors: Sequence[Any], without_grad: Collection[int] = ()) -> Callable[[Any], bool]:
    """Return torch's test whether tensors in a list are like these: see ``recognizer``.

    Those at the positions ``without_grad`` must have no gradient. One tensor may be several of the
    list. Raises what torch raises for a tensor without shape or strides.
    """
    torch = sys.modules["torch"]
    root = torch._C._dynamo.guards.RootGuardManager()
    for i, tensor in enumerate(tensors):
        facts = list(tensor.shape), list(tensor.stride())
        kind = type(tensor), torch._C._dispatch_keys(tensor)
        manager = root.list_getitem_manager(i, f"[{i}]", tensor, None)
        manager.add_tensor_match_guard(tensor, *facts, f"[{i}]", [""], None, *kind)
        if i in without_grad:
            grad = manager.grad_manager(f"[{i}].grad", None, None)
            grad.add_none_match_guard([""], None)
    check: Callable[[Any], bool] = root.check
    return check


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
    they must be ``bare``, none may have hooks, which only tensors that require grad can get. A dict
    that contains one tensor twice is compared like any other. Keeps no tensor alive. None where
    torch's guards are not imported, or cannot compare these.

    >>> import torch, torch._dynamo
    >>> is_alike = recognizer({"x": torch.zeros(2, 3)})
    >>> is_alike({"x": torch.ones(2, 3)}), is_alike({"x": torch.ones(3, 2).t()})
    (True, False)
    """
    if "torch._dynamo.guards" not in sys.modules:
        return None
    torch = sys.modules["torch"]
    classes = [*map(type, tensors.values())]
    if not all(torch.Tensor in kind.__mro__ for kind in classes):
        return None  # reading a proxy, whose ``__class__`` is a tensor's, may crash the process
    without_functions = torch._C.DisableTorchFunction
    address = torch.Tensor.data_ptr
    names = list(tensors)
    hooked = [i for i, item in enumerate(tensors.values()) if bare and item.requires_grad]
    placed = [name for name in names if name in fixed]
    try:
        missing = {i for i, name in enumerate(names) if name in without_grad}
        are_alike = guard([*tensors.values()], missing)
        with without_functions():
            addresses = [address(tensors[name]) for name in placed]
    except Exception:  # no tensor, or one without shape, strides or memory
        return None

    def check(found: Mapping[str, Any], _kept: object = classes) -> bool:
        # Classes are kept, or another one might come to the address of one of them.
        # A guard that raises leaves functions of tensors disabled: restore what they were.
        with without_functions():
            try:
                items = list(found.values())
                return (
                    list(found) == names
                    and are_alike(items)
                    and list(map(address, map(found.__getitem__, placed))) == addresses
                    and not have_hooks(map(items.__getitem__, hooked))
                )
            except Exception:
                return False

    return check


def have_hooks(tensors: Iterable[Any]) -> bool:
    """Whether a tensor has hooks for its gradient."""
    hooks = [item._backward_hooks or item._post_accumulate_grad_hooks for item in tensors]
    return any(hooks)
