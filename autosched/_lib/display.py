"""Register how objects draw themselves.

``Graph.draw`` and the notebook display of graphs and timelines are methods of classes in lower
layers than ``viz``. ``viz.drawing`` registers its functions here when it is imported, which
``import autosched`` does. So neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_FUNCTIONS: dict[tuple[type, str], Callable[..., Any]] = {}


def public_names(item: object, fields: Iterable[str]) -> list[str]:
    """Return what ``dir`` lists: fields, and the public methods and properties of the class."""
    kind = type(item)
    named = (name for name in dir(kind) if not name.startswith("_"))
    return [*fields, *(name for name in named if hasattr(getattr(kind, name), "__get__"))]


def register(cls: type, **functions: Callable[..., Any]) -> None:
    """Let functions ``draw`` objects of a class into a file, or ``show`` them as a MIME bundle."""
    _FUNCTIONS.update({(cls, what): function for what, function in functions.items()})


def function_of(item: object, what: str) -> Callable[..., Any]:
    """Return the function of an object's class, or of the nearest class that it derives from."""
    classes = type(item).__mro__
    return next(_FUNCTIONS[cls, what] for cls in classes if (cls, what) in _FUNCTIONS)
