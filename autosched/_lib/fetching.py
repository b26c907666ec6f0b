"""Fetch the items of an iterable ahead, in a thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

_PATIENCE = 1.0  # seconds that a consumer who stops waits for the thread

T = TypeVar("T")
Item = TypeVar("Item")


class _End(NamedTuple):
    """The end of the iterable, and the error that ended it, if any."""

    error: BaseException | None


def fetched_ahead(items: Iterable[Item], most: int, use: Callable[[Item], T]) -> Iterator[T]:
    """Yield what ``use`` returns for the items of an iterable, in order.

    A thread fetches up to ``most`` ahead, and calls ``use`` with them. The item that was yielded
    last counts among them until the next one is asked for. What the iterable or ``use`` raises is
    raised after the items before it. When the consumer stops, the thread ends after the item that
    it is fetching, which is not used.

    >>> list(fetched_ahead(range(3), 2, str))
    ['0', '1', '2']
    """
    room: SimpleQueue[None] = SimpleQueue()
    found: SimpleQueue[T | _End] = SimpleQueue()
    stopped: list[bool] = []
    torch: Any = sys.modules.get("torch")
    records = torch is not None and torch.is_grad_enabled()

    def fetch() -> None:
        error: BaseException | None = None
        try:
            if torch is not None:
                torch.set_grad_enabled(records)
            room.get()
            for item in items:
                if stopped:
                    break
                found.put(use(item))
                del item
                room.get()
                if stopped:
                    break
        except BaseException as raised:
            error = raised
        found.put(_End(error))

    for _ in range(most):
        room.put(None)
    thread = threading.Thread(target=fetch, name="autosched fetching ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := found.get(), _End):
            yield item
            del item  # the consumer decides how long it lives
            room.put(None)
        if item.error is not None:
            raise item.error
    finally:
        stopped.append(True)
        room.put(None)
        thread.join(_PATIENCE)
