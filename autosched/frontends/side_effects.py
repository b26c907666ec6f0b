"""Detect and undo changes to objects outside a function's arguments.

Such objects are named as in the function's source. A step that leaves anything but tensors changed
cannot be captured, because a counter, for example, would make each call need a recapture. Flags are
an exception: an attribute that holds a string, True, False or None may have another value
afterwards. Knows no graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import logging
import os
import pickle
import queue
import random
import sys
import time
import warnings
import weakref
import zlib
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Set,
)
from contextvars import ContextVar
from functools import partial
from operator import is_, ne
from types import FrameType, FunctionType, GeneratorType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy
import torch
from numpy.random import BitGenerator, RandomState
from numpy.random import Generator as NumpyGenerator
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from autosched._lib.tree import flatten
from autosched.errors import CaptureError
from autosched.frontends.reachability import Reach, dict_of, is_installed, is_iterator
from autosched.frontends.state import State, hooks_of
from autosched.frontends.unsupported import refusal

_VALUES = (bool, int, float, complex, str, bytes, tuple)
# Change with each step, except for the attributes that code mentions.
_COUNTERS = (LRScheduler, torch.amp.GradScaler)
_ATTRIBUTE = "attribute {1!r} of {0}".format


class SideEffects:
    """The objects reached from ``roots``, and those that hold a ``state``.

    >>> model = torch.nn.Identity()
    >>> effects = SideEffects([model], State.of(model, []))
    >>> model.count = 1
    >>> effects.undo(), hasattr(model, "count")
    (None, False)
    """

    def __init__(self, roots: Iterable[Any], state: State):
        self.reach = reach = Reach(roots, written=True)
        self.found = found = reach.found()
        self._owners: dict[int, Any] = {}  # objects, by their attributes
        self._labels: dict[int, Callable[..., str]] = {}  # return names of items, by container
        self._state: set[int] = set()  # containers of tensors, which a step may change
        self._moments: set[int] = set()  # likewise, what they have for tensors
        own: list[dict[str, Any]] = []
        for item in (*found, *state.optimizers.values()):
            if isinstance(getattr(item, "__dict__", None), dict):
                self._owners[id(vars(item))] = item
                label = partial(_ATTRIBUTE, f"a {type(item).__name__}")
                self._labels.setdefault(id(vars(item)), label)
            if isinstance(item, FunctionType):
                self._labels[id(item.__globals__)] = "global {!r}".format
                names = item.__code__.co_freevars
                for name, cell in zip(names, item.__closure__ or (), strict=True):
                    self._labels[id(cell)] = partial("variable {!r}".format, name)
            elif isinstance(item, torch.nn.Module):
                self._state.add(id(item._buffers))
            elif isinstance(item, torch.optim.Optimizer):
                moments = [held for key, held in item.state.items() if _is_tensor(key)]
                self._state.update(map(id, moments))
                self._moments.add(id(item.state))
                for i, group in enumerate(item.param_groups):
                    owner = f"group {i} of {type(item).__name__}"
                    self._labels[id(group)] = partial(_ATTRIBUTE, owner)
            if isinstance(item, _COUNTERS):
                own.append(vars(item))
        for key, module in state.modules.items():
            for path, part in module.named_modules():
                name = ".".join(filter(None, (key, path)))
                label = partial(_ATTRIBUTE, f"module {name!r}" if name else "the module")
                tables = vars(part), part._parameters, part._buffers
                self._labels |= dict.fromkeys(map(id, tables), label)
                self._owners[id(vars(part))] = part
                self._state.add(id(part._buffers))
        for number, kind in reach.classes.items():
            self._labels[number] = partial(_ATTRIBUTE, f"class {kind.__name__}")
        self._owners |= reach.classes
        self._tables = {id(item) for item in state.tables()}
        modules = [item for item in self._owners.values() if isinstance(item, torch.nn.Module)]
        unsaved = {id(item._non_persistent_buffers_set) for item in modules}  # new buffers, too
        every = _tables(reach, [*own, *state.tables()], self._owners)
        self._before = [table for table in every if id(table.holder) not in unsaved]
        self._originals = list(self._before)
        with _on_real_tensors():
            hidden = [(item, how) for item in (*found, *_GLOBAL.values()) if (how := _hidden(item))]
            drawn = [(item, how) for item, how in hidden if isinstance(item, torch.Generator)]
            self._seeds = [(item, how, how.read(item)) for item, how in drawn]
            for item, _ in drawn:
                item.manual_seed(_UNLIKELY_SEED)
            self._hidden = [(item, how, how.read(item)) for item, how in hidden]

    def substitute(
        self, twins: Mapping[int, Any], trained: Set[int], fixed: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Put other tensors in the places of some, by their ids, also in tuples, until ``undo``.

        Those of the state in what holds it, and those that are ``trained`` wherever code has them.
        ``fixed`` are further items of dicts, by the ids of these.
        """
        everywhere = {key: twin for key, twin in twins.items() if key in trained}
        for i, table in enumerate(self._originals):
            known = twins if id(table.holder) in self._tables else everywhere
            if not isinstance(table.holder, set):  # its order would be another one
                new = {_twin(key, known): _twin(item, known) for key, item in table.items.items()}
                new |= fixed.get(id(table.holder), {})
                self._before[i] = table._replace(items=new)
                self._before[i].put()

    def name_of(self, wanted: Any) -> str | None:
        """Return the name of an object that was reached, or None."""
        for table in self._before:
            for key, item in table.items.items():
                if item is wanted:
                    return self._name(table.holder, key)
        return None

    def _name(self, container: Any, key: Any) -> str:
        if (label := self._labels.get(id(container))) is not None:
            return label(key)
        name = self.name_of(container) or f"a {type(container).__name__}"
        has_items = isinstance(container, (dict, *_LISTS))
        return f"{name}[{key!r}]" if has_items else _ATTRIBUTE(name, key)

    def check(self) -> None:
        """Raise CaptureError for the first change that a graph cannot make."""
        if (change := next(self._changes(), None)) is not None:
            raise refusal(
                f"{change} after the step, but a graph changes only tensors in modules and "
                "optimizers, and flags",
                "keep it in a buffer, return it, or change it outside of the step, as learning "
                "rate schedulers do",
            )
        with _on_real_tensors():
            for item, how, state in self._hidden:
                if pickle.dumps(how.read(item)) != pickle.dumps(state):
                    known = next((name for name, one in _GLOBAL.items() if one is item), None)
                    name = known or self.name_of(item) or "an object"
                    raise CaptureError(
                        f"{name}, a {type(item).__name__}, may not be as it was after the step: a "
                        "graph would take values from it, or change it, only once; do this "
                        "outside of the step, and pass the values as tensors"
                    )

    def switched(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return changed flags: an object's attributes, a name, the new value.

        A number may change with each step; a flag can be set after each run of the graph.
        """
        return [
            (table.holder, name, item)
            for table in self._before
            if table.owner is not None and not isinstance(table.owner, type)
            for name, item in table.present().items()
            if _is_switched(item, table.items.get(name, _ABSENT))
        ]

    def _changes(self) -> Iterator[str]:
        switched = {(id(items), name) for items, name, _ in self.switched()}
        for table in self._before:
            holder, old, now = table.holder, table.items, table.present()
            if isinstance(holder, _LISTS):
                if now.keys() != old.keys() or not all(map(_same, now.values(), old.values())):
                    yield f"{self.name_of(holder) or f'a {type(holder).__name__}'} has other items"
                continue
            is_data = table.others == () and table.owner is None and id(holder) not in self._tables
            if is_data and old.keys() == now.keys() and not all(map(is_, old, now)):
                yield f"{self.name_of(holder) or 'a dict'} has its items in another order"
            for key in {**old, **now}:
                known = (id(holder), key) in switched or self._is_known(holder, key)
                if id(holder) in self._state:
                    known |= key in now and (now[key] is None or _is_tensor(now[key]))
                known |= id(holder) in self._moments and _is_tensor(key)
                if not known and not _same(now.get(key, _ABSENT), old.get(key, _ABSENT)):
                    yield f"{self._name(holder, key)} is {_shown(now.get(key))}"

    def _is_known(self, attributes: Any, key: Any) -> bool:
        """Whether an attribute is state or internal to torch."""
        owner = self._owners.get(id(attributes))
        if isinstance(owner, torch.nn.Module) and _is_tensor(attributes.get(key)):
            return True
        if isinstance(owner, torch.nn.RNNBase) and str(key).startswith("_flat_weight"):
            return True
        is_torchs = owner is not None and type(owner).__module__.startswith("torch.")
        return is_torchs and str(key).startswith("_") and not _is_tensor(attributes.get(key))

    def undo(self) -> None:
        """Undo all changes."""
        for table in self._originals:
            table.put()
        with _on_real_tensors():
            for item, how, state in (*self._hidden, *self._seeds):
                if how.write is not None:
                    how.write(item, state)


_LISTS = (list, deque, set)
_ABSENT: Any = object()


class _Table(NamedTuple):
    """What is in a list, dict or set, or are attributes of an object, class or cell.

    Compared are ``items``, and those of a dict that are new: not among the ``others``, unless that
    is None. ``owner``: whose attributes are in a dict.
    """

    holder: Any
    items: dict[Any, Any]
    others: Container[Any] | None = None
    owner: Any = None

    def present(self) -> dict[Any, Any]:
        """Return the present items; of a set, by their ids."""
        holder = self.holder
        if isinstance(holder, set):
            return {id(item): item for item in holder}
        if isinstance(holder, _LISTS):
            return dict(enumerate(holder))
        if not isinstance(holder, dict):
            return {name: getattr(holder, name, _ABSENT) for name in self.items}
        if self.others is None:
            return {key: holder.get(key, _ABSENT) for key in self.items}
        return {key: holder[key] for key in holder if key in self.items or self._is_new(key)}

    def _is_new(self, key: Any) -> bool:
        """Whether a step has added a key; attributes that Python adds, imports and caches are not."""
        if self.owner is None:
            return True
        is_cached = isinstance(getattr(type(self.owner), key, None), functools.cached_property)
        is_import = isinstance(self.holder[key], ModuleType)
        return not (key in (self.others or ()) or is_cached or is_import or key.startswith("__"))

    def put(self) -> None:
        """Put the items in their places; nothing is written where nothing has changed."""
        holder, items, now = self.holder, self.items, self.present()
        keys = [*{**now, **items}]
        keys = [key for key in keys if now.get(key, _ABSENT) is not items.get(key, _ABSENT)]
        is_dict = isinstance(holder, dict) and not isinstance(self.owner, type)
        is_whole = is_dict and self.others == ()
        is_ordered = not is_whole or all(map(is_, now, items))
        if not keys and is_ordered:
            return
        if isinstance(holder, _LISTS):
            holder.clear()
            (holder.update if isinstance(holder, set) else holder.extend)(items.values())
            return
        if is_whole:  # the order is restored, too
            holder.clear()
            keys = [*items]
        owner = holder if self.owner is None else self.owner
        for key in keys:
            item = items.get(key, _ABSENT)
            if is_dict and item is _ABSENT:
                holder.pop(key, None)
            elif is_dict:
                holder[key] = item
            elif item is _ABSENT:
                delattr(owner, key)
            else:
                setattr(owner, key, item)


def _tables(reach: Reach, more: Iterable[Any], owners: Mapping[int, Any]) -> list[_Table]:
    """Return what a step may change: all that guards compare, and ``more``."""
    found: dict[int, _Table] = {}

    def table(holder: Any, others: Container[Any] | None = None) -> _Table:
        return _Table(holder, {}, others, owners.get(id(holder)))

    classes = [(item, "__class__") for item in reach.objects]
    for item, name in (*reach.attributes, *classes):
        found.setdefault(id(item), table(item)).items[name] = getattr(item, name, _ABSENT)
    for item, name in reach.entries:
        held = dict_of(item) or item
        found.setdefault(id(held), table(held)).items[name] = held.get(name, _ABSENT)
    containers = [*reach.containers, *more]
    for view in containers:
        if isinstance(view, KeysView) and (keys := dict_of(view)) is not None:
            known = found.get(id(keys), table(keys))
            found[id(keys)] = known._replace(others=keys.keys() - known.items)
    for item in containers:
        whole = item if isinstance(item, (dict, *_LISTS)) else dict_of(item)
        if whole is not None and not isinstance(item, KeysView):
            found[id(whole)] = table(whole, ())._replace(items=table(whole, ()).present())
    return list(found.values())


def _twin(item: Any, twins: Mapping[int, Any]) -> Any:
    """Return the twin of a tensor; of a tuple, one with twins; and anything else as it is."""
    if not isinstance(item, tuple):
        return twins.get(id(item), item)
    parts = [_twin(part, twins) for part in item]
    if all(map(is_, parts, item)):
        return item
    return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)


def _same(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, _VALUES) and repr(now) == repr(before)
    )


def _is_tensor(item: Any) -> bool:
    return isinstance(item, torch.Tensor)


def _is_switched(now: Any, before: Any) -> bool:
    """Whether a flag, or tensor, is another flag now."""
    flags = (bool, str, NoneType)
    was_flag = before is _ABSENT or isinstance(before, (*flags, torch.Tensor))
    return isinstance(now, flags) and was_flag and not _same(now, before)


def _shown(item: Any) -> str:
    return "a tensor" if _is_tensor(item) else repr(item)[:80]


def properties_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's memory, whether it requires grad, its gradient, history and hooks."""
    grad = tensor.grad if tensor.is_leaf else None
    seen = None if grad is None else (id(grad), grad._version)
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.requires_grad, seen, tensor.grad_fn, hooks_of(tensor)


def check_properties(
    tensors: Mapping[str, torch.Tensor], before: Mapping[str, tuple[Any, ...]], own: Container[str]
) -> list[str]:
    """Return the names of tensors with another autograd history now.

    Raises CaptureError for other properties that have changed, which no operator does; gradients of
    parameters, which are the state's ``own``, may.
    """
    found = []
    for name, tensor in tensors.items():
        memory, requires_grad, grad, history, hooks = map(ne, properties_of(tensor), before[name])
        if memory:
            raise CaptureError(
                f"{name!r} has other memory after the step; write in place, with copy_"
            )
        if hooks:
            raise CaptureError(
                f"{name!r} has other hooks after the step; register them between calls"
            )
        if name in own and requires_grad:
            raise CaptureError(
                f"requires_grad of {name!r} changes in the step; change it between calls"
            )
        if name not in own and grad:
            raise CaptureError(
                f"a gradient is stored at {name!r}, which is not a parameter of a module or "
                "optimizer; torch.autograd.grad returns it instead"
            )
        if history:
            found.append(name)
    return found


# ---- objects that return something else in the next call: files, generators, iterators
#
# Also objects whose contents are not attributes: NumPy arrays and context variables.


class _Hidden(NamedTuple):
    """How a state is read and, of random number generators, written."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] | None = None


def _position(file: Any) -> int:
    with contextlib.suppress(OSError, ValueError):  # closed, or being read line by line
        return int(file.tell())
    return -1


_NUMBERS = itertools.count()
_ITERATOR = _Hidden(lambda item: next(_NUMBERS))  # something may have been taken
_STATES: list[tuple[Any, _Hidden]] = [
    (
        torch.Generator,
        _Hidden(
            lambda item: item.get_state().tolist(),
            lambda item, state: item.set_state(torch.tensor(state, dtype=torch.uint8)),
        ),
    ),
    (random.Random, _Hidden(lambda item: item.getstate(), random.Random.setstate)),
    (RandomState, _Hidden(lambda item: item.get_state(legacy=False), RandomState.set_state)),
    (
        NumpyGenerator,
        _Hidden(
            lambda item: item.bit_generator.state,
            lambda item, state: setattr(item.bit_generator, "state", state),
        ),
    ),
    (
        BitGenerator,
        _Hidden(lambda item: item.state, lambda item, state: setattr(item, "state", state)),
    ),
    ((numpy.ndarray, array, bytearray), _Hidden(lambda item: zlib.crc32(bytes(item)))),
    ((queue.Queue, queue.SimpleQueue), _Hidden(lambda item: item.qsize())),
    (io.IOBase, _Hidden(_position)),
    (ContextVar, _Hidden(lambda item: id(item.get(None)))),
]
_GLOBAL = {"Python's random": random._inst, "NumPy's random": numpy.random.mtrand._rand}
# A seed that no step sets: setting the present one could not be detected.
_UNLIKELY_SEED = 0x5EED_0F_A_C0DE


def _hidden(item: Any) -> _Hidden | None:
    """Return how the hidden state of an object is read; None if it has none."""
    if is_iterator(item):
        return _ITERATOR
    if isinstance(item, random.SystemRandom):
        return None
    return next((known for kinds, known in _STATES if isinstance(item, kinds)), None)


@contextlib.contextmanager
def _on_real_tensors() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


# ---- tensors left in caches
#
# ``functools.lru_cache``, ``cache`` and ``cached_property`` retain what a capture computes, which has
# no data, and return to a capture what was computed before it. They may be cleared, because what they
# contained is then computed again.

_LRU = type(functools.lru_cache(lambda: None))
_DEEPEST = 4  # of lists, dicts and objects in a cache
_MOST = 50  # objects whose referrers are searched: each is compared with all objects


class MadeTensors:
    """The fake tensors that torch made in a capture."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def add(self, result: Any) -> None:
        """Store the fake tensors in a result of torch."""
        fakes = [leaf for leaf in flatten(result) if isinstance(leaf, FakeTensor)]
        self._refs += map(weakref.ref, fakes)

    def remove(self, retained: Iterable[Any] = ()) -> list[str]:
        """Remove the tensors from caches and other containers; return the names of the others.

        Tensors in ``retained`` may remain where they are. Searching referrers visits all objects,
        so young garbage is collected first: collection was paused, so that of the capture is young.
        If no container holds a tensor, C++ does, where no call finds it.
        """
        known = {id(item) for item in retained}
        self._refs = [ref for ref in self._refs if id(ref()) not in known]
        names: list[str] = []
        if self._alive():
            gc.collect(1)
        if _holders(self._alive()):
            clear_caches_of(*self._alive())
            if self._alive():
                gc.collect()
                clear_caches_of(*self._alive())
            names += _removed(self._alive())
        self._refs = []
        return names

    def _alive(self) -> list[torch.Tensor]:
        return [tensor for ref in self._refs if (tensor := ref()) is not None]


def clear_caches_of(*tensors: torch.Tensor) -> bool:
    """Clear the caches that hold these tensors; return whether any did."""
    found = list(_caches(tensors))
    for clear in found:
        clear()
    return bool(found)


def _caches(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], Any]]:
    """Yield functions that clear caches that hold tensors, also within objects."""
    seen: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    held: list[Any] = list(tensors)
    own = {id(tensors), id(seen), id(held)}
    for _ in range(_DEEPEST):
        if not 0 < len(held) <= _MOST:
            return
        # Without our own containers, which would be in a reference cycle.
        known = own | seen.keys()
        found = [item for item in gc.get_referrers(*held) if id(item) not in known]
        held.clear()
        for item in found:
            if isinstance(item, _LRU):
                yield item.cache_clear
            elif not _is_namespace(item):
                yield from _properties_of_class(item, seen)
                held.append(item)
        del found
        seen |= {id(item): item for item in held}


