"""Explain why a call needs a recapture.

Compares what ``guards.kind_of`` returned for two calls. Knows no graph and no schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from autosched.errors import shown

__all__ = ["changes", "remedy"]

_LOOKS = ("type", "shape", "strides", "dtype", "device", "requires_grad")
_MOST = 3  # changes that are named


def changes(before: Any, after: Any) -> list[tuple[str, str]]:
    """Return descriptions of the first few differences between two kinds of calls; at least one.

    >>> looks = (("x", "x", None),)
    >>> kinds = [(looks, (), ("lr", (float, rate)), "{}", ()) for rate in ("0.1", "0.2")]
    >>> changes(*kinds)
    [('lr', '0.1 -> 0.2')]
    """
    found = [*_of_tensors(before[0], after[0]), *_of_numbers(before[2], after[2])]
    if not found and before[1] != after[1]:
        found = [("an argument", f"{old} -> {new}") for old, new in _leaves(before[1], after[1])]
    if not found and before[3] != after[3]:
        found = [("what an optimizer keeps", f"{_short(before[3])} -> {_short(after[3])}")]
    if not found and before[4:] != after[4:]:
        pairs = list(_leaves(before[4:], after[4:]))
        found = [
            ("a setting of torch's, such as no_grad or autocast", f"{old} -> {new}")
            for old, new in pairs
        ]
    found = list(dict.fromkeys(found)) or [("what the function can read", "it is another object")]
    more = len(found) - _MOST
    return found[:_MOST] + ([("", f"and {more} more")] if more > 0 else [])


def remedy(names: Sequence[str], settings: frozenset[str]) -> str:
    """Return how to avoid recaptures.

    ``settings`` are the names of settings of optimizers' groups.

    >>> remedy(["lr"], frozenset(["lr"]))
    'a rate that is a tensor, lr=torch.tensor(...), may change without a capture'
    """
    rates = [name for name in names if name in settings]
    if "lr" in rates and len(rates) == 1:
        return "a rate that is a tensor, lr=torch.tensor(...), may change without a capture"
    if rates:
        return (
            f"a rate that is a tensor, lr=torch.tensor(...), may change without a capture; keep "
            f"{' and '.join(name for name in rates if name != 'lr')} as it is (cycle_momentum=False of a scheduler)"
        )
    return (
        "pass what changes as a tensor, or keep it as it is; maxsize= says how many kinds are kept"
    )


def _of_tensors(before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield the changes of tensors that have names."""
    olds, news = ({name: (first, looks) for name, first, looks in some} for some in (before, after))
    for name in dict.fromkeys((*olds, *news)):
        if name not in news or name not in olds:
            yield name, "it is gone" if name in olds else "it was not there"
            continue
        (first, old), (other, new) = olds[name], news[name]
        if first != other:
            yield (
                name,
                f"the same tensor as {other!r}"
                if other != name
                else f"no longer the same tensor as {first!r}",
            )
        elif old != new:
            yield name, "; ".join(_of_looks(old, new))


def _of_looks(old: Any, new: Any) -> list[str]:
    if not all(isinstance(item, tuple) and isinstance(item[0], tuple) for item in (old, new)):
        return ["it is of another kind"]
    pairs = [
        f"{what} {_short(one)} -> {_short(other)}"
        for what, one, other in zip(_LOOKS, old[0], new[0], strict=False)
        if one != other
    ]
    return pairs[:1] if pairs and pairs[0].startswith("shape") else pairs or ["other hooks"]


def _of_numbers(before: Sequence[Hashable], after: Sequence[Hashable]) -> Iterator[tuple[str, str]]:
    """Yield the changes of numbers that code can read; names precede them in the keys."""
    name = ""
    for old, new in zip_longest(before, after):
        if old != new:
            known = name or "what the function can read"
            both = _is_number(old) and _is_number(new)
            yield known, f"{_value(old)} -> {_value(new)}" if both else "it is another object"
            if not both:
                return  # all later positions differ
        elif (said := _name(new)) is not None:
            name = said


def _name(item: Any) -> str | None:
    """Return a name, if this is one: ``Reach`` marks names by a subclass of ``str``."""
    if isinstance(item, str):
        return item
    named = (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], type)
        and issubclass(item[0], str)
    )
    return str(item[1]) if named and item[0] is not str else None


def _is_number(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], type)
        and not isinstance(item[1], tuple)
    )


def _value(item: Any) -> str:
    kind, value = item
    return str(value) if kind in (float, complex) else _short(value)


def _leaves(before: Any, after: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of two trees of tuples that differ."""
    if _is_number(before) and _is_number(after):
        if before != after:
            yield _value(before), _value(after)
    elif isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        for old, new in zip(before, after, strict=True):
            yield from _leaves(old, new)
    elif before != after:
        yield _short(before), _short(after)


def _short(item: Any) -> str:
    if isinstance(item, Mapping):
        item = dict(item)
    text = str(tuple(item)) if type(item).__name__ == "Size" else shown(item)
    return text if len(text) <= 60 else f"{text[:57]}..."
