"""Lowering for several ranks: ways by the hosts, events on one side, frees in time."""

from __future__ import annotations

import autosched as asc
from autosched.lowering import lower
from autosched.machine.machine import Machine
from autosched.placement import Send
from autosched.program.program import Copy, Program
from tests.clusters import CHAIN, pinned


def fn(*_):
    raise AssertionError("nothing runs here")


def copies(program):
    return [str(i) for i in program if isinstance(i, Copy)]


def test_a_copy_between_accelerators_of_two_ranks_goes_by_way_of_both_hosts():
    graph = asc.Graph()
    h = graph.add(fn, graph.input("x"), name="h", on="cuda:0")
    graph.output(graph.add(fn, h, name="y", on="cuda:1"))
    program = pinned(graph, Machine.emulated(1, hosts=2))
    assert copies(program) == [
        "copy x <- cpu:0",
        "copy h -> cpu:0",
        "copy h -> cpu:1/copy-in",
        "copy h <- cpu:1",
    ]


def test_what_is_on_the_way_already_is_copied_from_there():
    graph = asc.Graph()
    h = graph.add(fn, graph.input("x"), name="h", on="cpu:0")
    a = graph.add(fn, h, name="a", on="cpu:1")
    b = graph.add(fn, h, name="b", on="cuda:1")
    graph.output(a=a, b=b)
    program = pinned(graph, Machine.emulated(1, hosts=2))
    assert copies(program) == ["copy h -> cpu:1/copy-in", "copy h <- cpu:1"]


def test_a_copy_on_the_way_waits_for_a_late_one_to_its_source():
    graph = asc.Graph()
    x = graph.input("x")
    other = graph.input("other")
    late = graph.add(fn, other, name="late", on="cpu:0")
    a = graph.add(fn, x, name="a", on="cpu:1")
    b = graph.add(fn, x, name="b", on="cuda:1")
    graph.output(late=late, a=a, b=b)
    machine = Machine.emulated(1, hosts=2)
    where = {task.name: str(task.device) for task in graph.tasks}
    asked = (Send("x", 0, "cpu:1", "a"), Send("x", 0, "cuda:1", "late"))
    program = lower(asc.Problem(graph, machine), asc.Placement(where, tuple(where), asked))
    assert copies(program) == ["copy x -> cpu:1/copy-in", "copy x <- cpu:1"]
    asc.verify(program, graph, machine)


def test_events_stay_on_the_side_where_they_belong():
    graph = asc.Graph()
    h = graph.add(fn, graph.input("x"), name="h", on="cpu:0")
    graph.output(graph.add(fn, h, name="y", on="cpu:1"))
    program = pinned(graph, Machine.emulated(0, hosts=2))
    assert program == Program.parse(CHAIN)


def test_a_direct_network_takes_one_copy():
    graph = asc.Graph()
    h = graph.add(fn, graph.input("x"), name="h", on="cpu:0")
    y = graph.add(fn, h, name="y", on="cuda:0")
    graph.output(graph.add(fn, y, name="z", on="cuda:1"))
    machine = Machine.emulated(1, hosts=2, network=asc.Network(1e9, direct=True))
    assert copies(pinned(graph, machine)) == ["copy h <- cpu:0", "copy y -> cuda:1/copy-in"]
