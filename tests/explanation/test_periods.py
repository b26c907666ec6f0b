"""Explanations of the period of a loop: each reason, found in a schedule made for it."""

from __future__ import annotations

import autosched as asc

FAST = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0)
SLOW = asc.Machine.emulated(gpus=2, bytes_per_second=1.0, latency=0.0)


def chain(*tasks, nbytes=0):
    """Return a chain of tasks (seconds, device)."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for i, (seconds, device) in enumerate(tasks):
        value = graph.add(abs, value, name=f"t{i}", seconds=seconds, on=device, nbytes=nbytes)
    graph.output(y=value)
    return graph


def explained(graph, in_flight, machine=FAST, **options):
    return asc.schedule(graph, machine, in_flight=in_flight, **options).explain()


STAGES = chain((3.0, "cpu"), (4.0, "cuda:0"), (3.0, "cuda:1"))


def test_one_run_at_a_time_has_no_period_to_explain():
    assert asc.schedule(STAGES, FAST).explain().period is None


def test_the_busiest_device():
    found = explained(STAGES, 4).period
    assert (found.limit, found.stream, found.cycle) == ("device", "cuda:0/compute", ("t1",))
    assert (found.seconds, found.enough) == (4.0, 3)
    assert "in_flight=3 would suffice" in str(explained(STAGES, 4))


def test_too_few_runs_in_flight():
    found = explained(STAGES, 2)
    assert (found.period.limit, found.period.seconds) == ("in_flight", 5.0)
    assert "no run begins before one of those in flight has ended" in " ".join(str(found).split())


def test_memory_that_leaves_no_room_for_another_run():
    graph = chain((3.0, "cpu"), (3.0, "cuda:0"), (3.0, "cuda:1"), nbytes=100)
    machine = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0, nbytes=400)
    found = explained(graph, 2, machine)
    assert (found.period.limit, found.period.memory) == ("in_flight", "cuda:0")
    assert "the memory of cuda:0 has no room for another run" in str(found)


def test_copies():
    graph = chain((3.0, "cpu"), (3.0, "cuda:0"), nbytes=8)
    found = explained(graph, 4, SLOW).period
    assert (found.limit, found.stream, found.seconds) == ("copies", "cuda:0/copy-in", 8.0)


def test_a_device_that_a_run_needs_twice():
    found = explained(chain((1.0, "cpu"), (4.0, "cuda:0"), (2.0, "cpu")), 4)
    assert (found.period.limit, found.period.seconds) == ("order", 7.0)
    assert "depends on its own: 't0', 't1', 't2'" in " ".join(str(found).split())


def test_state_that_runs_hand_on():
    graph = asc.Graph("state")
    memory = graph.input("memory")
    first = graph.add(abs, memory, name="first", seconds=2.0, on="cuda:0")
    second = graph.add(abs, first, name="second", seconds=3.0, on="cuda:1")
    graph.add(max, memory, second, name="update", seconds=1.0, writes=[memory], on="cpu")
    graph.output(y=second)
    found = explained(graph, 8)
    assert (found.period.limit, found.period.seconds) == ("carried", 6.0)
    assert {"first", "second", "update"} <= set(found.period.cycle)
    assert found.period.bound_name == "carried"


def test_one_run_at_a_time_says_what_two_in_flight_would_gain():
    graph = chain((3.0, "cpu"), (4.0, "cuda:0"))
    single = asc.schedule(graph, FAST).explain()
    loop = asc.schedule(graph, FAST, in_flight=2)
    assert (single.makespan, loop.period) == (7.0, 4.0)
    assert single.notes == (
        "in a loop, in_flight=2 takes 4 s per run instead of 7 s, since runs overlap",
    )
    assert loop.explain().notes == ()


def test_runs_in_flight_that_gain_nothing_or_do_not_fit_are_not_mentioned():
    assert asc.schedule(chain((3.0, "cuda:0"), (4.0, "cuda:0")), FAST).explain().notes == ()
    tight = asc.Machine.emulated(gpus=1, bytes_per_second=1e30, latency=0.0, nbytes=300)
    graph = chain((3.0, "cpu"), (4.0, "cuda:0"), nbytes=100)
    assert "in_flight" not in "".join(asc.schedule(graph, tight).explain().notes)