def _properties_of_class(item: Any, seen: dict[int, Any]) -> Iterator[Callable[[], Any]]:
    """Yield functions that delete cached properties whose values were seen."""
    for name, value in list(getattr(item, "__dict__", {}).items()):
        kind = getattr(type(item), name, None)
        if id(value) in seen and isinstance(kind, functools.cached_property):
            yield partial(item.__dict__.pop, name, None)


def _is_namespace(item: Any) -> bool:
    """Whether an object holds the variables of code."""
    return isinstance(item, (FrameType, GeneratorType, ModuleType, type)) or _is_globals(item)


def _is_globals(item: Any) -> bool:
    return isinstance(item, dict) and "__name__" in item and "__spec__" in item


def _holders(alive: list[torch.Tensor]) -> list[Any]:
    if not alive:
        return []
    found = gc.get_referrers(*alive)
    return [item for item in found if item is not alive and not isinstance(item, FrameType)]


def _removed(alive: list[torch.Tensor]) -> Iterator[str]:
    """Remove tensors from lists and dicts; yield the names of these."""
    known = {id(tensor) for tensor in alive}
    for holder in _holders(alive):
        if type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in known]
            yield _name_of(holder)[0]
        elif type(holder) in (dict, OrderedDict, defaultdict):
            name, is_namespace = _name_of(holder)
            for key in [key for key, item in holder.items() if id(item) in known]:
                if is_namespace:
                    holder[key] = None  # code may expect the attribute
                else:
                    del holder[key]
                yield f"{key!r} of {name}"


