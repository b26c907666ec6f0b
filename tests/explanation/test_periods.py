"""Explanations of the period of a loop."""

from __future__ import annotations

import autosched as asc

FAST = asc.Machine.emulated(gpus=2, bytes_per_second=1e30, latency=0.0)


def chain(*tasks, nbytes=0):
    """Return a chain of tasks (seconds, device)."""
    graph = asc.Graph("chain")
    value = graph.input("x")
    for i, (seconds, device) in enumerate(tasks):
        value = graph.add(abs, value, name=f"t{i}", seconds=seconds, on=device, nbytes=nbytes)
    graph.output(y=value)
    return graph


STAGES = chain((3.0, "cpu"), (4.0, "cuda:0"), (3.0, "cuda:1"))


def test_the_period_of_a_loop_is_compared_with_its_bound():
    for in_flight, period, bound in ((4, 4.0, 4.0), (2, 5.0, 5.0)):
        found = asc.schedule(STAGES, FAST, in_flight=in_flight).explain()
        assert (found.in_flight, found.period, found.period_bound) == (in_flight, period, bound)
    text = " ".join(str(found).split())
    assert (
        "5 s per run, with 2 in flight; no schedule with as many takes less than 5 s (100%)" in text
    )
    assert "Period" not in str(asc.schedule(STAGES, FAST).explain())


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
