"""Find the torch name, the import or the source of a function.

Inspects the loaded modules and imports none. A name is used only if it refers to the very same
object, and source only if it compiles to the very same code.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_NAMESPACES = ("", "nn.functional.", "linalg.", "fft.", "special.", "Tensor.")


class Source(NamedTuple):
    """A function's source, and the global names that it needs, with their current objects."""

    text: str
    needs: dict[str, Any]


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


def source_of(fn: Any) -> Source | None:
    """Return the source of a Python function, or None.

    It is None for lambdas, closures, and everything else that source alone does not define. A
    function that a decorator returned unchanged has source, which is copied without the decorator.
    """
    if not isinstance(fn, FunctionType) or fn.__dict__:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(fn))
        (node,) = ast.parse(text).body
        text = "".join(text.splitlines(keepends=True)[node.lineno - 1 :])
        table = symtable.symtable(text, "<source>", "exec")
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef) or not _has_defaults(fn, node.args):
        return None
    if any(isinstance(child, ast.Global) for child in ast.walk(node)):
        return None
    needs: dict[str, Any] = {}
    for name in dict.fromkeys(_globals_in(table)):
        if name in fn.__globals__:
            needs[name] = fn.__globals__[name]
        elif hasattr(builtins, name):
            needs[name] = getattr(builtins, name)
        else:
            return None
    if not _is_code_of(fn, text, needs):
        return None
    return Source(text.strip() + "\n", needs)


def _reach(module: str, path: str) -> Any:
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except Exception:  # lazy namespaces may raise anything
            return None
    return found


def _globals_in(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that a module of one function needs, except its own."""
    defined = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() and not symbol.is_referenced()
    }
    pending = [table]
    while pending:
        part = pending.pop()
        pending += reversed(part.get_children())
        names = [
            s.get_name()
            for s in part.get_symbols()
            if s.is_referenced() and (s.is_global() or part is table)
        ]
        yield from (name for name in sorted(names) if part is not table or name not in defined)


def _is_code_of(fn: FunctionType, text: str, needs: Mapping[str, Any]) -> bool:
    """Whether source still compiles to the function's code: a file may have changed since."""
    items = needs.items()
    foreign = [name for name, item in items if getattr(item, "__module__", None) != fn.__module__]
    # Python compiles calls of imported names differently.
    imports = "".join(f"import {name}\n" for name in foreign)
    for source in (text, imports + text):
        module = compile(source, "<source>", "exec", dont_inherit=True)
        codes = (code for code in module.co_consts if isinstance(code, CodeType))
        if any(_equal(code, fn.__code__) for code in codes):
            return True
    return False


def _equal(a: CodeType, b: CodeType) -> bool:
    if a.co_code != b.co_code or a.co_names != b.co_names or a.co_varnames != b.co_varnames:
        return False
    pairs = list(zip(a.co_consts, b.co_consts, strict=False))
    return len(a.co_consts) == len(b.co_consts) and all(
        _equal(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else repr(x) == repr(y)
        for x, y in pairs
    )


def _has_defaults(fn: FunctionType, arguments: ast.arguments) -> bool:
    """Whether the defaults in the source are those of the function."""
    try:
        written = [ast.literal_eval(node) for node in arguments.defaults]
        keywords = {
            argument.arg: ast.literal_eval(node)
            for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if node is not None
        }
    except ValueError:
        return False
    if repr(tuple(written)) != repr(fn.__defaults__ or ()):
        return False
    return repr(keywords) == repr(fn.__kwdefaults__ or {})
