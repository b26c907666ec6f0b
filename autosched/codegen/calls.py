"""Write a task as lines of Python that assign its results to variables.

A call is one line: an operator, a method, a subscript or a call of a function. A merged task is
written as the calls of its parts. A region, whose function is not its composite, is written as one
call, of a function of the module that contains these calls.

The lines are for people, with ``Functions``, or for the runtime, with ``Bound`` objects. The
runtime's lines are *exact*: they do what ``task.fn(*args)`` does with arguments of any type, and
raise what ``Task.results`` raises for results of another shape.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autosched._lib.tree import flatten, of_its_kind
from autosched.codegen.functions import (
    Bound,
    Functions,
    Names,
    identifier,
    literal,
    quoted,
    torch_path,
)
from autosched.graph.task import Here, Merged, Task
from autosched.graph.value import Attribute, InPlace, Method, On, Value

Device = Callable[[Here], str]  # the text for the device that replaces a placeholder


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

    text: str
    kind: str  # call, operator, statement


def call_of(
    functions: Functions | Bound, task: Task, name: Callable[[int], str], device: Device
) -> Call:
    """Return the source of a task's call; ``name`` maps values (indices) to variables.

    ``functions`` collects the functions that it refers to.
    """
    fn: Any = task.fn
    args = task.args
    kwargs = task.kwargs
    while isinstance(fn, functools.partial) and not functions.exact:
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    writer = _Writer(functions, task, name, device)
    return writer.special(fn, args, kwargs) or Call(writer.call(fn, args, kwargs), "call")


class _Writer(NamedTuple):
    functions: Functions | Bound
    task: Task
    name: Callable[[int], str]
    device: Device

    def call(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Write ``fn(*args, **kwargs)``, or a method call on a tensor."""
        path = None if self.functions.exact else torch_path(fn)
        is_method = isinstance(fn, Method) or (path or "").startswith("torch.Tensor.")
        if is_method and args and isinstance(args[0], Value):
            called = f"{self.item(args[0])}.{fn.__name__}"
            args = args[1:]
        else:
            called = self.functions.reference(fn, f"{self.task.name}_fn")
        given = [*map(self.item, args)]
        others: list[str] = []  # keywords that are no identifiers
        for key, item in kwargs.items():
            text = self.item(item, key)
            if identifier(key) == key:
                given.append(f"{key}={text}")
            else:
                others.append(f"{quoted(key)}: {text}")
        if others:
            given.append(f"**{{{', '.join(others)}}}")
        return f"{called}({', '.join(given)})"

    def special(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """Write attributes, subscripts and operators in their own syntax.

        Return None for other calls.
        """
        if isinstance(fn, InPlace) and self.functions.exact:
            return None
        if isinstance(fn, (Attribute, On)):
            dotted = f".{fn.attribute}" if isinstance(fn, Attribute) else ""
            return Call(f"{self.item(args[0])}{dotted}", "operator")
        operator = fn.fn if isinstance(fn, InPlace) else fn
        is_operator = getattr(operator, "__module__", None) == "_operator"
        named = operator.__name__.strip("_") if is_operator else None
        texts = functools.partial(map, self.operand, args)
        match named, len(args):
            case _ if kwargs:
                return None
            case "getitem", 2:
                text = f"{self.operand(args[0])}[{self.subscript(args[1])}]"
                return Call(text, "operator")
            case "setitem", 3 if not self.task.outputs:
                target = f"{self.operand(args[0])}[{self.subscript(args[1])}]"
                return Call(f"{target} = {self.item(args[2])}", "statement")
            case str(name), 2 if name in _INFIX:
                return Call(f" {_INFIX[name]} ".join(texts()), "operator")
            case str(name), 2 if name in _IN_PLACE and not self.task.outputs:
                return Call(f" {_IN_PLACE[name]} ".join(texts()), "statement")
            case str(name), 1 if name in _PREFIX:
                return Call(_PREFIX[name] + self.operand(args[0]), "operator")
            case "abs", 1:
                return Call(self.call(abs, args, {}), "call")
        return None

    def operand(self, item: Any) -> str:
        """Write an argument of an operator."""
        text = self.item(item)
        return f"({text})" if text.startswith("-") else text

    def subscript(self, key: Any) -> str:
        """Write the content of square brackets."""
        if type(key) is tuple and key:
            return ", ".join(map(self._index, key)) + ("," if len(key) == 1 else "")
        return self._index(key)

    def _index(self, key: Any) -> str:
        if type(key) is slice:
            parts = key.start, key.stop, key.step
            first, last, step = ("" if part is None else self.item(part) for part in parts)
            return f"{first}:{last}" + (f":{step}" if step else "")
        return self.item(key)

    def item(self, item: Any, hint: str = "") -> str:
        """Write an argument: a value, a literal, a tree of them, or a given object."""
        if isinstance(item, Value):
            return self.name(item.index)
        if isinstance(item, Here):
            return self.device(item)
        if isinstance(item, dict):
            pairs = [f"{self.item(key)}: {self.item(value)}" for key, value in item.items()]
            whole = f"{{{', '.join(pairs)}}}"
            if type(item) is dict:
                return whole
            make = self.functions.kinds.setdefault(id(item), functools.partial(of_its_kind, item))
            return f"{self.functions.give(make, 'of_its_kind')}({whole})"
        if isinstance(item, (tuple, list)):
            return self._sequence(item, hint)
        if type(item) is slice:
            parts = item.start, item.stop, item.step
            return f"slice({', '.join(map(self.item, parts))})"
        text = self.functions.literal(item)
        if text is None:
            hint = hint or f"{self.task.name}_arg"
            give = self.functions.reference if callable(item) else self.functions.give
            text = give(item, hint)
        return text

    def _sequence(self, items: Any, hint: str) -> str:
        text = ", ".join(self.item(item, hint) for item in items)
        if type(items) is tuple:
            return f"({text},)" if len(items) == 1 else f"({text})"
        if type(items) is list:
            return f"[{text}]"
        kind = self.functions.reference(type(items), type(items).__name__)
        return f"{kind}({text})" if hasattr(items, "_fields") else f"{kind}([{text}])"


# ---- statements


def is_region(task: Task) -> bool:
    """Whether a task has parts, and a function that does what they do."""
    return task.composite is not None and task.fn is not task.composite


def region_text(task: Task, name: str, functions: Functions, names: Names) -> str:
    """Return the definition of a function that does what a region does.

    Its last parameters are the devices of ``Here``.
    """
    whole = task.composite
    assert whole is not None
    taken = [leaf.name for leaf in task.args[: len(whole.takes)]]
    given = {index: names.variable(label) for index, label in zip(whole.takes, taken, strict=True)}
    devices = [names.variable("device") for _ in whole.heres]
    head = f"def {name}({', '.join([*given.values(), *devices])}):"
    here = dict(zip(whole.heres, devices, strict=True))
    statements = Statements(functions, names.variable).parts(whole, given, here.__getitem__)
    lines = [f"    {text}" for text in statements if not text.startswith("del ")]
    returned = f"    return {', '.join(given[index] for index in whole.gives)}"
    compiler = getattr(task.fn, "compiler", None)
    name = getattr(compiler, "__qualname__", type(compiler).__qualname__)
    how = "@torch.compile" if compiler is None else f"# compiled by {name}"
    return "\n".join([how, head, *lines, returned]) + "\n"


class Statements:
    """Writes statements; ``variable`` returns a name that is not in use, for that of a result.

    While a statement of a part of a merged task is yielded, ``within`` has that part; and where
    merged tasks are nested, those that contain it.
    """

    def __init__(self, functions: Functions | Bound, variable: Callable[[str], str]):
        self.functions = functions
        self.variable = variable
        self.within: tuple[Task, ...] = ()

    def of(
        self,
        task: Task,
        given: Mapping[int, str],
        made: dict[int, str],
        used: Container[int],
        device: Device,
    ) -> Iterator[str]:
        """Write the calls of a task, and add the names of used results to ``made``.

        Results that have a name in ``made`` keep it. A merged task is the calls of its parts.
        """
        whole = task.composite
        if whole is not None and not is_region(task):
            pairs = zip(whole.takes, task.args, strict=False)
            names = {inner: given[value.index] for inner, value in pairs}
            results = list(zip(whole.gives, (use.value for use in task.outputs), strict=True))
            for inner, value in results:
                if value in made:
                    names.setdefault(inner, made[value])
            yield from self.parts(whole, names, device)
            for inner, value in results:
                if made.setdefault(value, names[inner]) != names[inner]:
                    yield f"{made[value]} = {names[inner]}"
            if unused := [made[use.value] for use in task.outputs if use.value not in used]:
                yield f"del {', '.join(unused)}"
            return
        call = call_of(self.functions, task, given.__getitem__, device)
        values = list(flatten(task.result)) if task.outputs else []
        is_checked = self.functions.exact and not isinstance(task.result, Value)
        is_used = is_checked or any(value.index in used for value in values)
        if not values or (call.kind == "call" and not is_used):
            yield call.text
            return
        names = {
            value.index: made.get(value.index) or self.variable(value.name) for value in values
        }
        made.update(names)
        if isinstance(self.functions, Bound):
            yield from self._checked(task, call.text, names, self.functions)
        else:
            yield from self._unpacked(task.result, call.text, names)
        if unused := [name for index, name in names.items() if index not in used]:
            yield f"del {', '.join(unused)}"

    def parts(self, whole: Merged, names: dict[int, str], device: Device) -> Iterator[str]:
        """Write the calls of the parts of a merged task; add the names of their results."""
        outer = self.within
        for part, dead in zip(whole.tasks, whole.dead, strict=True):
            self.within = (*outer, part)
            own = {use.value for use in part.outputs}
            yield from self.of(part, names, names, own.difference(dead), device)
            self.within = outer
            if last := [names[index] for index in dead if index not in own]:
                yield f"del {', '.join(last)}"

    def _checked(
        self, task: Task, call: str, names: Mapping[int, str], bound: Bound
    ) -> Iterator[str]:
        """Assign results to names. The lines raise ValueError for results of another shape."""
        shape = task.result
        if isinstance(shape, Value):
            yield f"{names[shape.index]} = {call}"
            return
        targets = ", ".join(names[use.value] for use in task.outputs)
        targets += "," if len(task.outputs) == 1 else ""
        leaves = bound.reference(functools.partial(_leaves, task), "leaves")
        if isinstance(shape, dict) or not all(isinstance(leaf, Value) for leaf in shape):
            yield f"{targets} = {leaves}({call})"
            return
        yield f"r = {call}"
        kind = "type(r) is not tuple and type(r) is not list"
        yield f"if {kind} or len(r) != {len(shape)}: r = {leaves}(r)"
        yield f"{targets} = r"
        yield "del r"

    def _unpacked(self, shape: Any, text: str, made: Mapping[int, str]) -> Iterator[str]:
        """Assign the result of a call to names, in its structure."""
        dicts: list[tuple[str, dict[Any, Any]]] = []
        target = self._target(shape, made, dicts)
        if target.endswith(")") and len(shape) > 1:
            target = target[1:-1]
        yield f"{target} = {text}"
        for name, items in dicts:
            for key, item in items.items():
                yield from self._unpacked(item, f"{name}[{literal(key) or repr(key)}]", made)
            yield f"del {name}"

    def _target(
        self, shape: Any, made: Mapping[int, str], dicts: list[tuple[str, dict[Any, Any]]]
    ) -> str:
        """Return the target of an assignment.

        Dicts, which cannot be targets, get a name and are added to ``dicts``.
        """
        if isinstance(shape, Value):
            return made[shape.index]
        if isinstance(shape, dict):
            dicts.append((self.variable("results"), shape))
            return dicts[-1][0]
        inner = ", ".join(self._target(item, made, dicts) for item in shape)
        return f"({inner},)" if len(shape) == 1 else f"({inner})"


def numbered() -> Callable[[str], str]:
    """Return what gives variables numbers, for the runtime."""
    numbers = itertools.count()
    return lambda name: f"t{next(numbers)}"


def _leaves(task: Task, returned: Any) -> list[Any]:
    """Return the results of a task in order. Raises ValueError if their shape differs."""
    return [item for _, item in task.results(returned)]
