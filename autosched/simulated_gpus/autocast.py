"""Autocast on simulated GPUs: torch's own kernels say what is cast.

They take the tensors of simulated GPUs for meta tensors, and would cast none. So they are given
*façades*, which are tensors of CUDA to them and hold those of simulated GPUs. What the kernels call,
casts and then the operator, is called on what façades hold, above autograd. That a weight is cast
once in a region, on the stream of its first use, is torch's own doing, too.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from autosched.simulated_gpus.tensors import block_of

_KEY = torch._C.DispatchKey.AutocastCUDA
_C: Any = torch._C


class Facade(torch.Tensor):
    """A tensor of CUDA for torch's C++; ``held`` returns what it stands for."""

    held: Callable[[], Any]

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} outside simulated GPUs")  # where a mode calls ``call``


class Casts:
    """Torch's kernels of autocast, for façades."""

    def __init__(self) -> None:
        self.weights: Any = WeakIdKeyDictionary()  # torch keeps the casts of their façades
        self.mine = threading.local()
        self.library: Any = None

    def switching(self, switch: Callable[..., None]) -> Callable[..., None]:
        """Return ``torch.set_autocast_enabled``."""

        def switched(*args: Any) -> None:
            if args[0] == "cuda" or len(args) == 1:
                if args[-1] and self.library is None:
                    self._begin()
                _C._dispatch_tls_set_dispatch_key_included(_KEY, args[-1])
            switch(*args)

        return switched

    def _begin(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for name in _C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
                kernel = self._kernel(torch.library.get_kernel(name, _KEY))
                self.library.impl(name.partition("::")[2], kernel, "AutocastCUDA", with_keyset=True)

    def end(self) -> None:
        """Leave torch its kernels."""
        if self.library is not None:
            self.library._destroy()
            self.library = None

    def has_any(self, leaves: Iterable[Any]) -> bool:
        """Whether any is a façade."""
        return self.library is not None and any(isinstance(leaf, Facade) for leaf in leaves)

    def _kernel(self, own: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(map(block_of, tree_leaves((args, kwargs)))):
                return own.call_boxed(keys, *args, **kwargs)
            before = getattr(self.mine, "keys", None)
            self.mine.keys = (
                _C._dispatch_tls_local_include_set(),
                _C._dispatch_tls_local_exclude_set() | _C.DispatchKeySet(_KEY),
            )
            try:
                args, kwargs = tree_map(self._faced, (args, kwargs))
                with _C._AutoDispatchBelowAutograd():
                    found = own.call_boxed(keys, *args, **kwargs)
            finally:
                self.mine.keys = before
            return tree_map(_held, found)

        return kernel

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call what a kernel calls on what façades hold."""
        with _C._ForceDispatchKeyGuard(*self.mine.keys):
            found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        return tree_map(self._faced, found)

    def _faced(self, item: Any) -> Any:
        if block_of(item) is None:
            return item
        if not (item.is_leaf and item.requires_grad):
            return _facade(item, lambda: item)
        if item not in self.weights:
            self.weights[item] = _facade(item, weakref.ref(item))
        return self.weights[item]


def _facade(item: Any, held: Callable[[], Any]) -> Facade:
    facts = {"strides": item.stride(), "dtype": item.dtype, "device": item.device}
    requires_grad = item.is_leaf and item.requires_grad
    made: Facade = _C.TensorBase._make_wrapper_subclass(
        Facade, item.shape, **facts, requires_grad=requires_grad
    )
    made.held = held
    return made


def _held(item: Any) -> Any:
    return item.held() if isinstance(item, Facade) else item
