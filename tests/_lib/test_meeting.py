"""Agreements of processes through a store: here each is a thread."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from autosched._lib.meeting import Meeting, connected
from autosched.errors import RankError, ScheduleError


class Asked:
    """A store that calls ``before`` with the names of keys that are looked for."""

    def __init__(self, store, before):
        self.store = store
        self.check = lambda keys: before(keys) or store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def refuse(texts):
    raise ScheduleError("of a test")


def test_an_answer_counts_though_the_rank_that_gave_it_has_left():
    """It writes the answer and leaves after the other looked for it, and before the next look."""
    store = dist.HashStore()
    first, gone = Meeting(store, 0, 2, 10), threading.Event()

    def alive():
        if not gone.is_set():
            with pytest.raises(ScheduleError, match="of a test"):
                first.agree("a call", "", refuse)
            gone.set()
        raise RankError("rank 0 has left")

    with pytest.raises(ScheduleError, match="of a test"):
        Meeting(store, 1, 2, 10, alive).agree("a call", "", refuse)
    assert gone.is_set()


def test_the_first_process_stays_until_others_have_read_its_answer():
    store = dist.HashStore()
    first = Meeting(store, 0, 2, 10)
    may_look, has_read = threading.Event(), threading.Event()

    def look(keys):
        assert keys == ["0/answer"]
        may_look.wait(10)

    second = Meeting(Asked(store, look), 1, 2, 10)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(second.agree, "a call", "b", "".join)
        assert first.agree("a call", "a", "".join) == "ab"
        answer.add_done_callback(lambda _: has_read.set())
        ending = pool.submit(first.end)
        time.sleep(0.02)
        assert not ending.done()
        may_look.set()
        ending.result(10)
        assert has_read.wait(10)
        assert answer.result(10) == "ab"


def test_a_store_that_does_not_answer_is_given_up():
    ended = threading.Event()
    store = Asked(dist.HashStore(), lambda keys: ended.wait(10) and None)
    late = Meeting(store, 1, 2, 0.05)
    with pytest.raises(RankError, match=r"with the store .* does not answer within 0\.05 s"):
        late.agree("a call", "", "".join)

    def alive():
        raise RankError("rank 0 hangs")

    told = Meeting(store, 1, 2, 10, alive)
    with pytest.raises(RankError, match="rank 0 hangs"):
        told.agree("a call", "", "".join)
    ended.set()


def test_ranks_that_do_not_connect_are_given_up():
    ended = threading.Event()
    with pytest.raises(RankError, match=r"the ranks did not connect within 0\.05 s"):
        connected(lambda: ended.wait(10), lambda: None, 0.05)
    ended.set()

    def refused():
        raise RuntimeError("connection refused")

    with pytest.raises(RankError, match="the ranks did not connect: connection refused"):
        connected(refused, lambda: None, 10)
    assert connected(lambda: 3, lambda: None, 10) == 3
