"""Run a schedule on the items of an iterable, which a thread of its own fetches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autosched._lib.fetching import fetched_ahead
from autosched.runtime.in_flight.future import RunFuture


def results(
    submit: Callable[..., RunFuture], batches: Iterable[Any], most: int, only: str | None = None
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

    def submitted(batch: Any) -> RunFuture:
        args, inputs = unpacked(batch, only)
        return submit(*args, **inputs)

    for future in fetched_ahead(batches, most, submitted):
        yield future.result()


def unpacked(batch: Any, only: str | None) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of ``submit`` for an item.

    The item for a graph with one input may be the input itself.

    >>> unpacked([1, 2], None), unpacked([1, 2], "x"), unpacked({"x": 1}, "x")
    (([1, 2], {}), (([1, 2],), {}), ((), {'x': 1}))
    """
    if isinstance(batch, Mapping) and (only is None or only in batch):
        return (), batch
    if isinstance(batch, (tuple, list)) and (only is None or len(batch) == 1):
        return batch, {}
    return (batch,), {}
