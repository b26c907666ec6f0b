"""Mark functions that are captured as one task per call.

This module knows values, and whether a capture is in progress. It does not know what a capture
does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from autosched._lib.tree import flatten
from autosched.errors import GraphError, listed
from autosched.graph.value import Value

F = TypeVar("F", bound=Callable[..., Any])
_Around = Callable[[Callable[..., Any]], contextlib.AbstractContextManager[None]]


class _Capture(threading.local):
    """The capture in progress in this thread; ``around`` records the calls of marked functions."""

    around: _Around | None = None


CAPTURE = _Capture()  # not a context variable, which torch.compile cannot trace


@overload
def task(fn: F, /) -> F: ...
@overload
def task(
    *, writes: str | Iterable[str] = (), aliases: str | None = None, **options: Any
) -> Callable[[F], F]: ...
def task(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    writes: str | Iterable[str] = (),
    aliases: str | None = None,
    **options: Any,
) -> Any:
    """Mark a function as one task: a call with values of a graph adds one task to the graph.

    In a capture, each call becomes one task and its backward another. A call with tensors runs the
    function. Options are those of ``Graph.add``; ``writes`` and ``aliases`` name parameters. Raises
    GraphError for names that are not parameters.

    >>> @task(outputs=2)
    ... def halves(x, count):
    ...     return x // count, x % count
    >>> import autosched as asc
    >>> graph = asc.Graph()
    >>> halves(7, 2), halves(graph.input("x"), 2)
    ((3, 1), (Value('halves.0'), Value('halves.1')))
    """
    if fn is None:
        return functools.partial(task, writes=writes, aliases=aliases, **options)
    inner = fn
    written = (writes,) if isinstance(writes, str) else tuple(writes)
    signature = _signature(fn, [*written, *([aliases] if aliases else [])])

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = next((leaf for leaf in flatten((args, kwargs)) if isinstance(leaf, Value)), None)
        if first is None:
            around = CAPTURE.around
            with around(inner) if around is not None else contextlib.nullcontext():
                return inner(*args, **kwargs)
        facts = dict(options)
        if signature is not None:
            given = signature.bind(*args, **kwargs).arguments
            facts["writes"] = [given[name] for name in written if name in given]
            facts["aliases"] = given.get(aliases or "")
        return first.graph.record(inner, args, kwargs, **facts)

    return call


def _signature(fn: Callable[..., Any], named: list[str]) -> inspect.Signature | None:
    """Return the signature of a function if names of parameters are looked up in it."""
    if not named:
        return None
    signature = inspect.signature(fn)
    for name in named:
        if name not in signature.parameters:
            known = listed(signature.parameters)
            raise GraphError(
                f"function {fn.__name__!r} has no parameter {name!r}; its parameters are {known}"
            )
    return signature
