"""Numbers of optimizers that vary from call to call: settings such as learning rates, and counters.

While a step is traced, such a setting is a ``Number`` instead of a float. Arithmetic with it is
traced, as it is with a number that ``item()`` returns; so the setting becomes an input of the
graph, and tasks on the host repeat the arithmetic in each run, on the same floats as eager code. A
comparison becomes a condition of the graph. Code that needs the float itself, such as
``math.sqrt``, makes the setting a constant. A number that is read from a counter of steps is a
``Number``, too, because some optimizers compare it (RAdam).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from autosched._lib.tree import flatten
from autosched.errors import GraphError
from autosched.frontends.state import State, parts_of

# A number: a float, the name of a setting's float, or a function and its arguments.
Expression = Any


def evaluated(expression: Expression, values: Mapping[str, float]) -> Any:
    """Return the value of an expression.

    >>> evaluated((operator.sub, 1, "betas.0"), {"betas.0": 0.75})
    0.25
    """
    if isinstance(expression, str):
        return values[expression]
    if isinstance(expression, tuple):
        return expression[0](*[evaluated(item, values) for item in expression[1:]])
    return expression


class Settings:
    """The settings that are inputs of a graph, and the conditions for them.

    ``wanted`` are the names of settings that vary; ``names``, their floats that are inputs;
    ``constant``, the settings whose floats the step needed while it was traced; ``counters``, the
    names of the counters of steps on which conditions depend.
    """

    def __init__(self, wanted: Iterable[str] = ()):
        self.wanted = frozenset(wanted)
        self.constant: set[str] = set()
        self.names: tuple[str, ...] = ()
        self.counters: set[str] = set()
        self.conditions: dict[Expression, bool] = {}  # comparisons, and their results

    def reader(self, state: State) -> Callable[[], dict[str, float] | None]:
        """Return a function that returns the inputs now; None if the graph cannot have them."""
        known = state.settings()
        read = [(name, *known[name]) for name in self.wanted if name in known]
        names = self.names
        conditions = list(self.conditions.items())
        if not names and not conditions:
            return dict
        tensors = state.tensors() if self.counters else {}
        counters = {name: tensors[name] for name in self.counters & tensors.keys()}

        def inputs() -> dict[str, float] | None:
            values: dict[str, float] = {name: item.item() for name, item in counters.items()}
            for name, group, field in read:
                values.update(parts_of(name, group.get(field)))
            try:
                if all(evaluated(item, values) is result for item, result in conditions):
                    return {name: values[name] for name in names}
            except (KeyError, ArithmeticError):  # one is of another type, or out of range
                pass
            return None

        return inputs

    def inputs(self, state: State) -> dict[str, float]:
        """Return the inputs now. Raises GraphError if the graph cannot have them."""
        found = self.reader(state)()
        if found is None:
            raise GraphError(
                f"{', '.join(sorted(self.wanted | self.counters))} have values for which the step "
                "takes another path than when it was captured; capture it again, or use "
                "autosched.compile, which recaptures by itself"
            )
        return found

    def numbers(self, state: State, fakes: FakeTensorMode) -> dict[str, Number]:
        """Return symbols for the floats of the settings in a trace, by name."""
        assert fakes.shape_env is not None
        known = state.settings()
        found: dict[str, Number] = {}
        with fakes.shape_env.ignore_fresh_unbacked_symbols():
            for name in sorted(self.wanted):
                group, field = known[name]
                for part, value in parts_of(name, group[field]).items():
                    symbol = fakes.shape_env.create_unbacked_symfloat()
                    found[part] = Number(symbol, value, self, frozenset([name]), part)
        return found


class Varying:
    """Finds the settings that vary.

    They are those that a learning rate scheduler has, and those that changed since an earlier
    call. Others are constants: a step then has no numbers that a recording on a device could not
    contain.
    """

    def __init__(self) -> None:
        self.new: frozenset[str] = frozenset()  # since the call before the last one
        self._found: frozenset[str] = frozenset()
        self._last: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._constant: set[str] = set()

    def names(self, state: State) -> frozenset[str]:
        """Return the names of the settings that vary."""
        known = state.settings()
        now = {name: group[field] for name, (group, field) in known.items()}
        for name, item in now.items():
            if self._last.get(name, item) != item:
                self._changed.add(name)
        self._last = now
        found = (scheduled(state) | self._changed & now.keys()) - self._constant
        self.new = found - self._found
        self._found |= found
        return found

    def keep(self, names: Iterable[str]) -> None:
        """Treat settings as constants from now on."""
        self._constant.update(names)
        self._found -= self._constant


def scheduled(state: State) -> frozenset[str]:
    """Return the names of the settings that learning rate schedulers change."""
    return frozenset(
        name
        for name, (group, field) in state.settings().items()
        if (field == "lr" and "initial_lr" in group)
        or (field in ("momentum", "betas") and "max_momentum" in group)
    )


# ---- tracing


def without_repeats(graph: torch.fx.Graph) -> None:
    """Let a graph compute each number of Python once."""
    first: dict[tuple[Any, str], torch.fx.Node] = {}
    for node in graph.nodes:
        is_number = isinstance(node.meta.get("val"), torch.SymFloat)
        if node.op == "call_function" and is_number and not isinstance(node.target, OpOverload):
            same = first.setdefault((node.target, repr((node.args, node.kwargs))), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def without_unused(graph: torch.fx.Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Remove those of the last placeholders that nothing uses; return the names of the others.

    ``names`` are those of all.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    own = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
    used = tuple(name for name, node in own.items() if node.users)
    for name in own.keys() - {*used}:
        graph.erase_node(own[name])
    return used


class Number(torch.SymFloat):
    """A float that a trace computes from settings.

    ``symbol`` is its name in the trace; ``expression`` computes it from floats of the settings
    ``names``, and ``value`` is it for the present ones.
    """

    def __init__(
        self,
        symbol: torch.SymFloat,
        value: float,
        settings: Settings,
        names: frozenset[str],
        expression: Expression,
    ):
        super().__init__(symbol.node)  # type: ignore[no-untyped-call]
        self.value = value
        self.settings = settings
        self.names = names
        self.expression = expression

    def __float__(self) -> float:
        """Return the value; the settings become constants. Raises an error for a counter."""
        if not self.names <= self.settings.wanted:
            return float(super().__float__())  # type: ignore[no-untyped-call]
        self.settings.constant |= self.names
        return self.value

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return hash(float(self))

    def __deepcopy__(self, _: Any) -> Number:
        return self


def _applied(fn: Callable[..., Any], *items: Any) -> tuple[Any, Expression, frozenset[str]]:
    """Return the value of a function of numbers, its expression and the settings it needs."""
    numbers = [item for item in items if isinstance(item, Number)]
    values = [item.value if isinstance(item, Number) else item for item in items]
    parts = [item.expression if isinstance(item, Number) else item for item in items]
    names = frozenset[str]().union(*[item.names for item in numbers])
    return fn(*values), (fn, *parts), names


def _arithmetic(name: str, fn: Callable[..., Any], is_reflected: bool = False) -> Any:
    """Return a method of ``Number`` that is traced."""
    traced = getattr(torch.SymFloat, name)

    def method(self: Number, *others: Any) -> Any:
        # What torch itself compares, the base of a power, is a condition for settings alone.
        is_setting = bool(self.names) and self.names <= self.settings.wanted
        plain = self if is_setting else torch.SymFloat(self.node)  # type: ignore[no-untyped-call]
        symbol = traced(plain, *others)
        if not isinstance(symbol, torch.SymFloat) or not all(map(_is_known, others)):
            return symbol
        items = (*others, self) if is_reflected else (self, *others)
        value, expression, names = _applied(fn, *items)
        return Number(symbol, value, self.settings, names, expression)

    return method


def _comparison(name: str, fn: Callable[..., Any]) -> Any:
    """Return a method of ``Number`` whose result becomes a condition."""
    traced = getattr(torch.SymFloat, name)

    def method(self: Number, other: Any) -> Any:
        if not _is_known(other):
            return traced(self, other)
        result, expression, names = _applied(fn, self, other)
        self.settings.conditions[expression] = result
        self.settings.counters |= names - self.settings.wanted
        return result

    return method


def _conversion(name: str) -> Any:
    """Return a method of ``Number`` that makes its settings constants."""
    return lambda self, *others: getattr(float(self), name)(*others)


def _is_known(item: Any) -> bool:
    """Whether the value of a number is known while it is traced."""
    return isinstance(item, (int, float, Number))


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _fn = getattr(operator, _name)
    setattr(Number, f"__{_name}__", _arithmetic(f"__{_name}__", _fn))
    setattr(Number, f"__r{_name}__", _arithmetic(f"__r{_name}__", _fn, is_reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _comparison(f"__{_name}__", getattr(operator, _name)))
for _name in (
    *("__repr__", "__str__", "__format__", "__int__", "__trunc__", "__floor__", "__ceil__"),
    *("__round__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__"),
    *("__divmod__", "__rdivmod__", "is_integer", "as_integer_ratio", "hex"),
):
    setattr(Number, _name, _conversion(_name))


class _Known(NamedTuple):
    """A tensor whose number is known: what was added to a counter, or to 0.0 if it has no name."""

    tensor: torch.Tensor
    version: int
    name: str
    before: float
    added: float


class Counters:
    """The counters of steps in a trace, as long as only constants are added to them.

    ``tensors`` are those of before the step, with their numbers; it may create others.
    """

    def __init__(self, settings: Settings, tensors: Mapping[str, tuple[torch.Tensor, float]]):
        self.settings = settings
        self._known: dict[int, _Known] = {}
        for name, (tensor, number) in tensors.items():
            self._note(tensor, name, number, 0.0)

    def _note(self, tensor: torch.Tensor, name: str, before: float, added: float) -> None:
        if not tensor.is_inference():
            self._known[id(tensor)] = _Known(tensor, tensor._version, name, before, added)

    def _find(self, item: Any) -> _Known | None:
        found = self._known.get(id(item))
        return found if found is not None and found.version == found.tensor._version else None

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch; what it reads from a counter becomes a ``Number``."""
        name = getattr(fn, "__name__", "")
        if fn is torch.tensor and type(args[0]) in (int, float):
            result = fn(*args, **kwargs)
            self._note(result, "", 0.0, args[0])
        elif name in ("add_", "__iadd__", "_foreach_add_") and len(args) == 2:
            more = args[1] if isinstance(args[1], (int, float)) else self._find(args[1])
            found = [*filter(None, map(self._find, flatten(args[0])))]
            result = fn(*args, **kwargs)
            if isinstance(more, _Known):
                more = None if more.name else more.added
            for tensor, _, name, before, added in found if more is not None else ():
                self._note(tensor, name, before, added + more * kwargs.get("alpha", 1))
        else:
            result = fn(*args, **kwargs)
            known = self._find(args[0]) if args else None
            if known is not None and name == "item" and isinstance(result, torch.SymFloat):
                return self._number(result, known)
            if (
                known is not None
                and isinstance(result, torch.Tensor)
                and result is not known.tensor
            ):
                del self._known[id(known.tensor)]  # ``data`` has no common version
        return result

    def _number(self, symbol: torch.SymFloat, known: _Known) -> Number:
        _, _, name, before, added = known
        names = frozenset([name] if name else ())
        expression = (operator.add, name, added) if name else added
        return Number(symbol, before + added, self.settings, names, expression)


def call_with_floats(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call an operator that takes floats of Python, not symbols, as fused optimizers do.

    The numbers among ``kwargs`` are put into its node of the trace afterwards.
    """
    numbers = {name: item for name, item in kwargs.items() if isinstance(item, Number)}
    result = fn(*args, **{**kwargs, **{name: item.value for name, item in numbers.items()}})
    mode = get_proxy_mode()
    assert mode is not None
    nodes = reversed(mode.tracer.graph.nodes)
    node = next(node for node in nodes if str(node.target).startswith(f"aten.{fn.__name__}."))
    symbols = {
        name: get_proxy_slot(item, mode.tracer).force().node for name, item in numbers.items()
    }
    node.kwargs = {**node.kwargs, **symbols}
    return result
