"""Items that a thread fetches ahead."""

import threading

from autosched._lib import fetching
from autosched._lib.fetching import fetched_ahead


def test_what_is_fetched_when_the_consumer_has_stopped_is_not_used(monkeypatch):
    monkeypatch.setattr(fetching, "_PATIENCE", 0.0)
    go = threading.Event()
    fetched, used = [], []

    def slow():
        yield 1
        go.wait(10)
        for item in (2, 3):
            fetched.append(item)
            yield item

    before = {*threading.enumerate()}
    found = fetched_ahead(slow(), 3, used.append)
    next(found)
    (thread,) = {*threading.enumerate()} - before
    found.close()
    go.set()
    thread.join()
    assert used == [1]
    assert fetched == [2]
