"""Guards: whether a call would be captured as an earlier one was.

A capture bakes in all that is no tensor: numbers among the arguments, in closures and globals, attributes of modules
and of objects, settings of optimizers. ``Reach`` walks over what a function can read of that, as far as its code, and
the code that this calls, mentions it by name. What it finds is a key, equal for calls of one kind; and the containers
it saw, which a ``Guard`` then only looks over: where each holds the very same objects, nothing has changed.

Knows no graph. Does not see what code reaches by computed names, in ``__slots__``, or inside objects of libraries.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from autosched.frontends.state import State

__all__ = ["Guard", "Reach", "Shape", "kind_of"]

_MOST_ITEMS = 1000  # of a list or dict; longer ones are data
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CALLED_UNNAMED = frozenset("__call__ __enter__ __exit__ __getitem__ __iter__ __len__ forward".split())
_LIBRARIES = frozenset(("torch", "autosched", "numpy", "builtins")) | sys.stdlib_module_names
_NO_CELL = CellType()
_END = (object(),)  # between containers, so that nothing moves from one to the next unseen

Tensors = dict[str, torch.Tensor]


class Shape:
    """The arguments of a call, taken apart: tensors, other objects, and what is left as a key."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.key = self._of((args, kwargs))

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            self.tensors.append(tree)
            return _looks(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree), tuple([self._of(item) for item in tree])
        if isinstance(tree, dict):
            return type(tree), *tree, tuple([self._of(item) for item in tree.values()])
        if _is_plain(tree):
            return _told(tree)
        self.others.append(tree)
        return type(tree)


