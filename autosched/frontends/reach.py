"""Find the non-tensor objects that a function can read.

Follows the names that the function's code, and the code that it calls, mention. Does not see
objects that are reached by computed names or through ``vars``, inside objects of libraries, in
lists and dicts of more than a thousand items, and in comparisons of dataclasses. Knows neither
guards nor graphs.
"""

from __future__ import annotations

import dis
import enum
import functools
import os
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain
from operator import is_
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy
import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from autosched.frontends.state import hooks_of

__all__ = ["Reach", "is_installed", "is_plain", "told"]

_MOST_BYTES = 65_536  # of an array, likewise
_MOST_ITEMS = 1000  # of a list or dict; longer ones are data
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CALLED_UNNAMED = frozenset(
    "forward backward setup_context".split()
)  # by torch; Python calls __add__ and its like
_CALLED_ELSEWHERE = frozenset(
    "__init__ __new__ __post_init__ __init_subclass__ __del__ __repr__ __reduce__".split()
)
_LIBRARIES = frozenset(("torch", "autosched", "numpy"))
_PYTHON = f"{Path(functools.__file__).parent}{os.sep}"  # where Python's own modules are
_NO_CELL = CellType()
_END = (object(),)  # between containers, so that nothing moves from one to the next unseen
_ABSENT = object()
_GLOBAL_HOOKS = [
    item
    for module in (of_modules, of_optimizers)
    for name, item in vars(module).items()
    if name.startswith("_global_") and isinstance(item, dict)
]


class _Name(str):
    """The name under which the next object was found."""


