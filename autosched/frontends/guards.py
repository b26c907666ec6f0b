"""Guards: whether a call can use an earlier capture.

A capture makes constants of all values that are not tensors: numbers among the arguments, in
closures and globals, attributes of modules and of objects, settings of optimizers. ``Reach`` walks
over those that the code of a function, and the code that it calls, mentions by name. The result is
a key, which is equal for calls that can share a capture, and the containers that were visited. A
``Guard`` then only compares these: if each container holds the identical objects, nothing has
changed. That is one loop in C. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import is_
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched.frontends.reach import Reach, is_plain, told
from autosched.frontends.state import State, hooks_of

__all__ = ["Guard", "Shape", "Watch", "kind_of"]

Tensors = dict[str, torch.Tensor]


class Shape:
    """The arguments of a call, divided into tensors, other objects, and a key for the rest."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.key = self._of((args, kwargs))

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            self.tensors.append(tree)
            return _looks(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree), tuple([self._of(item) for item in tree])
        if isinstance(tree, dict):
            return type(tree), *tree, tuple([self._of(item) for item in tree.values()])
        if is_plain(tree):
            return told(tree)
        self.others.append(tree)
        return type(tree)


class Guard:
    """Recognizes quickly a call that can use an earlier capture: all objects are identical, and look as they did."""

    def __init__(self, state: State, reach: Reach, shape: Shape, given: Tensors):
        held = state.tensors()
        self._unchanged, self._settings = reach.unchanged(), _settings()
        self._key = shape.key
        self._others = shape.others
        self._names = [
            name for tensor in shape.tensors for name, item in given.items() if item is tensor
        ]
        grads = {f"{name}.grad": parameter for name, parameter in state.parameters.items()}
        self._held = {name: tensor for name, tensor in held.items() if name not in grads}
        self._looks = list(map(_looks, self._held.values()))
        self._grads = [
            (name, parameter, _looks(parameter.grad)) for name, parameter in grads.items()
        ]

    def inputs(self, shape: Shape) -> Tensors | None:
        """Return the tensors of a call by name; None if the guard fails."""
        if (
            len(self._names) != len(shape.tensors)  # one came twice, and would have to again
            or shape.key != self._key
            or not all(map(is_, shape.others, self._others))
            or _settings() != self._settings
            or not self._unchanged()
            or list(map(_looks, self._held.values())) != self._looks
        ):
            return None
        found = {**self._held, **dict(zip(self._names, shape.tensors, strict=True))}
        for name, parameter, looks in self._grads:
            grad = parameter.grad
            if _looks(grad) != looks:
                return None
            if grad is not None:
                found[name] = grad
        return found if len(set(map(id, found.values()))) == len(found) else None


def kind_of(state: State, reach: Reach, shape: Shape, given: Tensors) -> Hashable:
    """Return everything that a capture of a call depends on.

    ``given`` are the tensors among its arguments, by name.
    """
    first: dict[int, str] = {}
    tensors = {**state.tensors(), **given}
    looks = [
        (name, first.setdefault(id(tensor), name), _looks(tensor))
        for name, tensor in tensors.items()
    ]
    return tuple(looks), shape.key, tuple(reach.key), repr(state.numbers()), _settings()


def _settings() -> Hashable:
    """Return torch's global settings that a capture depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        default_device.CURRENT_DEVICE,
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        *_get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
        *_get_current_dispatch_mode_stack(),
    )


def _looks(tensor: torch.Tensor | None) -> Hashable:
    """Return the properties of a tensor that a capture depends on."""
    if tensor is None:
        return None
    try:
        own = (
            type(tensor),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )
    except (RuntimeError, ValueError):  # sparse, nested, lazy: capture says so
        return type(tensor), id(tensor)
    return own, tensor.requires_grad and hooks_of(tensor)


class Watch:
    """The non-tensor values that functions and modules can read.

    They are numbers, flags, hooks, and torch's own settings. ``key`` is equal for equal values, so
    it can be a key of a cache. Properties of tensors, such as shapes, are not included.

    >>> layer = torch.nn.Dropout(0.5)
    >>> watch = Watch(layer)
    >>> layer.p = 0.25
    >>> watch.holds(), Watch(layer).key == watch.key
    (False, False)
    """

    def __init__(self, *roots: Any):
        self.roots = roots
        self.key, self._unchanged = self._look()

    def holds(self) -> bool:
        """Return whether nothing has changed. Fast if all containers hold the identical objects."""
        if self.key[1] == _settings() and self._unchanged():
            return True
        key, unchanged = self._look()
        if key != self.key:
            return False
        self._unchanged = unchanged
        return True

    def _look(self) -> tuple[tuple[Hashable, Hashable], Callable[[], bool]]:
        reach = Reach(self.roots)
        return (tuple(reach.key), _settings()), reach.unchanged()
