"""Explain why a call needs a recapture.

Compares the keys that ``guards.capture_key`` returned for two calls. Knows no graph and no
schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from autosched.errors import shown

__all__ = ["changes", "remedy"]

_PROPERTIES = ("type", "shape", "strides", "dtype", "device", "requires_grad")
_MOST = 3  # changes that are named


def changes(before: Any, after: Any) -> list[tuple[str, str]]:
    """Return the first few differences between two keys; at least one.

    >>> tensors = (("x", "x", None),)
    >>> keys = [(tensors, (), ("lr", (float, rate)), "{}", ()) for rate in ("0.1", "0.2")]
    >>> changes(*keys)
    [('lr', '0.1 -> 0.2')]
    """
    found = [*_of_tensors(before[0], after[0]), *_of_values(before[2], after[2])]
    if not found:
        for name, old, new in (
            ("an argument", before[1], after[1]),
            ("the state of an optimizer", before[3], after[3]),
            ("a setting of torch, such as no_grad or autocast", before[4:], after[4:]),
        ):
            found = found or [(name, f"{one} -> {other}") for one, other in _leaves(old, new)]
    found = list(dict.fromkeys(found)) or [("an object", "it was replaced")]
    more = len(found) - _MOST
    return found[:_MOST] + ([("", f"and {more} more")] if more > 0 else [])


def remedy(found: Sequence[tuple[str, str]], settings: frozenset[str]) -> str:
    """Return how to avoid recaptures for these changes.

    ``settings`` are the names of settings of optimizers' groups.

    >>> remedy([("lr", "0.1 -> 0.2")], frozenset(["lr"]))
    'a rate that is a tensor, lr=torch.tensor(...), may change without a recapture'
    """
    rates = [name for name, _ in found if name in settings]
    if rates:
        advice = "a rate that is a tensor, lr=torch.tensor(...), may change without a recapture"
        others = " and ".join(name for name in rates if name != "lr")
        if others:
            advice += f"; do not change {others} (cycle_momentum=False of a scheduler)"
        return advice
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
    return f"{advice}; maxsize= is the number of cached captures"


def _of_tensors(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[str, str]]:
    olds, news = ({name: item for name, *item in some} for some in (before, after))
    for name in dict.fromkeys((*olds, *news)):
        if name not in news or name not in olds:
            yield name, "it no longer exists" if name in olds else "it did not exist"
            continue
        (first, old), (other, new) = olds[name], news[name]
        if first != other:
            is_first = other == name
            now = (
                f"no longer the same tensor as {first!r}"
                if is_first
                else f"the same tensor as {other!r}"
            )
            yield name, now
        elif old != new:
            yield name, "; ".join(_of_properties(old, new))


def _of_properties(old: Any, new: Any) -> list[str]:
    if not all(isinstance(item, tuple) and isinstance(item[0], tuple) for item in (old, new)):
        return ["it is of another kind"]
    pairs = [
        f"{what} {_short(one)} -> {_short(other)}"
        for what, one, other in zip(_PROPERTIES, old[0], new[0], strict=False)
        if one != other
    ]
    return pairs[:1] if pairs and pairs[0].startswith("shape") else pairs or ["other hooks"]


def _of_values(before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[tuple[str, str]]:
    """Yield the changes of values; names precede them in the keys."""
    name = ""
    for old, new in zip_longest(before, after):
        if old != new:
            known = name or "an object"
            if not _is_value(old) or not _is_value(new):
                yield known, "it was replaced"
                return  # all later positions differ
            if None not in (_name(old), _name(new)):
                yield "a dict or object", f"it has {_name(new)!r} where it had {_name(old)!r}"
                return
            yield known, f"{_value(old)} -> {_value(new)}"
        elif (found := _name(new)) is not None:
            name = found


def _name(item: Any) -> str | None:
    """Return a name, which ``Reach`` marks by a subclass, or None."""
    if isinstance(item, str):
        return item
    is_marked = _is_value(item) and issubclass(item[0], str) and item[0] is not str
    return str(item[1]) if is_marked else None


def _is_value(item: Any) -> bool:
    """Whether this is a key that ``value_key`` returned."""
    is_pair = isinstance(item, tuple) and len(item) == 2
    return is_pair and isinstance(item[0], type) and not isinstance(item[1], tuple)


def _value(item: Any) -> str:
    kind, value = item
    return str(value) if kind in (float, complex) else _short(value)


def _leaves(before: Any, after: Any) -> Iterator[tuple[str, str]]:
    if before == after:
        return
    if _is_value(before) and _is_value(after):
        yield _value(before), _value(after)
    elif isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            yield from _leaves(old, new)
    else:
        yield _short(before), _short(after)


def _short(item: Any) -> str:
    if isinstance(item, Mapping):
        item = dict(item)
    text = str(tuple(item)) if type(item).__name__ == "Size" else shown(item)
    return text if len(text) <= 60 else f"{text[:57]}..."
