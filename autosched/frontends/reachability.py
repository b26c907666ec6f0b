"""Find the non-tensor objects that a function can read.

Follows the names that the function's code, and the code that it calls, mention. Does not see
objects that are reached by computed names or through ``vars``, inside objects of libraries, in
lists and dicts of more than a thousand items, and in comparisons of dataclasses. Knows neither
guards nor graphs.
"""

from __future__ import annotations

import enum
import functools
import gc
import os
import sys
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from functools import partial
from itertools import chain, compress, repeat
from operator import is_, ne
from pathlib import Path
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy
import torch
from torch._C._dynamo.guards import dict_version
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.nn.modules import module as of_modules
from torch.optim import optimizer as of_optimizers

from autosched._lib.code_names import names_in
from autosched.frontends.state import hooks_of

_MOST_ITEMS = 1000  # of a list or dict; longer ones are data
_MOST_BYTES = 65_536  # of an array, likewise
_VALUES = (
    *(bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Methods that torch calls without a name in the user's code, and special methods whose calls are
# visible elsewhere or do not matter. Other special methods, such as __add__, Python calls.
_CALLED_BY_TORCH = frozenset("forward backward setup_context".split())
_NOT_FOLLOWED = frozenset(
    "__init__ __new__ __post_init__ __init_subclass__ __del__ __repr__ __reduce__".split()
)
_LIBRARIES = frozenset(("torch", "autosched", "numpy"))
_PYTHON = f"{Path(functools.__file__).parent}{os.sep}"  # where Python's own modules are
_WRAPPED = "func args keywords __self__ __func__ fget fset".split()
_OPERATOR_FUNCTIONS = (
    "_init_fn _backend_fns _abstract_fn _setup_context_fn _backward_fn _torch_dispatch_fns"
).split()
_EMPTY_CELL = CellType()
_KEYS: type = type({}.keys())
_END = (object(),)  # between containers, so that an item that moves to the next one is seen
_ABSENT = object()
GLOBAL_HOOKS = {
    name: item
    for module in (of_modules, of_optimizers)
    for name, item in vars(module).items()
    if name.startswith("_global_") and isinstance(item, dict)
}


class _Name(str):
    """The name under which the next object was found."""


class Reach:
    """The non-tensor values that a call can read.

    ``key`` has their present values, and ``unchanged`` tests whether they remain. ``written``:
    include values that code only writes; ``varying``: leave out these items of dicts, by their ids.

    1. Start with the roots, torch's global hooks, and custom operators that code mentions.
    2. Visit each object once. Its kind determines what ``key`` contains of it, what ``unchanged``
       compares, and which objects can be read through it: all items of a container, but only
       those attributes and globals that some code mentions by name.
    3. Each function adds the names in its code to ``mentioned``, and so may make objects readable
       that were passed over before. Repeat from 1 until no name is new.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        written: bool = False,
        varying: Mapping[int, Collection[str]] = {},
    ):
        self.roots = [*roots, *GLOBAL_HOOKS.values()]
        self.varying = varying
        self.written = written
        self.mentioned: set[str] = set()
        before = -1
        while before != len(self.mentioned):
            before = len(self.mentioned)
            self.key: list[Hashable] = []
            # What ``unchanged`` compares: all items of containers; single items, by namespace and
            # name; attributes of functions, cells and objects with slots; classes of objects; and
            # contents of objects that are neither items nor attributes.
            self.containers: list[Any] = []
            self.entries: list[tuple[Mapping[str, Any], str]] = []
            self.attributes: list[tuple[Any, str]] = []
            self.objects: list[Any] = []
            self.contents: list[Callable[[], Any]] = []
            self.classes: dict[int, type] = {}  # that were read, by the ids of their dicts
            self._seen: dict[int, tuple[int, Any]] = {}
            self._walk()

    def unchanged(self) -> Callable[[], bool]:
        """Return a function that tests whether the identical objects are still there.

        It refers to ``self``, which holds all objects, so that no id is used again. Dicts that were
        not written since the last call are passed over; of all else, one loop in C reads the items.
        """
        names: dict[int, tuple[Any, list[str]]] = {}
        for namespace, name in self.entries:
            holder = namespace if (own := dict_of(namespace)) is None else own
            names.setdefault(id(holder), (holder, []))[1].append(name)
        reads: list[tuple[Any, Callable[[], list[Any]]]] = [
            *((item, partial(_contents, item)) for item in self.containers if item),
            *((held, partial(_entries, held, some)) for held, some in names.values()),
        ]
        known = [
            (held, read, read()) for item, read in reads if (held := dict_of(item)) is not None
        ]
        dicts = [held for held, _, _ in known]
        views: list[Iterable[Any]] = []  # of other containers, such as lists
        for item in (item for item, _ in reads if dict_of(item) is None):
            is_mapping = isinstance(item, Mapping)
            views += (item.keys(), item.values(), _END) if is_mapping else (item, _END)
        empty = [item for item in self.containers if not item]
        objects = [item for item, _ in self.attributes]
        fields = [name for _, name in self.attributes]

        def present() -> Iterator[Any]:
            attributes = map(getattr, objects, fields, repeat(_ABSENT))
            return chain(attributes, map(type, self.objects), chain.from_iterable(views))

        versions = list(map(dict_version, dicts))
        before = list(present())
        values = [read() for read in self.contents]

        def check() -> bool:
            nonlocal versions
            try:
                if any(empty) or not all(map(is_, present(), before)):
                    return False
            except ValueError:  # a cell is empty
                return False
            now = list(map(dict_version, dicts))
            if now != versions:
                for _, read, old in compress(known, map(ne, now, versions)):
                    items = read()
                    if len(items) != len(old) or not all(map(is_, items, old)):
                        return False
                versions = now
            return [read() for read in self.contents] == values

        return check

    def found(self) -> list[Any]:
        """Return all objects that were found."""
        return [item for _, item in self._seen.values()]

    def _walk(self) -> None:
        operators = [(name.split("::"), item) for name, item in list(OPDEFS.items())]
        used = [item for names, item in operators if self.mentioned.issuperset(names)]
        pending = [*self.roots, *used][::-1]
        visit = self._visit
        while pending:
            item = pending.pop()
            if type(item) is _Name:
                self.key.append(item)
            elif is_value(item):
                self.key.append(value_key(item))
                if type(item) is str and item.isidentifier():
                    self.mentioned.add(item)  # for getattr
            elif id(item) in self._seen:
                self.key.append(self._seen[id(item)][0])
            else:
                self._seen[id(item)] = len(self._seen), item
                pending += list(visit(item))[::-1]

    # ---- kinds of objects

    def _visit(self, item: Any) -> Iterator[Any]:
        """Note an object; yield what can be read through it."""
        match item:
            case list() | tuple() | set() | frozenset() | dict() | deque() | MappingProxyType():
                yield from self._container(item)
            case UserDict() | UserList() | ChainMap() | WeakKeyDictionary() | WeakValueDictionary():
                yield from (getattr(item, name, None) for name in ("data", "maps"))
                yield from self._object(item)
            case (
                functools.partial()
                | functools.partialmethod()
                | functools.cached_property()
                | staticmethod()
                | classmethod()
                | MethodType()
                | property()
            ):
                yield from (getattr(item, name, None) for name in _WRAPPED)
            case weakref.ref():
                yield item()
            case CustomOpDef() | torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
                packet: Any = getattr(item, "overloadpacket", item)
                is_definition = isinstance(item, CustomOpDef)
                known = item if is_definition else OPDEFS.get(packet._qualified_op_name)
                yield from (getattr(known, name, None) for name in _OPERATOR_FUNCTIONS)
            case ContextVar():
                self.key.append(id(item))
                self.contents.append(partial(_content, item))
                yield item.get(None)
            case bytearray() | array() | numpy.ndarray() if _nbytes(item) <= _MOST_BYTES:
                self.key.append((type(item), _data(item)))
                self.contents.append(partial(_data, item))
            case torch.Tensor():  # its other properties are compared elsewhere
                self.key.append(id(item) if is_trainable(item) else torch.Tensor)
                yield from hooks_of(item)
            case torch.nn.Module():
                yield from self._module(item)
            case torch.optim.Optimizer():
                yield from self._optimizer(item)
            case type() if not is_installed(item.__module__):
                yield from self._classes(item)
                yield from self._classes(type(item))
            case ModuleType() if not is_installed(item.__name__):
                self.key.append(id(item))
                self.containers.append(vars(item).keys())
                yield from self._mentioned(vars(item))
            case FunctionType():
                yield from self._function(item)
            case _ if _is_opaque(item):
                self.key.append(id(item))
            case _:
                yield from self._object(item)

    def _module(self, item: torch.nn.Module) -> Iterable[Any]:
        self.key.append(id(item))
        self.objects.append(item)
        self.containers.append(item.__dict__)
        for name, part in item.__dict__.items():
            # Code takes nothing from an iterator that it does not mention.
            if name in self.mentioned or not is_iterator(part):
                yield _Name(name)
                yield part
        yield from self._classes(type(item))

    def _optimizer(self, item: torch.optim.Optimizer) -> Iterable[Any]:
        """Note an optimizer; return its attributes, without its state of tensors."""
        self.key.append(id(item))
        self.containers += [item.__dict__, item.state]
        for key, held in item.state.items():
            if not isinstance(key, torch.Tensor):
                yield from (_Name(key) if type(key) is str else key, held)
            elif isinstance(held, dict):
                self.containers.append(held)
        yield from (value for name, value in item.__dict__.items() if name != "state")
        yield from self._classes(type(item))

    def _function(self, fn: FunctionType) -> Iterable[Any]:
        if _is_known(fn.__module__):
            yield from self._object(fn)
            return
        self.key.append(fn.__code__)
        names, mentioned, imports = names_in(fn.__code__, self.written)
        self.mentioned.update(mentioned)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if cell != _EMPTY_CELL:
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
            relative = f"{package}.{name}" if name else f"{package}"
            yield sys.modules.get(name) or sys.modules.get(relative)

    # ---- what several kinds have

    def _container(self, item: Any) -> Iterator[Any]:
        """Note a container; yield its items."""
        self.key.append((type(item), len(item)))
        if not _is_known(type(item).__module__):
            yield from self._object(item)
        if len(item) > _MOST_ITEMS:
            self.key.append(id(item))
            return
        if id(item) in self.varying:
            names = [name for name in item if name not in self.varying[id(item)]]
            self.containers.append(item.keys())
            self.entries += [(item, name) for name in names]
            item = {name: item[name] for name in names}
        elif not isinstance(item, (tuple, frozenset)):
            self.containers.append(item)
        if isinstance(item, Mapping):
            # load_state_dict changes the order of the settings in an optimizer's group.
            for name in sorted(item, key=str) if item.keys() >= {"params", "lr"} else item:
                yield _Name(name) if type(name) is str else name
                yield item[name]
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
        for name in sorted(self.mentioned & attributes.keys()):
            self.entries.append((attributes, name))
            yield _Name(name)
            yield attributes[name]

    def _classes(self, kind: type) -> Iterator[Any]:
        """Yield attributes of classes that code mentions or Python calls."""
        self.key.append(id(kind))
        for base in kind.__mro__:
            if _is_known(base.__module__) or id(dict_of(vars(base))) in self.classes:
                continue
            self.classes[id(dict_of(vars(base)))] = base
            if not is_installed(base.__module__):
                self.containers.append(vars(base).keys())
            for name, item in list(vars(base).items()):
                if name in self.mentioned or _is_called_implicitly(name, item):
                    self.entries.append((vars(base), name))
                    yield _Name(name)
                    yield item


def dict_of(item: Any) -> dict[Any, Any] | None:
    """Return the dict that an object is, or of which it is a view; None for other containers."""
    if type(item) is MappingProxyType or type(item) is _KEYS:
        (item,) = gc.get_referents(item)
    return item if type(item) is dict else None


def _contents(item: Any) -> list[Any]:
    """Return the present items of a container; of a mapping, also the keys."""
    return [*item, *(item.values() if isinstance(item, Mapping) else ())]


def _entries(namespace: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    return [namespace.get(name, _ABSENT) for name in names]


def is_trainable(tensor: torch.Tensor) -> bool:
    """Whether an optimizer may update a tensor, which then is the same in each call."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return is_parameter or (tensor.requires_grad and tensor.is_leaf)


def is_value(item: Any) -> bool:
    """Whether an object is a value, such as a number or string."""
    return item is None or (isinstance(item, _VALUES) and not isinstance(item, enum.Enum))


def is_iterator(item: Any) -> bool:
    """Whether an object returns something else each time, and does not say what is next."""
    kind = type(item)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def value_key(item: Any) -> Hashable:
    """Return a value's key: 1 differs from True, and 0.0 from -0.0."""
    return type(item), repr(item) if isinstance(item, (float, complex)) else item


def _content(variable: ContextVar[Any]) -> Hashable:
    found = variable.get(None)
    return value_key(found) if is_value(found) else id(found)


def _nbytes(item: Any) -> int:
    return int(getattr(item, "nbytes", 0) or len(item) * getattr(item, "itemsize", 1))


def _data(item: Any) -> Hashable:
    if isinstance(item, numpy.ndarray):
        return item.shape, str(item.dtype), item.tobytes()
    return bytes(item)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if not _is_known(base.__module__):
            for name, item in vars(base).items():
                if isinstance(item, MemberDescriptorType):
                    yield name


def _is_called_implicitly(name: str, item: Any) -> bool:
    """Whether Python or torch calls a function implicitly that no dataclass has made."""
    item = getattr(item, "__func__", item)  # of a static method
    if not isinstance(item, FunctionType) or item.__code__.co_filename == "<string>":
        return False
    is_special = name[:2] == name[-2:] == "__" and name not in _NOT_FOLLOWED
    return name in _CALLED_BY_TORCH or is_special


@functools.cache
def _is_known(module: Any) -> bool:
    """Whether a module is of a library that reads nothing variable."""
    if not isinstance(module, str):
        return True
    name = module.partition(".")[0]
    if name not in sys.stdlib_module_names:
        return name in _LIBRARIES
    # A user's file may have the name of a module of Python.
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not file.endswith(".py") or file.startswith(_PYTHON)


@functools.cache
def is_installed(module: Any) -> bool:
    """Whether a module is of a library, whose globals are constant."""
    if _is_known(module):
        return True
    packages = ("site-packages", "dist-packages")
    folders = [folder for folder in sys.path if Path(folder).name in packages]
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in folders)


def _is_opaque(item: Any) -> bool:
    """Whether an object is identified by its identity, whatever it contains."""
    of_library = type(item).__module__.partition(".")[0] in _LIBRARIES
    if of_library or isinstance(item, (type, ModuleType, enum.Enum)):
        return True
    return not hasattr(item, "__dict__") and not any(_slots(type(item)))