class Reach:
    """What a call can read that is no tensor: ``key`` says what it is now, and ``unchanged`` whether it stays so."""

    def __init__(self, roots: Iterable[Any], written: bool = False):
        self.roots, self.written = list(roots), written  # whether to look at what code only writes, too
        self.mentioned: set[str] = set()
        before = -1
        while before != len(self.mentioned):  # code found late may mention what was passed by early
            before = len(self.mentioned)
            self.key: list[Hashable] = []
            self.containers: list[Any] = []
            self.attributes: list[tuple[Any, str]] = []  # of functions and cells
            self.entries: list[tuple[Mapping[str, Any], str]] = []  # the others there do not count
            self._seen: dict[int, tuple[int, Any]] = {}
            self._walk()

    def unchanged(self) -> Callable[[], bool]:
        """Return a function that says whether all that was found is still there, the very same objects."""
        empty = [item for item in self.containers if not item]
        views = [view for item in self.containers if item for view in (*_views(item), _END)]
        held = list(chain.from_iterable(views))
        entries = [item[name] for item, name in self.entries]
        attributes = [getattr(item, name) for item, name in self.attributes]
        kept = [item for _, item in self._seen.values()]

        def check(_kept: Any = kept) -> bool:
            try:
                return (
                    not any(empty)
                    and all(map(is_, chain.from_iterable(views), held))
                    and all(map(is_, [item[name] for item, name in self.entries], entries))
                    and all(map(is_, [getattr(item, name) for item, name in self.attributes], attributes))
                )
            except (KeyError, ValueError):  # an entry is gone, or what a cell held
                return False

        return check

    def found(self) -> list[Any]:
        """Return all that was found."""
        return [item for _, item in self._seen.values()]

    def _walk(self) -> None:
        pending = self.roots[::-1]
        while pending:
            item = pending.pop()
            if _is_plain(item):
                self.key.append(_told(item))
            elif id(item) in self._seen:
                self.key.append(self._seen[id(item)][0])
            else:
                self._seen[id(item)] = len(self._seen), item  # kept, so that no id is used again
                pending += list(self._inside(item))[::-1]

    def _inside(self, item: Any) -> Iterable[Any]:
        """Note what an item is; return what can be read through it."""
        match item:
            case list() | tuple() | set() | frozenset() | dict():
                return self._container(item)
            case functools.partial():
                return [item.func, item.args, item.keywords]
            case weakref.ref():
                return [item()]
            case MethodType():
                return [item.__self__, item.__func__]
            case FunctionType() if not _is_known(item.__module__):
                return self._function(item)
            case torch.nn.Module():
                self.key.append((id(item), id(type(item))))
                return [*self._container(item.__dict__), *self._methods(type(item))]
            case torch.optim.Optimizer():
                self.key.append(id(item))
                self.containers += [item.__dict__, item.state, *item.state.values()]
                own = [value for name, value in item.__dict__.items() if name != "state"]  # which is told by itself
                return [*own, *self._methods(type(item))]
            case torch.Tensor() if not isinstance(item, torch.nn.Parameter):
                self.key.append(torch.Tensor)  # what it looks like is no matter of reach
                return ()
            case type() | ModuleType() if not _is_installed(getattr(item, "__module__", item.__name__)):
                self.key.append(id(item))
                return [*self._mentioned(vars(item)), *(self._methods(item) if isinstance(item, type) else ())]
            case _ if not _is_opaque(item):
                self.key.append(id(type(item)))
                self.containers.append(item.__dict__.keys())
                return [*self._mentioned(item.__dict__), *self._methods(type(item))]
        self.key.append(id(item))
        return ()

    def _container(self, item: Any) -> Iterator[Any]:
        self.key.append((type(item), len(item)))
        if len(item) > _MOST_ITEMS:
            self.key.append(id(item))
            return
        if not isinstance(item, (tuple, frozenset)):
            self.containers.append(item)
        if isinstance(item, dict):
            yield from item.keys()
        yield from item.values() if isinstance(item, dict) else item

    def _mentioned(self, attributes: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the attributes that code mentions."""
        for name in sorted(self.mentioned & attributes.keys()):
            self.entries.append((attributes, name))
            yield name
            yield attributes[name]

    def _methods(self, kind: type) -> Iterator[Any]:
        """Yield the functions of a user's class and its bases that may be called."""
        for base in kind.__mro__:
            if not _is_known(base.__module__):
                for name, item in vars(base).items():
                    if name in self.mentioned or name in _CALLED_UNNAMED:
                        code = getattr(item, "fget", None) or getattr(item, "__func__", item)
                        if isinstance(code, FunctionType):
                            yield code

    def _function(self, fn: FunctionType) -> Iterator[Any]:
        self.key.append(fn.__code__)
        names, mentioned = _names(fn.__code__, self.written)
        self.mentioned.update(mentioned)
        for cell in fn.__closure__ or ():
            if cell != _NO_CELL:
                self.attributes.append((cell, "cell_contents"))
                yield cell.cell_contents
        self.attributes += [(fn, "__code__"), (fn, "__defaults__"), (fn, "__kwdefaults__")]
        yield fn.__defaults__
        yield fn.__kwdefaults__
        for name in names:
            if name in fn.__globals__ and not _is_installed(fn.__module__):
                self.entries.append((fn.__globals__, name))
                yield fn.__globals__[name]


class Guard:
    """Knows at a glance a call that is of the kind of an earlier one: all is where it was, and looks as it did."""

    def __init__(self, state: State, reach: Reach, shape: Shape, given: Tensors):
        held = state.tensors()
        self._unchanged, self._settings = reach.unchanged(), _settings()
        self._key, self._others = shape.key, shape.others
        self._names = [name for tensor in shape.tensors for name, item in given.items() if item is tensor]
        grads = {f"{name}.grad": parameter for name, parameter in state.parameters.items()}
        self._held = {name: tensor for name, tensor in held.items() if name not in grads}
        self._looks = list(map(_looks, self._held.values()))
        self._grads = [(name, parameter, _looks(parameter.grad)) for name, parameter in grads.items()]

    def inputs(self, shape: Shape) -> Tensors | None:
        """Return the tensors of a call by name; None if it may be of another kind."""
        if (
            len(self._names) != len(shape.tensors)  # one came twice, and would have to again
            or shape.key != self._key
            or not all(map(is_, shape.others, self._others))
            or _settings() != self._settings
            or not self._unchanged()
            or list(map(_looks, self._held.values())) != self._looks
        ):
            return None
        found = {**self._held, **dict(zip(self._names, shape.tensors, strict=True))}
        for name, parameter, looks in self._grads:
            grad = parameter.grad
            if _looks(grad) != looks:
                return None
            if grad is not None:
                found[name] = grad
        return found if len(set(map(id, found.values()))) == len(found) else None


def kind_of(state: State, reach: Reach, shape: Shape, given: Tensors) -> Hashable:
    """Return what a capture of a call depends on; ``given`` are the tensors among its arguments, by name."""
    first: dict[int, str] = {}
    tensors = {**state.tensors(), **given}
    looks = [(name, first.setdefault(id(tensor), name), _looks(tensor)) for name, tensor in tensors.items()]
    return tuple(looks), shape.key, tuple(reach.key), repr(state.numbers()), _settings()


def _settings() -> Hashable:
    """Return what torch's own state says that a capture depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _looks(tensor: torch.Tensor | None) -> Hashable:
    """Return what a capture sees of a tensor."""
    if tensor is None:
        return None
    try:
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    except (RuntimeError, ValueError):  # sparse, nested, lazy: capture says so
        return type(tensor), id(tensor)


def _is_plain(item: Any) -> bool:
    return item is None or (isinstance(item, _PLAIN) and not isinstance(item, enum.Enum))


def _told(item: Any) -> Hashable:
    """Return a plain thing as part of a key: 1 is not True there, nor 0.0 the same as -0.0."""
    return type(item), repr(item) if isinstance(item, (float, complex)) else item


def _views(container: Any) -> tuple[Iterable[Any], ...]:
    """Return what shows the items of a container as they are whenever one looks."""
    return (container.keys(), container.values()) if isinstance(container, dict) else (container,)


@functools.lru_cache(maxsize=10_000)
def _names(code: CodeType, written: bool = False) -> tuple[list[str], list[str]]:
    """Return the globals that code reads, or writes too, and the attributes, or what may be their names."""
    stored = ("STORE_GLOBAL", "STORE_ATTR") if written else ()
    found = {kind: dict[str, None]() for kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", *stored)}
    codes = [code]
    while codes:
        inner = codes.pop()
        codes += [item for item in inner.co_consts if isinstance(item, CodeType)]
        found["LOAD_ATTR"].update(dict.fromkeys(c for c in inner.co_consts if isinstance(c, str) and c.isidentifier()))
        for instruction in dis.get_instructions(inner):
            if instruction.opname in found:
                found[instruction.opname][instruction.argval] = None
    globals_ = chain(*(found[kind] for kind in found if kind.endswith(("_GLOBAL", "_NAME"))))
    return [*globals_], [*chain(*(found[kind] for kind in found if kind.endswith(("_ATTR", "_METHOD"))))]


def _is_known(module: Any) -> bool:
    """Whether a module is of a library whose code reads nothing that changes."""
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES


@functools.cache
def _is_installed(module: Any) -> bool:
    """Whether a module is of any library: its globals stay as they are."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return _is_known(module) or "site-packages" in file or "dist-packages" in file


def _is_opaque(item: Any) -> bool:
    """Whether an object stands for itself alone, whatever is in it."""
    of_torch = type(item).__module__.partition(".")[0] in ("torch", "autosched", "numpy")
    return of_torch or isinstance(item, (type, ModuleType, enum.Enum)) or not hasattr(item, "__dict__")
