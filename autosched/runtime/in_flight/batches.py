"""Run a schedule on the items of an iterable, which a thread of its own fetches ahead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from autosched.runtime.in_flight.future import RunFuture
from autosched.runtime.threads.thread_team import end_threads

__all__ = ["results"]

Submit = Callable[..., RunFuture]


class _End(NamedTuple):
    """The end of the iterable, and the error that ended it, if any."""

    error: BaseException | None


def results(
    submit: Submit, batches: Iterable[Any], most: int, only: str | None = None
) -> Iterator[Any]:
    """Yield the results of a schedule on each item, in order.

    At most ``most`` items are under way, or wait for the consumer. ``only`` is the name of the only
    input, if there is one.

    >>> def submit(**inputs):
    ...     future = RunFuture(1, dict)
    ...     future.end(inputs, None)
    ...     return future
    >>> list(results(submit, [{"x": 1}, {"x": 2}], 2))
    [{'x': 1}, {'x': 2}]
    """
    room: SimpleQueue[bool] = SimpleQueue()  # False: stop
    found: SimpleQueue[RunFuture | _End] = SimpleQueue()
    for _ in range(most):
        room.put(True)
    parts = submit, batches, only, room, found, _autograd()
    thread = threading.Thread(
        target=_fetch, args=parts, name="autosched fetching batches", daemon=True
    )
    thread.start()
    try:
        while not isinstance(item := found.get(), _End):
            result = item.result()
            del item  # the consumer decides how long the result lives
            yield result
            del result
            room.put(True)
        if item.error is not None:
            raise item.error
    finally:
        room.put(False)
        end_threads([thread])


def _fetch(
    submit: Submit,
    batches: Iterable[Any],
    only: str | None,
    room: SimpleQueue[bool],
    found: SimpleQueue[RunFuture | _End],
    autograd: bool | None,
) -> None:
    """Submit a run for each item, until there is no room any more."""
    error: BaseException | None = None
    try:
        if autograd is not None:
            sys.modules["torch"].set_grad_enabled(autograd)
        for batch in batches:
            if not room.get():
                return
            args, inputs = _arguments(batch, only)
            found.put(submit(*args, **inputs))
    except BaseException as raised:
        error = raised
    found.put(_End(error))


def _arguments(batch: Any, only: str | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of ``submit`` for an item.

    The item for a graph with one input may be the input itself.

    >>> _arguments([1, 2], None), _arguments([1, 2], "x"), _arguments({"x": 1}, "x")
    (([1, 2], {}), (([1, 2],), {}), ((), {'x': 1}))
    """
    if isinstance(batch, Mapping) and (only is None or only in batch):
        return (), batch
    if isinstance(batch, (tuple, list)) and (only is None or len(batch) == 1):
        return batch, {}
    return (batch,), {}


def _autograd() -> bool | None:
    """Whether autograd is enabled here; None without torch."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else bool(torch.is_grad_enabled())