def _name_of(holder: Any) -> tuple[str, bool]:
    """Return the name of a list or dict, and whether it has the attributes of a module or object."""
    if _is_globals(holder):
        return f"module {holder['__name__']!r}", True
    for owner in gc.get_referrers(holder):
        if _is_globals(owner):
            name = next((key for key, item in owner.items() if item is holder), "?")
            return f"{owner['__name__']}.{name}", False
        if not isinstance(owner, FrameType) and getattr(owner, "__dict__", None) is holder:
            return f"a {type(owner).__name__}", True
    return f"a {type(holder).__name__}", False


# ---- calls that a graph does not repeat: time, files, print
#
# Such a call is executed once, when the step is captured, and its user is warned; clocks are refused.
# Python reports all calls to a profile function (``sys.setprofile``), so nothing is replaced. That
# takes time, and is done only for code that names such a function. Does not know ``datetime``, nor
# functions that write to files that are already open. A profiler of the user takes precedence.

_CLOCKS = "time perf_counter monotonic process_time"
_FUNCTIONS = frozenset(
    (
        *(print, input, open, io.open, time.sleep),
        *(getattr(time, f"{name}{ending}") for name in _CLOCKS.split() for ending in ("", "_ns")),
        *(os.urandom, os.write, os.system),
        getattr(random, "_urandom", os.urandom),  # of SystemRandom, and of secrets
    )
)
_LOGGED = logging.Logger.handle.__code__
# Code that calls one of these functions, directly or by the standard library, has one of these names.
_NAMES = frozenset(
    (
        *(fn.__name__ for fn in _FUNCTIONS),
        *"SystemRandom secrets uuid1 uuid4 logging getLogger".split(),
        *"read_text read_bytes write_text write_bytes".split(),  # of paths
    )
)
_READ = frozenset((*(f"time.{name}" for name in dir(time) if name != "sleep"), "posix.urandom"))
_WARNED: dict[Any, Any] = {}  # so that Python's filter "default" shows each line once


