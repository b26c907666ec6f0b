"""The copies of one rank, on a wire that only notes what happens: in one process, without gloo."""

import json

import pytest
import torch

import autosched as asc
from autosched.errors import ScheduleError
from autosched.program.program import Receive, Send, Stream
from autosched.runtime.ranks.backend import relays
from autosched.runtime.ranks.exchange import Exchange
from autosched.runtime.ranks.messages import header_of

VALUE = torch.arange(3.0)


class Wire:
    """Notes which rows are started and waited for; each first row received is a header."""

    def __init__(self):
        self.notes = []
        self.headers = {}

    def sender(self, rank, tag):
        return lambda row: Work(self.notes, "send", tag, row)

    def receiver(self, rank, tag):
        def receive(row):
            if tag not in self.headers:
                self.headers[tag] = json.dumps(header_of(VALUE)).encode()
                row[: len(self.headers[tag])] = torch.frombuffer(
                    bytearray(self.headers[tag]), dtype=torch.uint8
                )
            return Work(self.notes, "receive", tag, row)

        return receive


class Work:
    def __init__(self, notes, what, tag, row):
        self.notes = notes
        self.note = what, tag, row
        notes.append(("start", what, tag))

    def wait(self):
        self.notes.append(("wait", *self.note[:2]))


class Session:
    is_lost = False

    def __init__(self):
        self.lasting = Wire()

    def register(self, _):
        pass

    def begin_run(self, wire):
        return wire or self.lasting


def to_and_fro(hops):
    """Return the program of a value that is changed on one rank after the other."""
    graph = asc.Graph("to and fro")
    with graph.on("cpu:0"):
        value = graph.input("x").clone()
    for hop in range(hops):
        with graph.on(f"cpu:{(hop + 1) % 2}"):
            value.add_(1)
    graph.output(y=value)
    return asc.schedule(graph, asc.Machine.emulated(hosts=2)).program


def exchange_of(part, threads=None):
    ranks = {"cpu:0": 0, "cpu:1": 1}
    threads = threads or dict.fromkeys(part.streams, "all")
    return Exchange(part, ranks, threads, Session(), 0)


def test_a_rank_whose_copies_wait_only_for_memory_at_the_end_needs_one_thread():
    program = to_and_fro(4)
    assert "cpu:1/copy-in   wait" in str(program.part(1))
    assert [relays(program.part(rank)) for rank in (0, 1)] == [set(), set()]


def test_a_stream_that_sends_on_what_it_receives_has_a_thread():
    part = asc.Program.parse(
        """
        rank 1 has cpu:1
        cpu:1/copy-in   receive x <- cpu:0
        cpu:1/copy-in   record e0
        cpu:1/copy-out  wait e0
        cpu:1/copy-out  send x -> cpu:2
        """
    )
    assert relays(part) == {Stream("cpu:1", "copy-out")}


def calls_of(exchange, part):
    """Return the steps of the sends and receives of a part, and of its waits."""
    steps = []
    for i in part:
        if isinstance(i, (Send, Receive)):
            steps.append(exchange.transfer(i))
        elif hasattr(i, "event") and hasattr(i, "ago"):
            steps.append(exchange.wait(i.stream, i.event))
    return [step for step in steps if step is not None]


def run(exchange, steps, value=VALUE):
    exchange.begin()
    for step in steps:
        if hasattr(step, "half"):
            step(value, None)
        else:
            step()


def test_a_thread_waits_for_each_copy_once_and_for_none_that_nobody_needs():
    part = to_and_fro(4).part(0)
    exchange = exchange_of(part)
    steps = calls_of(exchange, part)
    for _ in range(2):
        exchange.session.lasting.notes.clear()
        run(exchange, steps)
    notes = exchange.session.lasting.notes
    assert notes[:2] == [("start", "receive", 0), ("start", "receive", 1)]  # posted early
    assert [note for note in notes if note[:2] == ("wait", "receive")] == [
        ("wait", "receive", 0),
        ("wait", "receive", 1),
    ]
    assert ("wait", "send", 1) not in notes
    ending = exchange.ending(part.streams)
    ending()
    ending()
    assert notes.count(("wait", "send", 1)) == notes.count(("wait", "receive", 0)) == 1


