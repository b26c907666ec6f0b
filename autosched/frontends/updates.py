"""Find the parameters that an optimizer's operators update, and choose devices.

A parameter, its moments and its gradient are on one device, so an update runs where the gradient is
computed, unless ``place=`` puts it elsewhere. Parameters that one fused operator updates together
are an exception, because that would move the whole backward pass to one device. The step counters
of an optimizer are on the host, where torch has them, and so are the Python numbers computed from
them. Reads the nodes of a traced step; knows no graph of autosched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from autosched._lib.tree import flatten
from autosched.frontends.state import Place
from autosched.graph.effects import effects_of

__all__ = ["Updates"]

_OF_PARAMETERS = ("parameter", "grad", "moment")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


class Updates:
    """The operators of optimizers, and the state that they change.

    ``places`` has the nodes of that state.

    ``owner`` is the parameter whose state an operator uses, directly or through others, or if it
    uses none, that of its users; only for operators of one parameter, which no operator updates
    along with others. ``on_host`` are the operators on numbers: Python's own, and counters of steps
    on the CPU.
    """

    def __init__(self, nodes: Sequence[Node], places: Mapping[Node, Place]):
        self._root: dict[Node, Node] = {}  # an in-place operator returns its argument
        together = [written for node in nodes if len(written := self._writes(node)) > 1]
        self._fused = {root for written in together for root in written}
        self._places = {
            self._of(node): place for node, place in places.items() if place[0] in _OF_PARAMETERS
        }
        self._steps = [node for node in nodes if _is_update(node)]
        self._updates = set(self._steps)
        self._counters = self._step_counters()
        mixed = {_parameter(place) for root, place in self._places.items() if root in self._fused}
        self.owner = {
            node: names[0]
            for node, names in self._owners().items()
            if len(names) == 1 and names[0] not in mixed
        }
        self.on_host = {*filter(_is_python, nodes), *filter(self._counts, self._steps)}
        for node in reversed(self._steps):  # constants of the arithmetic of counters
            constant = all(item.op == "get_attr" for item in node.all_input_nodes)
            if constant and node.users and node.users.keys() <= self.on_host:
                self.on_host.add(node)

    def _writes(self, node: Node) -> list[Node]:
        if node.op != "call_function" or not callable(node.target):
            return []
        effects = effects_of(node.target, node.args, node.kwargs)
        written = [self._of(item) for item in effects.writes if isinstance(item, Node)]
        if effects.in_place and len(written) == 1:
            self._root[node] = written[0]
        return written

    def _of(self, node: Node) -> Node:
        """Return the node that computed the tensor."""
        return self._root.get(node, node)

    def _touched(self, node: Node) -> list[Node]:
        return [self._of(item) for item in (*node.all_input_nodes, node)]

    def _owners(self) -> dict[Node, tuple[str, ...]]:
        found: dict[Node, tuple[str, ...]] = {
            root: (_parameter(place),) for root, place in self._places.items()
        }
        for node in self._steps:
            found[node] = _union(
                found.get(item, ()) for item in (*self._touched(node), *node.all_input_nodes)
            )
        for node in reversed(self._steps):
            found[node] = found[node] or _union(found.get(user, ()) for user in node.users)
        return {node: found[node] for node in self._steps}

    # ---- counters of steps

    def _step_counters(self) -> set[Node]:
        """Return step counters on the CPU that other tensors do not use."""
        steps = [root for root, place in self._places.items() if place[-1] == "step"]
        found = set(filter(_is_number, steps))
        touched = map(self._touched, self._steps)
        return found.difference(*(items for items in touched if not all(map(_is_number, items))))

    def _counts(self, node: Node) -> bool:
        touched = self._touched(node)
        return any(item in self._counters for item in touched) and all(map(_is_number, touched))

    # ---- tensors on one device

    def groups(self) -> list[list[Node]]:
        """Return, for each parameter, the tensors that belong on one device.

        Itself, its moments, and its gradient. The gradient only if the parameter has an update of
        its own, and no operator writes it along with others.
        """
        found: dict[str, dict[Node, None]] = {}
        for root, place in self._places.items():
            if place[0] in ("parameter", "moment") and root not in self._counters:
                found.setdefault(_parameter(place), {})[root] = None
        for node, name in self.owner.items():
            if name in found:
                own = found[name]
                shape = _shape(next(iter(own)))
                for item in self._touched(node):
                    if self._is_gradient(item) and _shape(item) == shape:
                        own[item] = None
        return [list(own) for own in found.values() if len(own) > 1]

    def _is_gradient(self, root: Node) -> bool:
        """Whether an update's tensor was computed before, and is written alone."""
        computed = root.op == "call_function" and root not in self._updates
        is_grad = self._places.get(root, ("",))[0] == "grad"
        return (computed or is_grad) and root not in self._fused


def _is_update(node: Node) -> bool:
    """Whether an optimizer calls an operator, other than in a closure that computes gradients."""
    custom = node.meta.get("custom") or {}
    return custom.get("phase") == "optimizer" and not node.meta.get("autograd_backward")


def _parameter(place: Place) -> str:
    return place[2] if place[0] == "moment" else place[1]


def _union(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def _values(node: Node) -> list[object]:
    return [leaf for leaf in flatten(node.meta.get("val")) if leaf is not None]


def _shape(node: Node) -> object:
    return getattr(node.meta.get("val"), "shape", None)


def _is_number(node: Node) -> bool:
    """Whether a node represents numbers: Python's, or CPU tensors without dimensions."""
    return not any(
        isinstance(v, torch.Tensor) and (v.dim() or v.device.type != "cpu") for v in _values(node)
    )


def _is_python(node: Node) -> bool:
    values = _values(node) if node.op == "call_function" else []
    return bool(values) and all(isinstance(v, _NUMBERS) for v in values)
