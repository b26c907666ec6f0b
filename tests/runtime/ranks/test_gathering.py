"""Exchanges of numbers, over a wire that is only noted."""

import torch

from autosched.runtime.ranks.gathering import _Channel


class Work:
    def wait(self):
        pass


class Wire:
    """A wire of rank 0 of two; what rank 1 says arrives as soon as rank 0 has sent."""

    rank = 0
    size = 2

    def __init__(self, said):
        self.said = iter(said)
        self.log = []
        self.waiting = []

    def receiver(self, rank, tag):
        def receive(row):
            self.log.append("receive")
            self.waiting.append(row.view(torch.int64))
            return Work()

        return receive

    def sender(self, rank, tag):
        def send(row):
            self.log.append("send")
            count, *_ = row.view(torch.int64).tolist()
            self.waiting.pop(0).copy_(torch.tensor([count, *next(self.said), count]))
            return Work()

        return send


class Members:
    is_lost = False


def test_numbers_are_those_of_each_rank_whatever_their_count():
    wire = Wire([(7, 8, 9, 0), (5, 0, 0, 0)])
    channel = _Channel(wire)
    assert channel.gather([1, 2, 3], 1, Members, "numbers") == [[1, 2, 3], [7, 8, 9]]
    assert channel.gather([4], 2, Members, "numbers") == [[4], [5]]


def test_a_rank_is_ready_for_the_next_exchange_before_it_begins():
    wire = Wire([(0, 0, 0, 0)] * 2)
    channel = _Channel(wire)
    rows = set()
    for count in (1, 2):
        assert wire.log[-1] == "receive"
        assert len(wire.waiting) == 1
        rows.add(wire.waiting[0].data_ptr())
        channel.gather([1], count, Members, "numbers")
    assert len(rows) == 1  # the memory is used again
    assert wire.log == ["receive", "send"] * 2 + ["receive"]
