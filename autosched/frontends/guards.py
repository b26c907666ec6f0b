"""Guards: whether a call can use an earlier capture.

A capture makes constants of all values that are not tensors: numbers among the arguments, in
closures and globals, attributes of modules and of objects, settings of optimizers. Calls are
compared in two ways:

1. ``Key`` has everything that a capture depends on: values that code can read
   (``Reach``), properties of tensors, and torch's settings. It is equal for calls that can share a
   capture, and slow.
2. A ``Guard`` recognizes such a call quickly. It only tests whether the containers that ``Reach``
   visited hold the identical objects, and compares tensors and settings. Dicts that were not
   written since the last call are passed over, and tensors are compared in compiled code. If a
   guard fails, the key decides: an object may have been replaced by an equal one.

Knows no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched._lib.containers import parts_of
from autosched._lib.tensor_guards import have_hooks, recognizer
from autosched.frontends.reachability import Reach, is_value, value_key
from autosched.frontends.state import State, hooks_of

Tensors = dict[str, torch.Tensor]


class Arguments:
    """The arguments of a call: tensors, other objects, and a key."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.key = tuple([self._of(item) for item in (*args, kwargs)])

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            self.tensors.append(tree)
            return _properties(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree), tuple([self._of(item) for item in tree])
        if isinstance(tree, dict):
            return type(tree), tuple([(key, self._of(item)) for key, item in tree.items()])
        if is_value(tree):
            return value_key(tree)
        if (parts := parts_of(tree)) is None:
            self.others.append(tree)
            return type(tree)
        self.others.append(type(tree))  # its code reads the parts
        return type(tree), tuple([(key, self._of(item)) for key, item in parts.items()])


class Guard:
    """Recognizes quickly, by identity, a call that can use a capture.

    ``settings`` returns the settings of optimizers that are inputs of the capture; None if it
    cannot have the present ones.
    """

    def __init__(
        self,
        state: State,
        reach: Reach,
        arguments: Arguments,
        given: Tensors,
        settings: Callable[[], dict[str, float] | None],
    ):
        self._settings_of_optimizers = settings
        self._unchanged = reach.unchanged()
        self._settings = _settings()
        self._key = arguments.key
        self._others = arguments.others
        rest = dict(given)
        self._names: list[str] = []
        for tensor in arguments.tensors:
            self._names.append(next(name for name, item in rest.items() if item is tensor))
            del rest[self._names[-1]]
        self._parameters = {f"{name}.grad": item for name, item in state.parameters.items()}
        grads = _present(self._parameters)
        self._has_grads = bool(grads)
        self._firsts = _firsts([*arguments.tensors, *grads.values()])
        self._held = {n: item for n, item in state.tensors().items() if n not in grads}
        self._held_ids = set(map(id, self._held.values()))
        tensors = {**self._held, **grads}
        self._hooks = list(map(hooks_of, tensors.values())) if have_hooks(tensors.values()) else []
        missing = [name.removesuffix(".grad") for name in self._parameters.keys() - grads]
        self._are_alike = recognizer(tensors, without_grad=missing, bare=not self._hooks)

    def inputs(self, arguments: Arguments) -> dict[str, Any] | None:
        """Return a call's inputs by name; None if the guard fails."""
        if (
            arguments.key != self._key
            or not all(map(is_, arguments.others, self._others))
            or _settings() != self._settings
            or not self._unchanged()
        ):
            return None
        grads = _present(self._parameters) if self._has_grads else {}
        tensors = {**self._held, **grads} if grads else self._held
        if self._are_alike is None or not self._are_alike(tensors):
            return None
        if self._hooks and list(map(hooks_of, tensors.values())) != self._hooks:
            return None
        others = {**dict(zip(self._names, arguments.tensors, strict=True)), **grads}
        found = others.values()
        if _firsts(found) != self._firsts or not self._held_ids.isdisjoint(map(id, found)):
            return None
        settings = self._settings_of_optimizers()
        return None if settings is None else {**tensors, **others, **settings}


def _firsts(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """Return where each tensor comes first, if one comes twice."""
    ids = list(map(id, tensors))
    return list(map(ids.index, ids)) if len(set(ids)) < len(ids) else None


class Key(NamedTuple):
    """All that a capture depends on: facts of tensors by name, and what code can read."""

    tensors: Mapping[str, tuple[Any, ...]]
    arguments: Hashable
    objects: tuple[Hashable, ...]
    numbers: str  # of optimizers
    settings: tuple[Hashable, ...]

    @classmethod
    def of(cls, state: State, reach: Reach, arguments: Arguments, given: Tensors) -> Key:
        """Return the key of a call; ``given`` are the tensors among its arguments."""
        first: dict[int, str] = {}
        tensors = {
            name: (first.setdefault(id(tensor), name), *_properties(tensor))
            for name, tensor in {**state.tensors(), **given}.items()
        }
        return cls(tensors, arguments.key, tuple(reach.key), repr(state.numbers()), _settings())


def _settings() -> tuple[Hashable, ...]:
    """Return torch's global settings that a capture depends on."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        default_device.CURRENT_DEVICE,
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        *(_get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()),  # type: ignore[no-untyped-call]
        *(_get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()),
    )


def _present(parameters: Tensors) -> Tensors:
    """Return the gradients that exist; parameters have their names."""
    return {name: grad for name, item in parameters.items() if (grad := item.grad) is not None}


def _properties(item: torch.Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor that a capture depends on."""
    kind = type(item)
    try:
        hooks = item.requires_grad and hooks_of(item)
        shape = item.shape
        return kind, shape, item.stride(), item.dtype, item.device, item.requires_grad, hooks
    except (RuntimeError, ValueError):  # sparse, nested, lazy: a capture raises an error
        return kind, id(item)