def test_each_thread_waits_for_what_it_has_not_waited_for():
    part = asc.Program.parse(
        """
        rank 1 has cpu:1
        cpu:1/copy-in   receive x <- cpu:0
        cpu:1/copy-in   record e0
        cpu:1/compute   wait e0
        cpu:1/copy-in   receive y <- cpu:0
        cpu:1/copy-in   record e1
        cpu:1/compute   wait e1
        cpu:1/compute1  wait e1
        cpu:1/copy-out  wait e0
        """
    )
    threads = {stream: str(stream) for stream in part.streams}
    out = Stream("cpu:1", "copy-out")
    threads[out] = "cpu:1/compute1"
    exchange = exchange_of(part, threads)
    x, first, y, second, other = calls_of(exchange, part)
    assert exchange.wait(out, 0) is None
    for wait, waited in ((first, [0]), (second, [1]), (other, [0, 1])):
        run(exchange, [x, y])
        exchange.session.lasting.notes.clear()
        wait()
        assert [tag for _, _, tag in exchange.session.lasting.notes] == waited


LOOP = """
    rank 1 has cpu:1
    2 runs in flight
    cpu:1/compute   wait e1 of 1 run ago
    cpu:1/copy-in   receive x <- cpu:0
    cpu:1/copy-in   record e0
    cpu:1/compute   wait e0
    cpu:1/copy-in   receive y <- cpu:0
    cpu:1/copy-in   record e1
    cpu:1/compute   wait e1
"""


def begun(part):
    """Return the exchange of a run whose receives have been started."""
    exchange = exchange_of(part)
    run(exchange, [exchange.transfer(i) for i in part if isinstance(i, Receive)])
    return exchange


def test_copies_of_a_stream_end_in_the_order_of_runs():
    part = asc.Program.parse(LOOP)
    before, exchange = begun(part), begun(part)
    exchange.wait(Stream("cpu:1", "compute"), 0, before)()
    assert waited(before) == [0, 1]
    assert waited(exchange)[:1] == [0]


def test_a_wait_for_an_earlier_run_is_for_all_copies_before_its_record():
    """Also for those that a thread of that run has waited for before: it may not have come there."""
    exchange = begun(asc.Program.parse(LOOP))
    exchange.wait(Stream("cpu:1", "compute"), 1)()
    assert sorted(waited(exchange)) == [0, 1]


def waited(exchange):
    """Return the tags of the values that were waited for; their headers were before."""
    tags = [tag for what, _, tag in exchange.session.lasting.notes if what == "wait"]
    return [tag for number, tag in enumerate(tags) if tag in tags[:number]]


def test_what_was_sent_and_freed_is_released_before_the_thread_waits_again():
    part = to_and_fro(4).part(0)
    assert "wait e3\ncpu:0/compute   free clone\n" in str(part)  # e3 shows that it has arrived
    exchange = exchange_of(part)
    steps = calls_of(exchange, part)
    for _ in range(2):
        exchange.session.lasting.notes.clear()
        run(exchange, steps)
    assert exchange.session.lasting.notes[2:] == [
        ("start", "send", 0),
        ("wait", "receive", 0),
        ("start", "send", 1),
        ("wait", "send", 0),
        ("wait", "receive", 1),
    ]


def test_a_send_compares_before_it_starts():
    part = to_and_fro(2).part(0)
    exchange = exchange_of(part)
    steps = calls_of(exchange, part)
    run(exchange, steps)
    exchange.session.lasting.notes.clear()
    with pytest.raises(ScheduleError, match=r"was float32 \(3,\) in the last run"):
        run(exchange, steps, [VALUE])
    assert all(what != "send" for _, what, _ in exchange.session.lasting.notes)


def test_only_the_end_of_a_run_waits_for_values_of_other_shapes():
    """The receiver may look for them later than this rank waits for memory."""
    part = to_and_fro(4).part(0)
    exchange = exchange_of(part)
    steps = calls_of(exchange, part)
    run(exchange, steps)
    ending = exchange.ending(part.streams)
    ending()
    notes = exchange.session.lasting.notes
    for value, count in ((torch.arange(4.0), 3), (torch.arange(4.0), 1)):  # mark, header, value
        notes.clear()
        run(exchange, steps, value)
        exchange.freeing(next(i.stream for i in part if isinstance(i, Send)))()
        assert notes.count(("start", "send", 0)) == count
        assert (notes.count(("wait", "send", 0)) == 0) == (count == 3)
        ending()
        assert notes.count(("wait", "send", 0)) == count
        ending()
        assert notes.count(("wait", "send", 0)) == count