class Reach:
    """The non-tensor values that a call can read.

    ``key`` has their present values, and ``unchanged`` tests whether they remain.
    """

    def __init__(self, roots: Iterable[Any], written: bool = False):
        self.roots = [*roots, *_GLOBAL_HOOKS]  # whether to visit values that code only writes, too
        self.written = written
        self.mentioned: set[str] = set()
        before = -1
        while before != len(self.mentioned):  # code found later may mention items that were skipped
            before = len(self.mentioned)
            self.key: list[Hashable] = []
            self.containers: list[Any] = []
            self.attributes: list[
                tuple[Any, str]
            ] = []  # of functions, cells and objects with slots
            self.entries: list[tuple[Mapping[str, Any], str]] = []  # the others there do not count
            self.objects: list[Any] = []  # whose classes count
            self.values: list[Callable[[], Any]] = []  # of objects without attribute names
            self._seen: dict[int, tuple[int, Any]] = {}
            self._read: set[int] = set()  # classes
            self._walk()

    def unchanged(self) -> Callable[[], bool]:
        """Return a function that tests whether the identical objects are still there."""
        empty = [item for item in self.containers if not item]
        views = [view for item in self.containers if item for view in (*_views(item), _END)]
        held = list(chain.from_iterable(views))
        entries = [item.get(name, _ABSENT) for item, name in self.entries]
        attributes = [getattr(item, name, _ABSENT) for item, name in self.attributes]
        classes = list(map(type, self.objects))
        readers = self.values
        values = [read() for read in readers]
        kept = [item for _, item in self._seen.values()]

        def check(_kept: Any = kept) -> bool:
            try:
                return (
                    not any(empty)
                    and all(map(is_, chain.from_iterable(views), held))
                    and all(
                        map(is_, [item.get(name, _ABSENT) for item, name in self.entries], entries)
                    )
                    and all(
                        map(
                            is_,
                            [getattr(item, name, _ABSENT) for item, name in self.attributes],
                            attributes,
                        )
                    )
                    and all(map(is_, map(type, self.objects), classes))
                    and [read() for read in readers] == values
                )
            except ValueError:  # the cell is empty
                return False

        return check

    def found(self) -> list[Any]:
        """Return all objects that were found."""
        return [item for _, item in self._seen.values()]

    def _walk(self) -> None:
        pending = [*self.roots, *self._operators()][::-1]
        while pending:
            item = pending.pop()
            if is_plain(item):
                self.key.append(told(item))
                if type(item) is str and item.isidentifier():
                    self.mentioned.add(item)  # for getattr
            elif id(item) in self._seen:
                self.key.append(self._seen[id(item)][0])
            else:
                self._seen[id(item)] = len(self._seen), item  # kept, so that no id is used again
                pending += list(self._inside(item))[::-1]

    def _operators(self) -> list[Any]:
        """Return the custom operators that code mentions: ``torch.ops.mine.scale``."""
        known = [(name.split("::"), item) for name, item in list(OPDEFS.items())]
        return [item for names, item in known if self.mentioned.issuperset(names)]

    def _collection(self, item: Any) -> Iterable[Any]:
        """Note a container; of the user's own classes, the attributes, too."""
        own = () if _is_known(type(item).__module__) else self._object(item)
        return [*self._container(item), *own]

    def _optimizer(self, item: torch.optim.Optimizer) -> Iterable[Any]:
        """Note an optimizer; return what can be read through it, without its state, which is a container."""
        self.key.append(id(item))
        self.containers += [item.__dict__, item.state, *item.state.values()]
        own = [value for name, value in item.__dict__.items() if name != "state"]
        return [*own, *self._classes(type(item))]

    def _inside(self, item: Any) -> Iterable[Any]:  # noqa: C901 (a table: one case for each kind)
        """Note what an item is; return what can be read through it."""
        match item:
            case list() | tuple() | set() | frozenset() | dict() | deque() | MappingProxyType():
                return self._collection(item)
            case functools.partial() | functools.partialmethod():
                return [item.func, item.args, item.keywords]
            case CustomOpDef() | torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
                return _of_operator(item)
            case ContextVar():
                self.key.append(id(item))
                self.values.append(
                    lambda: told(found) if is_plain(found := item.get(None)) else id(found)
                )
                return [item.get(None)]
            case bytearray() | array() | numpy.ndarray() if _nbytes(item) <= _MOST_BYTES:
                self.key.append((type(item), _data(item)))
                self.values.append(lambda: _data(item))
                return ()
            case staticmethod() | classmethod() | MethodType():
                return [getattr(item, "__self__", None), item.__func__]
            case functools.cached_property() | property():
                return [getattr(item, name, None) for name in ("func", "fget", "fset")]
            case weakref.ref():
                return [item()]
            case FunctionType() if not _is_known(item.__module__):
                return self._function(item)
            case torch.nn.Module():
                self.key.append(id(item))
                self.objects.append(item)
                return [*self._container(item.__dict__), *self._classes(type(item))]
            case torch.optim.Optimizer():
                return self._optimizer(item)
            case torch.Tensor():
                self.key.append(
                    id(item) if isinstance(item, torch.nn.Parameter) else torch.Tensor
                )  # its looks are State's
                return hooks_of(item)
            case type() if not is_installed(item.__module__):
                return [*self._classes(item), *self._classes(type(item))]
            case ModuleType() if not is_installed(item.__name__):
                self.key.append(id(item))
                self.containers.append(vars(item).keys())
                return self._mentioned(vars(item))
            case _ if not _is_opaque(item):
                return self._object(item)
        self.key.append(id(item))
        return ()

    def _container(self, item: Any) -> Iterator[Any]:
        self.key.append((type(item), len(item)))
        if len(item) > _MOST_ITEMS:
            self.key.append(id(item))
            return
        if not isinstance(item, (tuple, frozenset)):
            self.containers.append(item)
        if isinstance(item, Mapping):
            for name, value in item.items():
                yield _Name(name) if type(name) is str else name
                yield value
        else:
            yield from item

    def _object(self, item: Any) -> Iterator[Any]:
        """Yield an object's attributes that code mentions, and those of its classes."""
        self.objects.append(item)
        held = getattr(item, "__dict__", {})
        self.containers.append(held.keys())
        yield from self._mentioned(held)
        for name in sorted(self.mentioned.intersection(_slots(type(item)))):
            self.attributes.append((item, name))
            yield _Name(name)
            yield getattr(item, name, None)
        yield held.get("__wrapped__")
        yield from self._classes(type(item))

    def _mentioned(self, attributes: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the attributes that code mentions."""
        for name in sorted(self.mentioned & attributes.keys()):
            self.entries.append((attributes, name))
            yield _Name(name)
            yield attributes[name]

    def _classes(self, kind: type) -> Iterator[Any]:
        """Yield attributes of a user's class and its bases that code mentions, or that Python calls implicitly."""
        self.key.append(id(kind))
        for base in kind.__mro__:
            if not _is_known(base.__module__) and id(base) not in self._read:
                self._read.add(id(base))
                if not is_installed(base.__module__):
                    self.containers.append(vars(base).keys())
                for name, item in list(vars(base).items()):
                    if name in self.mentioned or _is_called_unnamed(name, item):
                        self.entries.append((vars(base), name))
                        yield _Name(name)
                        yield item

    def _function(self, fn: FunctionType) -> Iterator[Any]:
        self.key.append(fn.__code__)
        names, mentioned, imports = _names(fn.__code__, self.written)
        self.mentioned.update(mentioned)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if cell != _NO_CELL:
                self.attributes.append((cell, "cell_contents"))
                yield _Name(name)
                yield cell.cell_contents
        self.attributes += [(fn, "__code__"), (fn, "__defaults__"), (fn, "__kwdefaults__")]
        yield fn.__defaults__
        yield fn.__kwdefaults__
        if {"environ", "getenv"}.intersection((*names, *mentioned)):
            yield os.environ._data  # type: ignore[attr-defined]
        if is_installed(fn.__module__):
            return
        self.containers.append(fn.__dict__.keys())
        yield from self._mentioned(fn.__dict__)
        for name in names:
            self.entries.append((fn.__globals__, name))
            yield _Name(name)
            yield fn.__globals__.get(name)
        package = fn.__globals__.get("__package__")
        for name in imports:
            yield sys.modules.get(name) or sys.modules.get(
                f"{package}.{name}" if name else f"{package}"
            )


def _of_operator(item: Any) -> list[Any]:
    """Return the functions of a custom operator, given by its definition or its callable."""
    if isinstance(item, torch._ops.OpOverload):
        item = OPDEFS.get(item._schema.name)
    elif isinstance(item, torch._ops.OpOverloadPacket):
        item = OPDEFS.get(item._qualified_op_name)
    names = "_init_fn _backend_fns _abstract_fn _setup_context_fn _backward_fn _torch_dispatch_fns"
    return [getattr(item, name, None) for name in names.split()]


def _nbytes(item: Any) -> int:
    return getattr(item, "nbytes", None) or len(item) * getattr(item, "itemsize", 1)


def _data(item: Any) -> Hashable:
    """Return the contents of an array of numbers."""
    if isinstance(item, numpy.ndarray):
        return item.shape, str(item.dtype), item.tobytes()
    return bytes(item)


def is_plain(item: Any) -> bool:
    """Whether an object is identified by its value, such as a number or a string."""
    return item is None or (isinstance(item, _PLAIN) and not isinstance(item, enum.Enum))


def told(item: Any) -> Hashable:
    """Return a plain object as part of a key, in which 1 differs from True, and 0.0 from -0.0."""
    return type(item), repr(item) if isinstance(item, (float, complex)) else item


def _views(container: Any) -> tuple[Iterable[Any], ...]:
    """Return views of a container that show its present items."""
    return (
        (container.keys(), container.values()) if isinstance(container, Mapping) else (container,)
    )


@functools.lru_cache(maxsize=10_000)
def _names(code: CodeType, written: bool) -> tuple[list[str], list[str], list[str]]:
    """Return the globals that code reads or writes, the attributes or strings that may name them, and imports."""
    found = {
        kind: dict[str, None]() for kind in ("GLOBAL", "NAME", "ATTR", "METHOD", "FROM", "IMPORT")
    }
    codes = [code]
    while codes:
        inner = codes.pop()
        codes += [item for item in inner.co_consts if isinstance(item, CodeType)]
        found["ATTR"].update(
            dict.fromkeys(c for c in inner.co_consts if isinstance(c, str) and c.isidentifier())
        )
        for instruction in dis.get_instructions(inner):
            action, _, kind = instruction.opname.partition("_")
            if (kind, action) == ("NAME", "IMPORT"):
                found["IMPORT"][instruction.argval] = None
            elif kind in found and (written or action in ("LOAD", "IMPORT")):
                found[kind][instruction.argval] = None
    attributes = [*found["ATTR"], *found["METHOD"], *found["FROM"]]
    return [*found["GLOBAL"], *found["NAME"]], attributes, [*found["IMPORT"]]


def _slots(kind: type) -> tuple[str, ...]:
    """Return the slots of a user's class and its bases."""
    bases = [base for base in kind.__mro__ if not _is_known(base.__module__)]
    return tuple(
        name
        for base in bases
        for name, item in vars(base).items()
        if isinstance(item, MemberDescriptorType)
    )


def _is_called_unnamed(name: str, item: Any) -> bool:
    """Whether Python or torch calls a class's function implicitly.

    Those that dataclasses make do not count.
    """
    item = getattr(item, "__func__", item)  # of a static method
    if not isinstance(item, FunctionType) or item.__code__.co_filename == "<string>":
        return False
    return name in _CALLED_UNNAMED or (
        name[:2] == name[-2:] == "__" and name not in _CALLED_ELSEWHERE
    )


def _is_known(module: Any) -> bool:
    """Whether a module belongs to a library whose code reads nothing that changes."""
    return not isinstance(module, str) or _is_library(module.partition(".")[0])


@functools.cache
def _is_library(name: str) -> bool:
    """Whether a top-level module is such a library.

    A user's file may have the name of a Python module.
    """
    if name not in sys.stdlib_module_names:
        return name in _LIBRARIES
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not file.endswith(".py") or file.startswith(_PYTHON)


@functools.cache
def is_installed(module: Any) -> bool:
    """Whether a module belongs to any library; its globals are assumed not to change."""
    if _is_known(module):
        return True
    folders = [
        folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")
    ]
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


def _is_opaque(item: Any) -> bool:
    """Whether an object is identified by its identity, whatever it contains."""
    of_torch = type(item).__module__.partition(".")[0] in ("torch", "autosched", "numpy")
    return of_torch or isinstance(item, (type, ModuleType, enum.Enum)) or not _has_attributes(item)


def _has_attributes(item: Any) -> bool:
    return hasattr(item, "__dict__") or bool(_slots(type(item)))
