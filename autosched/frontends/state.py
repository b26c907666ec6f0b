"""Find the tensors of modules and optimizers that a function uses.

Each has a name and a place, the path of its container: ``("parameter", name)``, ``("grad",
parameter)``, ``("buffer", root, name)``, ``("attribute", root, module, name)``, ``("moment",
optimizer, parameter, key)``; ``("setting", optimizer, group, key)`` for a learning rate that is a
tensor. Tensors in attributes of modules are state, as buffers are: they are inputs of the graph,
and outputs where a step stores new ones. Knows no graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autosched.errors import CaptureError
from autosched.graph.effects import shared_state

Place = tuple[str, ...]

# The function by which those of torch's optimizers that have both kinds of kernels choose.
_CHOICE = "_default_to_fused_or_foreach"


class State:
    """Modules and optimizers, and their parameters."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
    ):
        self.modules = modules
        self.optimizers = optimizers
        self.parameters = parameters
        self.names = {id(parameter): name for name, parameter in parameters.items()}

    @classmethod
    def of(cls, fn: Any, arguments: Iterable[Any]) -> State:
        """Find modules and optimizers in a function, its closure and arguments."""
        found = shared_state(fn, arguments)
        parts = [item for item in found if isinstance(item, torch.nn.Module)]
        inner = {id(part) for module in parts for part in module.modules() if part is not module}
        modules = _named([module for module in parts if id(module) not in inner], "module", "")
        steps = [item for item in found if hasattr(type(item), "add_param_group")]
        optimizers = _named(steps, "optimizer", "optimizer")
        parameters: dict[str, torch.Tensor] = {}
        for key, module in modules.items():
            for name, parameter in module.named_parameters():
                parameters[_joined(key, name)] = parameter
        known = set(map(id, parameters.values()))
        for key, optimizer in optimizers.items():
            groups = optimizer.param_groups
            for i, item in enumerate(item for group in groups for item in group["params"]):
                if id(item) not in known:
                    parameters[_joined(key, f"param{i}")] = item
        return cls(modules, optimizers, parameters)

    # ---- present tensors

    def places(self) -> dict[str, tuple[Place, torch.Tensor]]:
        """Return, by name, the place of each tensor, and the tensor."""
        found: dict[str, tuple[Place, torch.Tensor]] = {}
        for name, parameter in self.parameters.items():
            found[name] = (("parameter", name), parameter)
        for key, module in self.modules.items():
            for name, buffer in module.named_buffers():
                found[_joined(key, name)] = (("buffer", key, name), buffer)
        known = {id(tensor) for _, tensor in found.values()}
        for key, path, attributes in self._attributes():
            for name, item in attributes.items():
                if isinstance(item, torch.Tensor) and id(item) not in known:
                    known.add(id(item))
                    found[_joined(key, path, name)] = (("attribute", key, path, name), item)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                found[f"{name}.grad"] = (("grad", name), parameter.grad)
        for key, state in self._states():
            for name, field, item in self._moments(key, state):
                if isinstance(item, torch.Tensor):
                    found[f"{key}.{name}.{field}"] = (("moment", key, name, field), item)
        for key, number, part, item in self._parts_of_settings():
            if isinstance(item, torch.Tensor):
                found[_setting(key, number, part)] = (("setting", key, str(number), part), item)
        return found

    def all_places(self) -> dict[str, tuple[Place, torch.Tensor]]:
        """Return ``places``, and those of buffers and attributes that share a tensor."""
        found = self.places()
        for key, path, attributes in self._attributes():
            for name, item in attributes["_buffers"].items():
                if isinstance(item, torch.Tensor):
                    buffer = ("buffer", key, _joined(path, name)), item
                    found.setdefault(_joined(key, path, name), buffer)
            for name, item in attributes.items():
                if isinstance(item, torch.Tensor):
                    attribute = ("attribute", key, path, name), item
                    found.setdefault(_joined(key, path, name), attribute)
        return found

    def _states(self) -> Iterator[tuple[str, Any]]:
        """Yield the states of optimizers; those around others may share theirs."""
        found: dict[int, tuple[str, Any]] = {}
        for key, optimizer in self.optimizers.items():
            state = getattr(optimizer, "state", {})  # one around another may not inherit
            found.setdefault(id(state), (key, state))
        yield from found.values()

    def _groups(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield the groups of optimizers with their numbers, which they may share, too."""
        found: dict[int, tuple[str, int, dict[str, Any]]] = {}
        for key, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                found.setdefault(id(group), (key, number, group))
        yield from found.values()

    def _parts_of_settings(self) -> Iterator[tuple[str, int, str, Any]]:
        """Yield the settings of optimizers with their groups; of a tuple, its items."""
        for key, number, group in self._groups():
            for field, setting in group.items():
                for part, item in _parts(field, setting).items():
                    yield key, number, part, item

    def _moments(self, key: str, state: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield a parameter's name, the kind of moment, and its value.

        An optimizer may also have state of tensors that were parameters before, and of no tensor.
        """
        for parameter, held in state.items():
            name = self.names.get(id(parameter))
            if name is None:
                continue
            if not isinstance(held, dict):
                raise CaptureError(
                    f"the state of {name!r} in {type(self.optimizers[key]).__name__} is a "
                    f"{type(held).__name__}; keep it in a dict, as state[parameter]['momentum']"
                )
            for field, item in held.items():
                yield name, field, item

    def _attributes(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield each module's root, path and attributes."""
        for key, root in self.modules.items():
            for path, module in root.named_modules():
                yield key, path, module.__dict__

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: tensor for name, (_, tensor) in self.places().items()}

    def numbers(self) -> dict[str, Any]:
        """Return, by name, the non-tensor state of optimizers."""
        return {
            f"{key}.{name}.{field}": item
            for key, state in self._states()
            for name, field, item in self._moments(key, state)
            if not isinstance(item, torch.Tensor)
        }

    def counters(self) -> dict[str, float]:
        """Return, by name, the numbers in counters of optimizers on the CPU."""
        return {
            name: item.item()
            for name, (place, item) in self.places().items()
            if place[0] == "moment" and item.shape == () and item.device.type == "cpu"
            if item.is_floating_point()
        }

    def settings(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return the group and field of each float, or tuple of them, of torch's own optimizers."""
        return {
            _setting(key, number, field): (group, field)
            for key, number, group in self._groups()
            if type(self.optimizers[key]).__module__.startswith("torch.optim.")
            for field, item in group.items()
            if parts_of(field, item)
        }

    def items_of(self, settings: Iterable[str]) -> dict[int, set[str]]:
        """Return the names of settings in their groups, by the ids of the groups."""
        known = self.settings()
        found: dict[int, set[str]] = {}
        for group, field in map(known.__getitem__, settings):
            found.setdefault(id(group), set()).add(field)
        return found

    def put(self, place: Place, tensor: torch.Tensor | None) -> None:
        """Put a tensor in a place; None empties it."""
        match place:
            case ("grad", name):
                # As autograd leaves it: not a view, whose base ``module.double()`` would not
                # convert.
                if tensor is not None and tensor._is_view():
                    tensor = tensor.detach()
                self.parameters[name].grad = tensor
            case ("buffer", key, path):
                owner, _, leaf = path.rpartition(".")
                self.modules[key].get_submodule(owner)._buffers[leaf] = tensor
            case ("attribute", key, path, name):
                dict(self.modules[key].named_modules())[path].__dict__[name] = tensor
            case ("moment", key, name, field):
                self.optimizers[key].state[self.parameters[name]][field] = tensor
            case ("setting", key, number, part):
                group = self.optimizers[key].param_groups[int(number)]
                field = part.partition(".")[0]
                group[field] = _replaced(field, group[field], {part: tensor})

    # ---- traces

    def tables(self) -> Iterator[Any]:
        """Yield the dicts and lists that hold the tensors and the settings."""
        for _, _, attributes in self._attributes():
            yield from (attributes, attributes["_parameters"], attributes["_buffers"])
        for _, _, group in self._groups():
            yield from (group, group["params"])
        for _, state in self._states():
            yield from (state, *(held for held in state.values() if isinstance(held, dict)))

    def fixed(self, numbers: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the items of optimizers' groups, by their ids, that a trace needs.

        They are ``numbers`` instead of settings, by name, and the kernels that are chosen eagerly.
        """
        found: dict[int, dict[str, Any]] = {id(group): {} for _, _, group in self._groups()}
        for name, (group, field) in self.settings().items():
            found[id(group)][field] = _replaced(name, group[field], numbers)
        for optimizer in self.optimizers.values():  # several may share a group
            for group in optimizer.param_groups:
                found[id(group)] |= _kernels(optimizer, group)
        return found


@contextlib.contextmanager
def without_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Remove the gradients of parameters for a while."""
    saved = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in saved:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient


def _kernels(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Return ``foreach`` of an optimizer that chooses it by the classes of its parameters.

    For fake tensors it would choose otherwise, and then round otherwise on accelerators.
    """
    is_open = group.get("foreach", False) is None and group.get("fused") is None
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    chosen = [getattr(sys.modules.get(kind.__module__), _CHOICE, None) for kind in kinds]
    choose = next(filter(None, chosen), None)
    if not is_open or choose is None:
        return {}
    # The two exceptions in torch: SGD ignores the first, Adam's kernels refuse the second.
    is_sgd, is_adam = (isinstance(optimizer, kind) for kind in (torch.optim.SGD, torch.optim.Adam))
    differentiable = not is_sgd and group.get("differentiable", False)
    refused = is_adam and isinstance(group["lr"], torch.Tensor) and not group["capturable"]
    return {"foreach": choose(group["params"], differentiable)[1] and not refused}


def parts_of(name: str, setting: Any) -> dict[str, float]:
    """Return the floats of an optimizer's setting by name; none if it is anything else.

    >>> parts_of("lr", 0.5), parts_of("betas", (0.9, 0.99)), parts_of("momentum", 0)
    ({'lr': 0.5}, {'betas.0': 0.9, 'betas.1': 0.99}, {})
    """
    parts = _parts(name, setting)
    return parts if all(isinstance(part, float) for part in parts.values()) else {}


def _parts(name: str, setting: Any) -> dict[str, Any]:
    """Return an optimizer's setting by name, those of a tuple each by itself."""
    if type(setting) is tuple:
        return {f"{name}.{i}": part for i, part in enumerate(setting)}
    return {name: setting}


def _replaced(name: str, setting: Any, found: Mapping[str, Any]) -> Any:
    """Return an optimizer's setting with the parts that are found by name."""
    if type(setting) is tuple:
        return tuple([found.get(f"{name}.{i}", part) for i, part in enumerate(setting)])
    return found.get(name, setting)


def _setting(key: str, group: int, field: str) -> str:
    return f"{key}.{field}" if group == 0 else f"{key}.group{group}.{field}"


def hooks_of(tensor: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the hooks before and after a gradient is accumulated."""
    hooks = tensor._backward_hooks
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return tuple(hooks.values()) if hooks else (), tuple(after.values()) if after else ()


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _named(items: Sequence[Any], word: str, alone: str) -> dict[str, Any]:
    """Name objects: one ``alone``, several by a word and a number."""
    if len(items) == 1:
        return {alone: items[0]}
    return {f"{word}{i}": item for i, item in enumerate(items)}
