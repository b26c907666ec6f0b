"""Write a task as a line of Python.

Knows operators, methods, subscripts and literals. The names of values are arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from autosched.codegen.functions import Functions
from autosched.codegen.names import identifier
from autosched.codegen.origins import torch_path
from autosched.codegen.pieces import Piece, bracketed, quoted
from autosched.graph.task import Here, Task
from autosched.graph.value import Attribute, InPlace, Method, On, Value

__all__ = ["Call", "Caller", "literal"]

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/"},
    **{"floordiv": "//", "mod": "%", "pow": "**"},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
    **{"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="},
}
_IN_PLACE = {f"i{name}": f"{sign}=" for name, sign in _INFIX.items()}
_PREFIX = {"neg": "-", "pos": "+", "invert": "~"}


class Call(NamedTuple):
    """The text of a call; statements have no value, values of operators are assigned."""

    piece: Piece
    kind: str  # call, operator, statement


class Caller:
    """Writes calls; ``functions`` collects the functions that they refer to."""

    def __init__(self, functions: Functions):
        self.functions = functions

    def call(self, task: Task, name: Callable[[int], str], device: str = "_") -> Call:
        """Return the source of a task's call; ``name`` maps values (indices) to variables."""
        fn: Any = task.fn
        args = task.args
        kwargs = task.kwargs
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        writer = _Writer(self.functions, task, name, device)
        return writer.special(fn, args, kwargs) or Call(writer.call(fn, args, kwargs), "call")


class _Writer:
    def __init__(self, functions: Functions, task: Task, name: Callable[[int], str], device: str):
        self.device = device
        self.functions = functions
        self.task = task
        self.name = name

    def call(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Piece:
        """Write ``fn(*args, **kwargs)``, or a method call on a tensor."""
        on_value = bool(args) and isinstance(args[0], Value)
        if isinstance(fn, Method) or (_tensor_method(fn) and on_value):
            method = f"{self.item(args[0])}.{fn.__name__}"
            return bracketed(method, "()", self.arguments(args[1:], kwargs))
        called = self.functions.reference(fn, f"{self.task.name}_fn", self.task.name)
        return bracketed(called, "()", self.arguments(args, kwargs))

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Piece]:
        """Write the arguments of a call."""
        named: list[Piece] = []
        others: list[Piece] = []  # keywords that are no identifiers
        for key, item in kwargs.items():
            piece = self.item(item, key)
            if identifier(key) == key:
                named.append(piece.prefixed(f"{key}="))
            else:
                others.append(piece.prefixed(f"{quoted(key)}: "))
        return [
            *map(self.item, args),
            *named,
            *([bracketed("**", "{}", others)] if others else []),
        ]

    def special(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """Write attributes, subscripts and operators in their own syntax.

        Return None for other calls.
        """
        if isinstance(fn, (Attribute, On)):
            dotted = f".{fn.attribute}" if isinstance(fn, Attribute) else ""
            return Call(Piece(f"{self.item(args[0])}{dotted}"), "operator")
        operator = fn.fn if isinstance(fn, InPlace) else fn
        texts = functools.partial(map, self.operand, args)
        match _operator_name(operator), len(args):
            case _ if kwargs:
                return None
            case "getitem", 2:
                text = f"{self.operand(args[0])}[{self.subscript(args[1])}]"
                return Call(Piece(text), "operator")
            case "setitem", 3 if not self.task.outputs:
                target = f"{self.operand(args[0])}[{self.subscript(args[1])}] = "
                return Call(self.item(args[2]).prefixed(target), "statement")
            case str(name), 2 if name in _INFIX:
                return Call(_bare(f" {_INFIX[name]} ".join(texts())), "operator")
            case str(name), 2 if name in _IN_PLACE and not self.task.outputs:
                return Call(Piece(f" {_IN_PLACE[name]} ".join(texts())), "statement")
            case str(name), 1 if name in _PREFIX:
                return Call(Piece(_PREFIX[name] + self.operand(args[0])), "operator")
            case "abs", 1:
                return Call(self.call(abs, args, {}), "call")
        return None

    def operand(self, item: Any) -> str:
        """Write an argument of an operator."""
        text = str(self.item(item))
        return f"({text})" if text.startswith("-") else text

    def subscript(self, key: Any) -> str:
        """Write the content of square brackets."""
        if type(key) is tuple and key:
            return ", ".join(map(self.subscript, key)) + ("," if len(key) == 1 else "")
        if type(key) is slice:
            parts = key.start, key.stop, key.step
            first, last, step = ("" if part is None else str(self.item(part)) for part in parts)
            return f"{first}:{last}" + (f":{step}" if step else "")
        return str(self.item(key))

    def item(self, item: Any, hint: str = "") -> Piece:
        """Write an argument: a value, a literal, a tree of them, or a given object."""
        if isinstance(item, Value):
            return Piece(self.name(item.index))
        if isinstance(item, Here):
            return Piece(self.device)
        if type(item) is dict:
            pairs = [
                self.item(value).prefixed(f"{self.item(key)}: ") for key, value in item.items()
            ]
            return bracketed("", "{}", pairs)
        if isinstance(item, (tuple, list)):
            return self._sequence(item, hint)
        if type(item) is slice:
            parts = item.start, item.stop, item.step
            return bracketed("slice", "()", list(map(self.item, parts)))
        text = literal(item)
        if text is None:
            hint = hint or f"{self.task.name}_arg"
            give = self.functions.reference if callable(item) else self.functions.give
            text = give(item, hint, self.task.name)
        return Piece(text)

    def _sequence(self, items: Any, hint: str) -> Piece:
        pieces = [self.item(item, hint) for item in items]
        if type(items) in (tuple, list):
            return bracketed("", "()" if type(items) is tuple else "[]", pieces)
        kind = self.functions.reference(type(items), type(items).__name__, self.task.name)
        is_named_tuple = hasattr(items, "_fields")
        return bracketed(kind, "()", pieces if is_named_tuple else [bracketed("", "[]", pieces)])


def literal(item: Any) -> str | None:
    """Return a number, a string, or a constant of torch as source; None for anything else.

    >>> import torch
    >>> list(map(literal, (0.5, float("inf"), torch.float32, torch.device("cpu"), [])))
    ['0.5', 'float("inf")', 'torch.float32', 'torch.device("cpu")', None]
    """
    kind = type(item)
    if kind is float and not math.isfinite(item):
        return f'float("{item}")'
    if kind is complex:
        return f"complex({literal(item.real)}, {literal(item.imag)})"
    if kind in (str, bytes):
        return quoted(item)
    if kind in (bool, int, float, type(None), range):
        return repr(item)
    if item is Ellipsis:
        return "..."
    if kind.__module__ != "torch":
        return None
    if kind.__name__ == "device":
        return f'torch.device("{item}")'
    return repr(item) if kind.__name__ in ("dtype", "layout", "memory_format") else None


def _bare(text: str) -> Piece:
    return Piece("", (Piece(text),))


def _operator_name(fn: Any) -> str | None:
    """Return the Python operator of a function or a tensor method, without underscores."""
    name = getattr(fn, "__name__", None)
    if not isinstance(name, str):
        return None
    dunder = name.startswith("__") and name.endswith("__") and _tensor_method(fn)
    return name.strip("_") if dunder or getattr(fn, "__module__", None) == "_operator" else None


def _tensor_method(fn: Any) -> bool:
    return (torch_path(fn) or "").startswith("torch.Tensor.")
