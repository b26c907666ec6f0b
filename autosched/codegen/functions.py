"""Write references to functions, and the definitions or imports they need.

A function is referred to by its name in torch, or imported. A function for which neither works is
*given*: it becomes a keyword parameter of ``step``, as does every other object that cannot be written
as source. If such an argument is missing, Python's own error names it. Inspects the loaded modules
and imports none: a name is used only if it refers to the very same object. Variables and parameters
have Python's identifiers for the names that users chose.

The runtime needs no text that others can read: it binds each object to a name.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

_BUILTINS = frozenset(dir(builtins))
_NO_NAMES = frozenset(keyword.kwlist) | {"__debug__"}
_NAMESPACES = ("", "nn.functional.", "linalg.", "fft.", "special.", "Tensor.")


class Bound:
    """Objects that a source refers to, bound to names; none of these is a variable's.

    >>> bound = Bound()
    >>> bound.reference(len, "len"), bound.give([], "of users"), bound.means["len_0"]
    ('len_0', 'given_1', <built-in function len>)
    """

    exact = True  # calls are written so that arguments may have any type

    def __init__(self, between: str = "_") -> None:
        self.means: dict[str, Any] = {}  # the objects by name, which are kept alive
        self.kinds: dict[int, Any] = {}  # what makes a dict like one of another class
        self._names: dict[int, str] = {}
        self._between = between  # a hint and a number

    def reference(self, item: Any, hint: str) -> str:
        """Return the name of an object."""
        name = self._names.get(id(item))
        if name is None:
            stem = hint if hint.isascii() and hint.isidentifier() else "given"
            name = self._names[id(item)] = f"{stem}{self._between}{len(self._names)}"
            self.means[name] = item
        return name

    give = reference

    @staticmethod
    def literal(item: Any) -> str | None:
        """Return an immutable constant as source; None for anything else."""
        kind = type(item)
        if kind in (bool, int, str, bytes, type(None)) or (kind is float and math.isfinite(item)):
            return repr(item)
        return "..." if item is Ellipsis else None


class Functions:
    """The functions and constants that a source refers to, collected while it is written."""

    exact = False

    def __init__(self, names: Names):
        self.names = names
        self.imports: dict[str, None] = {}  # the lines
        self.texts: list[str] = []  # source of functions
        self.given: dict[str, Any] = {}
        self.kinds: dict[int, Any] = {}  # what makes a dict like one of another class
        self._known: dict[int, str] = {}
        self.literal = literal

    def reference(self, item: Any, hint: str) -> str:
        """Return the expression by which ``step`` refers to a function or class."""
        if id(item) not in self._known:
            text = torch_path(item) or self._imported(item)
            if text is None:
                return self.give(item, hint)
            self._known[id(item)] = text
        return self._known[id(item)]

    def give(self, item: Any, hint: str) -> str:
        """Return the parameter for an object that cannot be written as source."""
        if id(item) not in self._known:
            name = self._known[id(item)] = self.names.variable(hint)
            self.given[name] = item
        return self._known[id(item)]

    def define(self, item: Any, hint: str, write: Callable[[str], str]) -> None:
        """Define a function by the source that ``write`` returns for its name.

        If that source refers to objects that cannot be written, the function is given instead, when
        it is referred to.
        """
        before = self.given.copy(), self._known.copy()
        name = self.names.shared(hint)
        text = write(name)
        if self.given.keys() & set(re.findall(r"\w+", text)):
            self.given, self._known = before
            return
        self._known[id(item)] = name
        self.texts.append(text)

    def _imported(self, item: Any) -> str | None:
        found = importable(item)
        if found is None:
            return None
        module, path = found
        root, dot, rest = path.partition(".")
        local = self.names.shared(root)
        if (module, local) != ("builtins", root):
            renamed = f" as {local}" if local != root else ""
            self.imports[f"from {module} import {root}{renamed}"] = None
        return local + dot + rest


def torch_path(item: Any) -> str | None:
    """Return how a function or type of torch is written after ``import torch``.

    None if not torch's.

    >>> import torch
    >>> list(map(torch_path, (torch.relu, torch.ops.aten.mm.default, torch.linalg.norm, print)))
    ['torch.relu', 'torch.ops.aten.mm.default', 'torch.linalg.norm', None]
    """
    if type(item).__module__ == "torch._ops":
        path = f"ops.{item}"
        return f"torch.{path}" if _reach("torch", path) is item else None
    name = getattr(item, "__name__", None)
    owner = getattr(item, "__objclass__", None)
    home = getattr(item, "__module__", None) or getattr(owner, "__module__", None)
    if not isinstance(name, str) or str(home).partition(".")[0] != "torch":
        return None
    for space in _NAMESPACES:
        for path in (f"{space}{name}", f"{space}{name.removeprefix(space.rstrip('.') + '_')}"):
            if _reach("torch", path) is item:
                return f"torch.{path}"
    return None


def importable(item: Any) -> tuple[str, str] | None:
    """Return the module and name that import an object, or None.

    >>> import statistics
    >>> importable(statistics.mean), importable(lambda: None), importable(importable)
    (('statistics', 'mean'), None, None)
    """
    module = getattr(item, "__module__", None)
    name = getattr(item, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    module = "operator" if module == "_operator" else module
    if module.partition(".")[0] in ("__main__", "autosched") or _reach(module, name) is not item:
        return None
    return module, name


def _reach(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except Exception:  # lazy namespaces may raise anything
            return None
    return found


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


def quoted(text: str | bytes) -> str:
    r"""Return a string as source, in double quotes where they need no escape.

    >>> quoted("y"), quoted('"')
    ('"y"', '\'"\'')
    """
    written = repr(text)
    mark, inner = ("b", written[2:-1]) if isinstance(text, bytes) else ("", written[1:-1])
    return written if '"' in inner or "'" in inner else f'{mark}"{inner}"'


# ---- identifiers


class Names:
    """The names that are taken: in the module, in its function ``step``, or in both.

    >>> names = Names(module=["functools"], both=["torch"])
    >>> [names.variable(name) for name in ("torch", "h.0", "lambda", "sum")]
    ['torch_0', 'h_0', 'lambda_', 'sum_']
    """

    def __init__(self, module: list[str], both: list[str]):
        self._module = {*module, *both}
        self._step = set(both)

    def parameter(self, name: str) -> str:
        """Take a name in ``step`` that may shadow a builtin, such as ``input``."""
        found = _free(identifier(name), self._step)
        self._step.add(found)
        return found

    def variable(self, name: str) -> str:
        """Take a name in ``step``."""
        valid = identifier(name)
        return self.parameter(f"{valid}_" if valid in _BUILTINS else valid)

    def shared(self, name: str) -> str:
        """Take a name in the module that ``step`` uses."""
        found = _free(identifier(name), self._module | self._step)
        self._module.add(found)
        self._step.add(found)
        return found


def identifier(name: str) -> str:
    """Return the valid identifier that is most similar to a name.

    >>> identifier("conv1.weight"), identifier("2x"), identifier("class")
    ('conv1_weight', '_2x', 'class_')
    """
    valid = re.sub(r"\W", "_", unicodedata.normalize("NFKC", name))
    if not valid.isidentifier():
        valid = "_" + re.sub(r"\W", "_", valid, flags=re.ASCII)
    return f"{valid}_" if valid in _NO_NAMES else valid


def _free(name: str, taken: set[str]) -> str:
    number = 0
    found = name
    while found in taken:
        found = f"{name}_{number}"
        number = number + 1
    return found
