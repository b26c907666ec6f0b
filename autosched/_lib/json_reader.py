"""Read JSON and check it against a shape.

Errors name the place in the document. A reader takes a part of a document and its place there, and
returns the object that the part describes. Readers are composed of smaller readers. This module
does not know what documents are about.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

from autosched.errors import AutoschedError, ScheduleError, listed

Reader = Callable[[Any, str], Any]

# Written only if set, because older files do not have them.
_NEWER = (
    *("pageable", "pageable_bytes_per_second"),
    *("issue_seconds", "event_seconds", "issue", "replay", "shares"),
)
_SELDOM = ("rank", "host", "network", "on_host")  # written unless they are None


def parse(text: str, reader: Reader) -> Any:
    """Parse a text as JSON and apply a reader. Raises ScheduleError for invalid documents.

    >>> parse('{"latency": true}', table(NUMBER))
    Traceback (most recent call last):
    autosched.errors.ScheduleError: ["latency"] must be a number, or "inf", got true
    """
    try:
        document = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ScheduleError(f"not JSON: {error}") from error
    return reader(document, "")


def one(what: str, fits: Callable[[Any], bool]) -> Reader:
    """Read a part that ``fits``, unchanged; ``what`` describes it in errors."""

    def read(item: Any, place: str) -> Any:
        return item if fits(item) else refuse(place, what, item)

    return read


def _number(item: Any, place: str) -> Any:
    """Read a number that a float can hold, or ``"inf"``: JSON has no infinity, and 1e999 is rejected."""
    if item == "inf":
        return math.inf
    # A bool is no number.
    is_number = type(item) in (int, float) and abs(item) <= sys.float_info.max
    return item if is_number else refuse(place, 'a number, or "inf"', item)


def each(reader: Reader) -> Reader:
    """Read a list as a tuple, each item with ``reader``."""

    def read(item: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(item, list):
            refuse(place, "a list", item)
        return tuple([reader(part, f"{place}[{i}]") for i, part in enumerate(item)])

    return read


def table(reader: Reader) -> Reader:
    """Read an object with arbitrary keys as a dict, each value with ``reader``."""

    def read(item: Any, place: str) -> dict[str, Any]:
        if not isinstance(item, dict):
            refuse(place, "an object", item)
        return {key: reader(part, f"{place}[{json.dumps(key)}]") for key, part in item.items()}

    return read


def struct(
    make: Callable[..., Any], readers: Mapping[str, Reader], optional: Collection[str] = ()
) -> Reader:
    """Read an object with these keys, and call ``make`` with the values.

    All keys are required but the ``optional`` ones, and no others are accepted.
    """

    def read(item: Any, place: str) -> Any:
        if not isinstance(item, dict):
            refuse(place, "an object", item)
        for key in (*readers, *item):
            if key not in readers or (key not in item and key not in optional):
                fault = "misses" if key in readers else "has an unknown"
                keys = listed(readers, most=16)
                raise ScheduleError(f"{place or 'it'} {fault} key {key!r}; its keys are {keys}")
        parts = {
            key: read(item[key], f"{place}.{key}" if place else key)
            for key, read in readers.items()
            if key in item
        }
        try:
            return make(**parts)
        except AutoschedError as error:
            raise ScheduleError(f"{place}: {error}" if place else str(error)) from error

    return read


def perhaps(reader: Reader) -> Reader:
    """Read null as None, and anything else with ``reader``."""
    return lambda item, place: None if item is None else reader(item, place)


NUMBER: Reader = _number
TEXT = one("a string", lambda item: isinstance(item, str))
_ANYTHING = one("anything", lambda item: True)
_BY_TYPE = {
    "str": TEXT,
    "str | None": perhaps(TEXT),
    "float": NUMBER,
    "float | None": perhaps(NUMBER),
}


def record(cls: Any, **readers: Reader) -> Reader:
    """Read an object as a dataclass, which checks what is in its fields.

    A field is read with its reader among ``readers``, or one for strings or numbers if it is
    annotated so. Fields with defaults are optional.
    """
    kept = [field for field in dataclasses.fields(cls) if field.metadata.get("saved", True)]
    known = {f.name: readers.get(f.name, _BY_TYPE.get(str(f.type), _ANYTHING)) for f in kept}
    needed = {f.name for f in kept if f.default is f.default_factory is dataclasses.MISSING}
    return struct(cls, known, known.keys() - needed)


def refuse(place: str, what: str, got: Any) -> NoReturn:
    """Raise ScheduleError with the place, what must be there, and what is."""
    if isinstance(got, (dict, list)):  # it may be too deep to print
        shown = "an object" if isinstance(got, dict) else "a list"
    elif isinstance(got, _Twice):
        shown = f"one with the key {got.key!r} twice"
    else:
        shown = json.dumps(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ScheduleError(f"{place or 'it'} must be {what}, got {shown}")


def json_data(item: Any) -> Any:
    """Return data as JSON types: numbers as int or float, infinite ones and nan as strings."""
    if dataclasses.is_dataclass(item):
        saved = (f.name for f in dataclasses.fields(item) if f.metadata.get("saved", True))
        fields = {name: json_data(getattr(item, name)) for name in saved}
        return {name: part for name, part in fields.items() if _is_written(name, part)}
    if isinstance(item, Mapping):
        if odd := [key for key in item if not isinstance(key, str)]:
            what = f"a table has the key {odd[0]!r}"
            raise ScheduleError(f"{what}, and only strings can be saved as keys")
        return {key: json_data(part) for key, part in item.items()}
    if isinstance(item, (tuple, frozenset)):
        return [json_data(part) for part in (sorted(item) if isinstance(item, frozenset) else item)]
    if item is None or isinstance(item, (str, bool)):
        return item
    if isinstance(item, Integral):
        return int(item)
    return float(item) if math.isfinite(item) else str(float(item))


def _is_written(name: str, part: Any) -> bool:
    return part is not None if name in _SELDOM else bool(part) or name not in _NEWER


class _Twice(NamedTuple):
    """An object with a duplicate key, which no reader accepts."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> Any:
    found: dict[str, Any] = {}
    for key, part in pairs:
        if key in found:
            return _Twice(key)
        found[key] = part
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is none of its numbers; infinity is written as the string "inf"')
