"""Write references to functions, and the definitions or imports they need.

A function is referred to by its name in torch, or imported, or its source is copied together with
what that needs in turn. A function for which none of these works is *given*: it becomes a keyword
parameter of ``step``, as does every other object that cannot be written as source. If such an
argument is missing, Python's own error names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from autosched.codegen.names import Names
from autosched.codegen.origins import importable, source_of, torch_path
from autosched.codegen.pieces import quoted

__all__ = ["Functions"]

# Used by the generated source itself.
_OURS = frozenset("complex copy float functools range slice threading torch".split())


class Functions:
    """The functions and constants that a source refers to, collected while it is written."""

    def __init__(self, names: Names):
        self.names = names
        self.imports: dict[str, None] = {}  # the lines
        self.texts: list[str] = []  # source of functions, and of constants that they need
        self.given: dict[str, Any] = {}
        self.uses: dict[str, str] = {}  # the task or function that uses each given object
        self.means: dict[str, Any] = {}  # the objects that names of the module stand for
        self._known: dict[int, str] = {}

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
