"""What a function was specialized to: captures and schedules, each for calls like an earlier one.

"Is this call like an earlier one?" is asked here, once for each call of a compiled function and of
a training step. A capture makes constants of all values that are not tensors: numbers among the
arguments, in closures and globals, attributes of modules and of objects, settings of optimizers.

1. A ``Guard`` recognizes a call quickly. It only tests whether the containers that ``Reach`` visited
   hold the identical objects, and compares tensors and settings. Dicts that were not written since
   the last call are passed over, and tensors are compared in compiled code.
2. Otherwise the call's ``Key`` decides, since an object may have been replaced by an equal one. It
   has everything that a capture depends on: values that code can read (``Reach``), properties of
   tensors, and torch's settings.
3. If no value has that key, the caller makes one. It stores it, with a guard for such calls.

Knows no graph, and not what is specialized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosched._lib.containers import parts_of
from autosched._lib.logs import LOG, users_frame
from autosched._lib.recent import MOST, Recent
from autosched._lib.tensor_guards import have_hooks, recognizer
from autosched.errors import shown
from autosched.frontends.captured import arguments_of
from autosched.frontends.reachability import Reach, is_value, value_key
from autosched.frontends.settings import Settings, Varying
from autosched.frontends.state import State, hooks_of

V = TypeVar("V")

# The recapture that warns: a step has one when its optimizer has state.
_WARNED = 2


class Call(NamedTuple):
    """A call that no guard recognizes: its arguments, the present state, and what code can read."""

    arguments: Arguments
    given: Tensors
    state: State
    varying: frozenset[str]  # settings of optimizers that are inputs
    reach: Reach


class Found(NamedTuple, Generic[V]):
    """What is known of a call: its key, and a value with a number, or None and 0.

    ``inputs`` by name if a guard recognizes the call, and otherwise what ``store`` needs.
    """

    number: int
    key: Key
    value: V | None
    inputs: dict[str, Any] | None
    call: Call | None


class _Specialization(NamedTuple, Generic[V]):
    """A value, the key of its calls, the settings that are inputs, and what recognizes a call."""

    key: Key
    value: V
    settings: Sequence[Settings]
    guard: Guard


class Specializations(Generic[V]):
    """At most ``most`` values that a function was specialized to: those that were used last.

    ``fn`` names the arguments, and has modules and optimizers in its closure; what its code can
    read is found from ``roots``. ``close`` is called with values that go.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        roots: Iterable[Any],
        close: Callable[[V], object],
        most: int = MOST,
    ):
        self.fn = fn
        self.roots = tuple(roots)
        self.varying = Varying()
        self.hits = 0
        self.misses = 0
        self._unexpected = 0  # misses, except those that make settings of optimizers inputs
        self._entries = Recent[int, _Specialization[V]](lambda entry: close(entry.value), most)

    def find(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fits: Callable[[V], bool] | None = None,
    ) -> Found[V]:
        """Return what is known of a call, with a value that ``fits``."""
        arguments = Arguments(args, kwargs)
        for number, entry in reversed(self._entries.items()):
            if fits is not None and not fits(entry.value):
                continue
            if (inputs := entry.guard.inputs(arguments)) is not None:
                self.hits += 1
                self._entries.move_to_end(number)
                return Found(number, entry.key, entry.value, inputs, None)
        given = arguments_of(self.fn, args, kwargs)
        state = State.of(self.fn, [*args, *kwargs.values()])
        call, key = self._call(arguments, given, state, self.varying.names(state))
        for number, entry in self.like(key):
            is_fitting = fits is None or fits(entry.value)
            if is_fitting and _reader(entry.settings, state)() is not None:
                return Found(number, key, entry.value, None, call)
        return Found(0, key, None, None, call)

    def _call(
        self, arguments: Arguments, given: Tensors, state: State, varying: frozenset[str]
    ) -> tuple[Call, Key]:
        reach = Reach([*self.roots, *arguments.others], varying=state.items_of(varying))
        call = Call(arguments, given, state, varying, reach)
        return call, Key.of(state, reach, arguments, given)

    def missed(self, found: Found[V]) -> None:
        """Count a call for which there is no value; say why, and the third time warn."""
        self.misses += 1
        if not self._entries:
            return
        name = name_of(self.fn)
        if new := self.varying.new:
            LOG.info("%r is captured again, with inputs %s", name, ", ".join(sorted(new)))
            return
        last = next(reversed(self._entries.values())).key
        if found.key == last:
            LOG.info("%r is captured again, for other numbers that it compares", name)
            return
        self._unexpected += 1
        what = changes(last, found.key)
        why = f"{name!r} is captured again, capture {self.misses}: {_described(what)}"
        LOG.info("%s", why)
        if self._unexpected == _WARNED:
            warnings.warn(
                f"{why} since the last call; {remedy(what)}. Only the logger 'autosched' reports later "
                "captures",
                RuntimeWarning,
                stacklevel=users_frame()[1],
            )

    def why(self, found: Found[V]) -> str:
        """Return which value a call has, or why it needs a new one."""
        if found.number:
            return f"uses capture {found.number}"
        if not self._entries:
            return "needs a first capture"
        what = changes(next(reversed(self._entries.values())).key, found.key)
        return f"needs a new capture ({_described(what)})"

    def store(self, found: Found[V], value: V, settings: Sequence[Settings]) -> dict[str, Any]:
        """Keep a value for calls like this one; return the inputs of this call, by name.

        ``settings`` are those of optimizers that are inputs of what the value is.
        """
        call, key = found.call, found.key
        assert call is not None
        wanted = call.varying.intersection(*(one.wanted for one in settings))
        if wanted != call.varying:
            self.varying.keep(call.varying - wanted)
            call, key = self._call(call.arguments, call.given, call.state, wanted)
        number = found.number or self.misses
        self.hits += number == found.number
        read = _reader(settings, call.state)
        guard = Guard(call.state, call.reach, call.arguments, call.given, read)
        self._entries.use(number, _Specialization(key, value, settings, guard))
        return {**call.state.tensors(), **call.given, **(read() or {})}

    def like(self, key: Key) -> list[tuple[int, _Specialization[V]]]:
        """Return the entries with a key, by number; the one used last is first."""
        return [item for item in reversed(self._entries.items()) if item[1].key == key]

    def drop(self, number: int) -> None:
        """Close a value, and forget it."""
        self._entries.drop(number)

    def values(self) -> list[V]:
        """Return all values, the one used last at the end."""
        return [entry.value for entry in self._entries.values()]

    def close(self) -> None:
        """Close all values, and forget them."""
        self._entries.close()


