"""Write references to functions, and the definitions or imports they need.

A function is referred to by its name in torch, or imported, or its source is copied together with
what that needs in turn. A function for which none of these works is *given*: it becomes a keyword
parameter of ``step``, as does every other object that cannot be written as source. If such an
argument is missing, Python's own error names it.

The runtime needs no text that others can read: it binds each object to a name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autosched.codegen.names import Names
from autosched.codegen.origins import importable, source_of, torch_path

# Used by the generated source itself.
_OURS = frozenset("complex copy float functools range slice threading torch".split())


class Bound:
    """Objects that a source refers to, bound to names; none of these is a variable's.

    >>> bound = Bound()
    >>> bound.reference(len, "len", ""), bound.give([], "of users", ""), bound.means["len_0"]
    ('len_0', 'given_1', <built-in function len>)
    """

    exact = True  # calls are written so that arguments may have any type

    def __init__(self, between: str = "_") -> None:
        self.means: dict[str, Any] = {}  # the objects by name, which are kept alive
        self._names: dict[int, str] = {}
        self._between = between  # a hint and a number

    def reference(self, item: Any, hint: str, user: str) -> str:
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
        self.texts: list[str] = []  # source of functions, and of constants that they need
        self.given: dict[str, Any] = {}
        self.uses: dict[str, str] = {}  # the task or function that uses each given object
        self.means: dict[str, Any] = {}  # the objects that names of the module stand for
        self._known: dict[int, str] = {}
        self.literal = literal

    def reference(self, item: Any, hint: str, user: str) -> str:
        """Return the expression by which ``step`` refers to a function or class."""
        if id(item) not in self._known:
            text = torch_path(item) or self._imported(item) or self._with_copied_source(item)
            if text is None:
                return self.give(item, hint, user)
            self._known[id(item)] = text
        return self._known[id(item)]

    def give(self, item: Any, hint: str, user: str) -> str:
        """Return the parameter for an object that cannot be written as source."""
        if id(item) not in self._known:
            name = self._known[id(item)] = self.names.variable(hint)
            self.given[name] = item
            self.uses[name] = user
        return self._known[id(item)]

    def define(self, item: Any, hint: str, write: Callable[[str], str]) -> None:
        """Define a function by the source that ``write`` returns for its name.

        If that source refers to objects that cannot be written, the function is given instead, when
        it is referred to.
        """
        before = self.given.copy(), self.uses.copy(), self._known.copy()
        name = self.names.shared(hint)
        text = write(name)
        if self.given.keys() & set(re.findall(r"\w+", text)):
            self.given, self.uses, self._known = before
            return
        self._known[id(item)] = name
        self.means[name] = item
        self.texts.append(text)

    def _imported(self, item: Any) -> str | None:
        found = importable(item)
        if found is None:
            return None
        module, path = found
        root, dot, rest = path.partition(".")
        local = self.names.shared(root)
        if (module, local) != ("builtins", root):
            self.imports[_from(module, root, local)] = None
        return local + dot + rest

    def _with_copied_source(self, fn: Any) -> str | None:
        """Copy a function's source, under another name if its own is taken; None if impossible."""
        source = source_of(fn)
        if source is None:
            return None
        needed: dict[str, tuple[Any, str]] = {}
        others = [(name, item) for name, item in source.needs.items() if item is not fn]
        if not all(self._can_define(*other, needed) for other in others):
            return None
        if fn.__name__ in source.needs and not self.names.is_free(fn.__name__, in_step=True):
            return None  # it is recursive, and its name is taken
        for name, (item, text) in needed.items():
            self._define(name, item, text)
        local = self.names.shared(fn.__name__)
        self.means[local] = fn
        self.texts.append(source.text.replace(f"def {fn.__name__}(", f"def {local}(", 1))
        return local

    def _can_define(self, name: str, item: Any, needed: dict[str, tuple[Any, str]]) -> bool:
        """Whether the module can define a name that a function needs.

        What must be written for that is added to ``needed``.
        """
        if name in needed or name in self.means:
            return (needed[name][0] if name in needed else self.means[name]) is item
        text = _defined(name, item)
        means_ours = name in _OURS and text in ("", f"import {name}")
        if not means_ours and not self.names.is_free(name):
            return False
        if text is not None:
            needed[name] = item, text
            return True
        source = source_of(item)
        if source is None or item.__name__ != name:
            return False
        needed[name] = item, source.text
        return all(self._can_define(*need, needed) for need in source.needs.items())

    def _define(self, name: str, item: Any, text: str) -> None:
        self.names.take(name)
        self.means[name] = item
        if text.startswith(("import ", "from ")):
            self.imports[text] = None
        elif text:
            self.texts.append(text)


def _defined(name: str, item: Any) -> str | None:
    """Return the import or constant that defines a name; empty for builtins."""
    if isinstance(item, ModuleType):
        own = item.__name__
        if own.partition(".")[0] in ("__main__", "autosched"):
            return None
        return f"import {own}" + (f" as {name}" if name != own else "")
    if (path := torch_path(item)) is not None:
        return f"{name} = {path}\n"
    if (found := importable(item)) is not None:
        if found == ("builtins", name):
            return ""
        return _from(*found, name) if "." not in found[1] else None
    if isinstance(item, str):
        return f"{name} = {quoted(item)}\n"
    if type(item) is float and not math.isfinite(item):
        return None
    return f"{name} = {item!r}\n" if type(item) in (bool, int, float, type(None)) else None


def _from(module: str, name: str, local: str) -> str:
    return f"from {module} import {name}" + (f" as {local}" if local != name else "")


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
