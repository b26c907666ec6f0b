"""Compare tensors by an extension module, ``tensor_check.cpp``.

It is compiled once for each version of torch and Python, in two seconds. It reads fields of torch's
objects, so it is used only if what it reads of a tensor is what Python reads. This module does not
import torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from autosched._lib import extension
from autosched._lib.logs import LOG

__all__ = ["native_recognizer"]

_FIXED, _BARE, _WITHOUT_GRAD = 1, 2, 4  # flags of a tensor


def native_recognizer(
    tensors: Mapping[str, Any],
    fixed: Collection[str],
    without_grad: Collection[str],
    bare: bool,
) -> Callable[[Mapping[str, Any]], bool] | None:
    """Return the recognizer of ``tensor_guards`` in compiled code; None if there is none.

    It raises nothing, and calls no code of Python.
    """
    module = _module()
    if module is None:
        return None
    if not all(_is_readable(module, item, name in fixed) for name, item in tensors.items()):
        return None
    flags = [
        _FIXED * (name in fixed) | _WITHOUT_GRAD * (name in without_grad) | _BARE * bare
        for name in tensors
    ]
    items = tuple(tensors.values())
    found: Callable[[Mapping[str, Any]], bool] | None = module.recorded(
        tuple(tensors), tuple(map(type, items)), items, bytes(flags)
    )
    return found


def _is_readable(module: Any, item: Any, is_fixed: bool) -> bool:
    """Whether the module finds a tensor, and, if it is fixed, its memory, where Python does."""
    if sys.modules["torch"].Tensor not in type(item).__mro__:  # a proxy's ``__class__`` may be it
        return False
    found, *_, address = module.fields(item)
    try:
        return bool(found == item._cdata and (not is_fixed or address == item.data_ptr()))
    except Exception:  # it has no memory
        return False


@functools.cache
def _module() -> Any:
    """Return the extension module; None if it cannot be built, or does not fit torch."""
    torch = sys.modules.get("torch")
    if torch is None or not extension.is_possible():
        return None
    try:
        at = Path(str(torch.__file__)).parent
        versions = torch.__version__, torch.version.git_version
        libraries = f"-L{at / 'lib'}", "-lc10"
        module = extension.loaded("tensor_check", versions, [at / "include"], libraries)
        if _fits(module, torch):
            return module
        why = f"objects of torch {torch.__version__} have other fields"
    except Exception as error:
        why = extension.described(error)
    LOG.info("inputs are compared without compiled code, which takes longer: %s", why)
    return None


def _fits(module: Any, torch: Any) -> bool:
    """Whether the module finds all that it reads where this torch has it."""
    with contextlib.ExitStack() as stack:  # of all that would see, or change, the tensors made here
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._DisableFuncTorch())
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        probe = torch.empty((), device="cpu", requires_grad=True)
        others = [
            probe.detach(),
            torch.empty(1, device="cpu", requires_grad=True),
            torch.empty((), device="cpu", requires_grad=True, dtype=torch.complex128),
            torch.empty((), device="meta", requires_grad=True),
        ]
        probe.register_hook(lambda grad: grad)
        probe.register_post_accumulate_grad_hook(lambda item: None)
        hooks = id(probe._backward_hooks), id(probe._post_accumulate_grad_hooks)
        is_alike = module.recorded(("x",), (type(probe),), (probe,), bytes([_WITHOUT_GRAD]))
        is_right = is_alike is not None and is_alike({"x": probe})
        probe.grad = torch.zeros((), device="cpu")
        found = module.fields(probe)
        return bool(
            is_right
            and not any(is_alike({"x": other}) for other in (probe, *others))
            and found == (probe._cdata, *hooks, probe.data_ptr())
        )
