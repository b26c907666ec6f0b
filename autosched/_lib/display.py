"""Register how objects draw themselves.

``Graph.draw`` and the notebook display of graphs and timelines are methods of classes in lower
layers than ``viz``. ``viz.drawing`` registers its functions here when it is imported, which
``import autosched`` does. So neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Renderer(NamedTuple):
    """Functions that draw objects of one class: into a file, and as a notebook's MIME bundle."""

    draw: Callable[..., None]
    show: Callable[..., dict[str, str]]


_RENDERERS: dict[type, Renderer] = {}


def public_names(item: object, fields: Iterable[str]) -> list[str]:
    """Return what ``dir`` lists: fields, and the public methods and properties of the class."""
    kind = type(item)
    named = (name for name in dir(kind) if not name.startswith("_"))
    return [*fields, *(name for name in named if hasattr(getattr(kind, name), "__get__"))]


def register(cls: type, renderer: Renderer) -> None:
    """Let ``renderer`` draw objects of ``cls``."""
    _RENDERERS[cls] = renderer


def renderer_of(item: object) -> Renderer:
    """Return the renderer of an object's class, or of the nearest class that it derives from."""
    return next(_RENDERERS[cls] for cls in type(item).__mro__ if cls in _RENDERERS)
