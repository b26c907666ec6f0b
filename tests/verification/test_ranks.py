"""Programs of several ranks: one refused program for each law, made from accepted ones."""

from __future__ import annotations

import pytest

import autosched as asc
from autosched.machine.machine import Machine
from tests.clusters import CHAIN, parts_of
from tests.verification.test_verify import chain, changed, fn, refused

COPY = "cpu:0/copy-out copy h -> cpu:1/copy-in"
REFUSED = {
    "an event crosses ranks": (
        [("cpu:1/copy-in record e1", ""), ("cpu:1/compute wait e1", "cpu:1/compute wait e0")],
        "event e0 is recorded on cpu:0/compute, on another rank (law: rank)",
    ),
    "a sender learns from the receiver": (
        [("cpu:0/compute wait e2\n", "cpu:0/compute wait e1\n")],
        "event e1 is recorded on cpu:1/copy-in, on another rank (law: rank)",
    ),
    "a copy has one stream": (
        [(COPY, "cpu:0/copy-out copy h -> cpu:1")],
        "a copy between ranks is on a stream of its source and of its destination (law: exchange)",
    ),
    "a copy has two streams of the receiver": (
        [(COPY, "cpu:1/copy-in copy h <- cpu:0")],
        "a copy between ranks is on a stream of its source and of its destination (law: exchange)",
    ),
    "a device is of no rank": (
        [("rank 1 has cpu:1\n", "")],
        "device cpu:1 is of no rank",
    ),
    "a device is of two ranks": (
        [("rank 1 has cpu:1", "rank 1 has cpu:1 cpu:0")],
        "a device is of two ranks",
    ),
    "the reader does not wait for the receive": (
        [("cpu:1/compute wait e1\n", "")],
        "'h' on cpu:1 is made by the copy of 'h' to cpu:1, which is not waited for (law: order)",
    ),
    "memory is freed while it is sent": (
        [("cpu:0/compute wait e2\n", "")],
        "'h' on cpu:0 is freed while the copy of 'h' to cpu:1 may still use it (law: free)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_law_is_named(what):
    edits, message = REFUSED[what]
    assert message in refused(CHAIN, chain(), *edits)


def test_tasks_that_share_state_are_on_one_rank():
    graph = asc.Graph("noisy")
    h = graph.add(fn, graph.input("x"), name="h", random=True)
    graph.output(graph.add(fn, h, name="y", random=True))
    with pytest.raises(asc.ProgramError, match="'y' shares state with 'h' on cpu:0, on another"):
        asc.verify(changed(CHAIN), graph)


def test_a_program_is_of_the_ranks_of_the_machine():
    asc.verify(changed(CHAIN), chain(), Machine.emulated(0, hosts=2))
    with pytest.raises(asc.ProgramError, match="of other ranks than those of the machine"):
        asc.verify(changed(CHAIN), chain(), Machine.emulated(0, hosts=3))


def test_a_part_is_no_program():
    for part in parts_of(changed(CHAIN)):
        with pytest.raises(asc.ProgramError, match="this is the part of one rank"):
            asc.verify(part, chain())


TWO_SENDS = """
    rank 0 has cpu:0
    rank 1 has cpu:1
    input x on cpu:0
    cpu:0/s  run h
    cpu:0/s  record e0
    cpu:0/t  wait e0
    cpu:0/t  copy h -> cpu:1/in
    cpu:0/t  record e1
    cpu:0/s  copy x -> cpu:1/in
    cpu:0/s  wait e1
    cpu:0/s  free h
    cpu:1/in  record e2
    cpu:1/c  wait e2
    cpu:1/c  run y
    cpu:1/c  record e3
    cpu:1/in  wait e3
    cpu:1/in  free h
    cpu:1/in  free x
    output y on cpu:1
"""


def test_a_sender_learns_nothing_of_its_receiver():
    """So the end of the second send does not say that the first has ended, in either proof."""
    graph = asc.Graph("two sends")
    x = graph.input("x")
    graph.output(graph.add(fn, graph.add(fn, x, name="h"), x, name="y"))
    told = refused(TWO_SENDS, graph, ("cpu:0/s wait e1\n", ""))
    assert "'h' on cpu:0 is freed while the copy of 'h'" in told