def _reader(settings: Sequence[Settings], state: State) -> Callable[[], dict[str, float] | None]:
    """Return a function that returns the settings that are inputs; None if these do not fit."""
    readers = [one.reader(state) for one in settings]

    def read() -> dict[str, float] | None:
        found: dict[str, float] = {}
        for one in readers:
            if (values := one()) is None:
                return None
            found |= values
        return found

    return readers[0] if len(readers) == 1 else read


def name_of(fn: Any) -> str:
    """Return the name of a function, for messages."""
    return str(getattr(fn, "__qualname__", type(fn).__name__))


# ---- guards

Tensors = dict[str, torch.Tensor]


class Arguments:
    """The arguments of a call: tensors, other objects, and a key."""

    def __init__(self, args: Any, kwargs: Mapping[str, Any]):
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self.key = tuple([self._of(item) for item in (*args, kwargs)])

    def _of(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            self.tensors.append(tree)
            return _properties(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree), tuple([self._of(item) for item in tree])
        if isinstance(tree, dict):
            return type(tree), tuple([(key, self._of(item)) for key, item in tree.items()])
        if is_value(tree):
            return value_key(tree)
        if (parts := parts_of(tree)) is None:
            self.others.append(tree)
            return type(tree)
        self.others.append(type(tree))  # its code reads the parts
        return type(tree), tuple([(key, self._of(item)) for key, item in parts.items()])


class Guard:
    """Recognizes quickly, by identity, a call that can use a capture.

    ``settings`` returns the settings of optimizers that are inputs of the capture; None if it
    cannot have the present ones.
    """

    def __init__(
        self,
        state: State,
        reach: Reach,
        arguments: Arguments,
        given: Tensors,
        settings: Callable[[], dict[str, float] | None],
    ):
        self._settings_of_optimizers = settings
        self._unchanged = reach.unchanged()
        self._settings = settings_of_torch()
        self._key = arguments.key
        self._others = arguments.others
        rest = dict(given)
        self._names: list[str] = []
        for tensor in arguments.tensors:
            self._names.append(next(name for name, item in rest.items() if item is tensor))
            del rest[self._names[-1]]
        self._parameters = {f"{name}.grad": item for name, item in state.parameters.items()}
        grads = _present(self._parameters)
        self._has_grads = bool(grads)
        self._firsts = _firsts([*arguments.tensors, *grads.values()])
        self._held = {n: item for n, item in state.tensors().items() if n not in grads}
        self._held_ids = set(map(id, self._held.values()))
        tensors = {**self._held, **grads}
        self._hooks = list(map(hooks_of, tensors.values())) if have_hooks(tensors.values()) else []
        missing = [name.removesuffix(".grad") for name in self._parameters.keys() - grads]
        self._are_alike = recognizer(tensors, without_grad=missing, bare=not self._hooks)

    def inputs(self, arguments: Arguments) -> dict[str, Any] | None:
        """Return a call's inputs by name; None if the guard fails."""
        if (
            arguments.key != self._key
            or not all(map(is_, arguments.others, self._others))
            or settings_of_torch() != self._settings
            or not self._unchanged()
        ):
            return None
        grads = _present(self._parameters) if self._has_grads else {}
        tensors = {**self._held, **grads} if grads else self._held
        if self._are_alike is None or not self._are_alike(tensors):
            return None
        if self._hooks and list(map(hooks_of, tensors.values())) != self._hooks:
            return None
        others = {**dict(zip(self._names, arguments.tensors, strict=True)), **grads}
        found = others.values()
        if _firsts(found) != self._firsts or not self._held_ids.isdisjoint(map(id, found)):
            return None
        settings = self._settings_of_optimizers()
        return None if settings is None else {**tensors, **others, **settings}


def _firsts(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """Return where each tensor comes first, if one comes twice."""
    ids = list(map(id, tensors))
    return list(map(ids.index, ids)) if len(set(ids)) < len(ids) else None


class Key(NamedTuple):
    """All that a capture depends on: facts of tensors by name, and what code can read."""

    tensors: Mapping[str, tuple[Any, ...]]
    arguments: Hashable
    objects: tuple[Hashable, ...]
    numbers: str  # of optimizers
    settings: tuple[Hashable, ...]

    @classmethod
    def of(cls, state: State, reach: Reach, arguments: Arguments, given: Tensors) -> Key:
        """Return the key of a call; ``given`` are the tensors among its arguments."""
        first: dict[int, str] = {}
        tensors = {
            name: (first.setdefault(id(tensor), name), *_properties(tensor))
            for name, tensor in {**state.tensors(), **given}.items()
        }
        return cls(
            tensors, arguments.key, tuple(reach.key), repr(state.numbers()), settings_of_torch()
        )


def settings_of_torch() -> tuple[Hashable, ...]:
    """Return torch's global settings that a capture depends on."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        default_device.CURRENT_DEVICE,
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        *(_get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()),  # type: ignore[no-untyped-call]
        *(_get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()),
    )


def _present(parameters: Tensors) -> Tensors:
    """Return the gradients that exist; parameters have their names."""
    return {name: grad for name, item in parameters.items() if (grad := item.grad) is not None}


def _properties(item: torch.Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor that a capture depends on."""
    kind = type(item)
    try:
        hooks = item.requires_grad and hooks_of(item)
        shape = item.shape
        return kind, shape, item.stride(), item.dtype, item.device, item.requires_grad, hooks
    except (RuntimeError, ValueError):  # sparse, nested, lazy: a capture raises an error
        return kind, id(item)


# ---- why a call needs a new capture

_MOST = 3  # changes that are named
_FACTS = "the tensor of,type,shape,strides,dtype,device,requires_grad,hooks".split(",")


def changes(before: Key, after: Key) -> list[tuple[str, str]]:
    """Return the differences between two keys; at least one.

    >>> tensors = {"x": ("x", None)}
    >>> keys = [Key(tensors, (), ("lr", (float, rate)), "{}", ()) for rate in ("0.1", "0.2")]
    >>> changes(*keys)
    [('lr', '0.1 -> 0.2')]
    """
    found = [*_of_tensors(before.tensors, after.tensors)]
    found += _of_values("an object", before.objects, after.objects)
    found = found or [*_of_values("an argument", before.arguments, after.arguments)]
    for what, old, new in (
        ("the state of an optimizer", [before.numbers], [after.numbers]),
        ("a setting of torch, such as no_grad or autocast", before.settings, after.settings),
    ):
        pairs = [(one, other) for one, other in zip_longest(old, new) if one != other]
        found = found or [(what, f"{_short(one)} -> {_short(other)}") for one, other in pairs]
    return list(dict.fromkeys(found)) or [("an object", "it was replaced")]


def _described(found: Sequence[tuple[str, str]]) -> str:
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return ", ".join([*(f"{what}: {how}" for what, how in found[:_MOST]), *more])


def remedy(found: Sequence[tuple[str, str]]) -> str:
    """Return how to avoid recaptures for these changes.

    >>> remedy([("lr", "0.1 -> 0.2")])
    'a rate that is a tensor, lr=torch.tensor(...), may change without a recapture'
    """
    if any(name == "lr" for name, _ in found):
        return "a rate that is a tensor, lr=torch.tensor(...), may change without a recapture"
    if any(how.startswith("shape") for _, how in found):
        advice = (
            "pad to one of few shapes, with a mask; instead of growing a cache, write in place "
            "into a part of one that has its largest shape"
        )
    elif any(how.startswith(("'", '"')) for _, how in found):
        advice = "leave a text that no operator reads out of the arguments"
    else:
        advice = (
            "pass what changes as a tensor, or do not change it; if it is a length, pad to one of "
            "few lengths"
        )
    return f"{advice}; maxsize= of compile is the number of cached captures"


def _of_tensors(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield name, "it no longer exists" if new is None else "it did not exist"
        elif old != new:
            facts = zip(_FACTS, old, new, strict=False)
            what, one, other = next(fact for fact in facts if fact[1] != fact[2])
            yield name, f"{what} {_short(one)} -> {_short(other)}"


def _of_values(name: str, before: Any, after: Any) -> Iterator[tuple[str, str]]:
    """Yield the changes of values in nested tuples; names precede them in the keys."""
    olds, news = ([*_leaves(item)] for item in (before, after))
    for old, new in zip_longest(olds, news):
        if old == new:
            name = new if isinstance(new, str) else name
        elif isinstance(old, str) and isinstance(new, str):
            yield "a dict or object", f"it has {new!r} where it had {old!r}"
            return
        elif not _is_value(old) or not _is_value(new):
            yield name, "it was replaced"
            return  # all later positions differ
        elif len(olds) != len(news):
            how = "more" if len(olds) < len(news) else "fewer"
            yield "a list, dict or object", f"it has {how} items"
            return
        else:
            is_number = old[0] in (float, complex)  # of which a key has the text
            one, other = (item[1] if is_number else _short(item[1]) for item in (old, new))
            yield name, f"{one} -> {other}"


def _leaves(item: Any) -> Iterator[Any]:
    if isinstance(item, tuple) and not _is_value(item):
        for part in item:
            yield from _leaves(part)
    else:
        yield item


def _is_value(item: Any) -> bool:
    """Whether this is a key that ``value_key`` returned."""
    is_pair = isinstance(item, tuple) and len(item) == 2
    return is_pair and isinstance(item[0], type) and not isinstance(item[1], tuple)


def _short(item: Any) -> str:
    text = str(tuple(item)) if isinstance(item, tuple) else shown(item)
    return text if len(text) <= 60 else f"{text[:57]}..."
