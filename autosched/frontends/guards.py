"""Guards: whether a call can use an earlier capture.

A capture makes constants of all values that are not tensors: numbers among the arguments, in
closures and globals, attributes of modules and of objects, settings of optimizers. Calls are
compared in two ways:

1. ``capture_key`` returns everything that a capture depends on: values that code can read
   (``Reach``), properties of tensors, and torch's settings. It is equal for calls that can share a
   capture, and slow.
2. A ``Guard`` recognizes such a call quickly. It only tests whether the containers that ``Reach``
   visited hold the identical objects, which is one loop in C, and compares tensors and settings. If
   it fails, the key decides: an object may have been replaced by an equal one.

Knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from operator import is_
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched.frontends.reachability import Reach, is_value, value_key
from autosched.frontends.state import State, hooks_of

__all__ = ["Arguments", "Guard", "Watch", "capture_key"]

Tensors = dict[str, torch.Tensor]


class Arguments:
    """The arguments of a call: tensors, other objects, and a key."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.key = self._of((args, kwargs))

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            self.tensors.append(tree)
            return _properties(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree), tuple([self._of(item) for item in tree])
        if isinstance(tree, dict):
            return type(tree), *tree, tuple([self._of(item) for item in tree.values()])
        if is_value(tree):
            return value_key(tree)
        self.others.append(tree)
        return type(tree)


class Guard:
    """Recognizes quickly, by identity, a call that can use a capture."""

    def __init__(self, state: State, reach: Reach, arguments: Arguments, given: Tensors):
        self._unchanged = reach.unchanged()
        self._settings = _settings()
        self._key = arguments.key
        self._others = arguments.others
        self._names = [
            name for tensor in arguments.tensors for name, item in given.items() if item is tensor
        ]
        parameters = {f"{name}.grad": parameter for name, parameter in state.parameters.items()}
        held = state.tensors()
        self._held = {name: tensor for name, tensor in held.items() if name not in parameters}
        self._properties = list(map(_properties, self._held.values()))
        self._grads = [
            (name, parameter, _properties(parameter.grad)) for name, parameter in parameters.items()
        ]

    def inputs(self, arguments: Arguments) -> Tensors | None:
        """Return a call's tensors by name; None if the guard fails."""
        if (
            len(self._names) != len(arguments.tensors)  # one came twice, and would have to again
            or arguments.key != self._key
            or not all(map(is_, arguments.others, self._others))
            or _settings() != self._settings
            or not self._unchanged()
            or list(map(_properties, self._held.values())) != self._properties
        ):
            return None
        found = {**self._held, **dict(zip(self._names, arguments.tensors, strict=True))}
        for name, parameter, before in self._grads:
            grad = parameter.grad
            if _properties(grad) != before:
                return None
            if grad is not None:
                found[name] = grad
        return found if len(set(map(id, found.values()))) == len(found) else None


def capture_key(state: State, reach: Reach, arguments: Arguments, given: Tensors) -> Hashable:
    """Return everything that a capture of a call depends on.

    ``given`` are the tensors among its arguments, by name.
    """
    first: dict[int, str] = {}
    tensors = tuple(
        (name, first.setdefault(id(tensor), name), _properties(tensor))
        for name, tensor in {**state.tensors(), **given}.items()
    )
    return tensors, arguments.key, tuple(reach.key), repr(state.numbers()), _settings()


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


def _properties(tensor: torch.Tensor | None) -> Hashable:
    """Return the properties of a tensor that a capture depends on."""
    if tensor is None:
        return None
    kind = type(tensor)
    try:
        requires_grad = tensor.requires_grad
        shape = tensor.shape
        own = (kind, shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad)
    except (RuntimeError, ValueError):  # sparse, nested, lazy: a capture raises an error
        return kind, id(tensor)
    return own, requires_grad and hooks_of(tensor)


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
        self.key, self._unchanged = self._read()

    def holds(self) -> bool:
        """Return whether nothing has changed. Fast if containers hold the identical objects."""
        if self.key[1] == _settings() and self._unchanged():
            return True
        key, unchanged = self._read()
        if key != self.key:
            return False
        self._unchanged = unchanged
        return True

    def _read(self) -> tuple[tuple[Hashable, Hashable], Callable[[], bool]]:
        reach = Reach(self.roots)
        return (tuple(reach.key), _settings()), reach.unchanged()
