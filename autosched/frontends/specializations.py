"""What a function was specialized to: captures and schedules, each for calls like an earlier one.

"Is this call like an earlier one?" is asked here, once for each call of a compiled function and of
a training step. Knows no graph, and not what is specialized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

from autosched._lib.logs import LOG
from autosched._lib.recent import MOST, Recent
from autosched.errors import shown
from autosched.frontends.captured import arguments_of
from autosched.frontends.guards import Arguments, Guard, Key, Tensors
from autosched.frontends.reachability import Reach
from autosched.frontends.settings import Settings, Varying
from autosched.frontends.state import State

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

    1. A guard recognizes a call by the identity of objects and the properties of tensors.
    2. Otherwise its key decides, which has all that a capture depends on.
    3. If no value has that key, the caller makes one. It stores it, with a guard for such calls.
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
        self.stacklevel = 4  # of the user's call, in ``missed``
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
        if not self._entries or found.call is None:
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
            optimizers = found.call.state.optimizers.values()
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            advice = remedy(what, frozenset(name for group in groups for name in group))
            warnings.warn(
                f"{why} since the last call; {advice}. Only the logger 'autosched' reports later "
                "captures",
                RuntimeWarning,
                stacklevel=self.stacklevel,
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


# ---- why a call needs a new capture

_MOST = 3  # changes that are named
_FACTS = "the tensor of,type,shape,strides,dtype,device,requires_grad,hooks".split(",")


def changes(before: Key, after: Key) -> list[tuple[str, str]]:
    """Return the first few differences between two keys; at least one.

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
    found = list(dict.fromkeys(found)) or [("an object", "it was replaced")]
    more = len(found) - _MOST
    return found[:_MOST] + ([("", f"and {more} more")] if more > 0 else [])


def _described(found: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{what}: {how}" if what else how for what, how in found)


def remedy(found: Sequence[tuple[str, str]], settings: frozenset[str]) -> str:
    """Return how to avoid recaptures for these changes.

    ``settings`` are the names of settings of optimizers' groups.

    >>> remedy([("lr", "0.1 -> 0.2")], frozenset(["lr"]))
    'a rate that is a tensor, lr=torch.tensor(...), may change without a recapture'
    """
    if rates := [name for name, _ in found if name in settings]:
        advice = "a rate that is a tensor, lr=torch.tensor(...), may change without a recapture"
        others = " and ".join(name for name in rates if name != "lr")
        return (
            advice
            if not others
            else (f"{advice}; do not change {others} (cycle_momentum=False of a scheduler)")
        )
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