class Call(NamedTuple):
    """A call of a Python function by a line of the user."""

    name: str
    file: str
    line: int


@contextlib.contextmanager
def observing_calls(reach: Reach) -> Iterator[list[Call]]:
    """Collect calls by the user's code, which is that of ``reach``, in this thread.

    Raises CaptureError for what would be another value in the next call.
    """
    found: list[Call] = []
    if sys.getprofile() is not None or not _may_call(reach):
        yield found
        return

    def profile(frame: FrameType, event: str, fn: Any) -> None:
        if event == "c_call" and fn in _FUNCTIONS:
            known = fn.__module__ in ("builtins", "io", "_io")
            name = fn.__name__ if known else f"{fn.__module__}.{fn.__qualname__}"
        elif event == "call" and frame.f_code is _LOGGED:
            name = "logging.Logger.handle"
        else:
            return
        if (line := _users_line(frame)) is not None:
            found.append(Call(name, *line))

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
    warned = {call[1:] for call in found if call.name not in _READ}  # logging reads the time
    for call in found:
        if call[1:] not in warned:
            raise CaptureError(
                f"{call.name} is called at {call.file}:{call.line}, and a graph would contain what "
                "it returns now; call it outside of the step, and pass its result as a tensor"
            )


def _may_call(reach: Reach) -> bool:
    """Whether code has such a function, or its name."""
    named = {name for _, name in reach.entries} | reach.mentioned
    return not _NAMES.isdisjoint(named) or any(
        isinstance(item, logging.Logger) or (isinstance(item, type(print)) and item in _FUNCTIONS)
        for item in reach.found()
    )


def _users_line(frame: FrameType) -> tuple[str, int] | None:
    """Return the line of the caller, through the standard library only."""
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in sys.stdlib_module_names:
            break
        frame = frame.f_back
    if is_installed(frame.f_globals.get("__name__")):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def warn_of_calls(calls: Iterable[Call], step: str) -> None:
    """Warn of each line that makes such a call."""
    for (file, line), name in {(call.file, call.line): call.name for call in calls}.items():
        warnings.warn_explicit(
            f"{name} is called when {step!r} is captured, and not when its graph runs; call it "
            "outside of the step, and pass its result as a tensor",
            RuntimeWarning,
            file,
            line,
            registry=_WARNED,
        )
