"""Schedules over several processes: equal to the serial run, bit for bit."""

from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.testing.strategies import graphs, squash
from tests.runtime.ranks import jobs
from tests.sample_policies import policies


@given(data=st.data(), size=st.integers(2, 4), policy=policies, streams=st.integers(1, 2))
def test_runs_equal_the_serial_run(ranks, data, size, policy, streams):
    """Also if the shapes of inputs vary."""
    devices = tuple(f"cpu:{rank}" for rank in range(size))
    graph = data.draw(graphs(devices))
    outputs = data.draw(st.none() | st.sampled_from(devices))
    widths = data.draw(st.sampled_from([(3, 3, 3), (3, 3, 5, 5, 4, 3), (3, 6, 3)]))
    if not all(jobs.fits(graph, width) for width in widths):
        widths = (3, 3, 3)
    found = ranks.run(jobs.run_drawn, size, graph, policy, streams, outputs, widths)
    refused = [wrong[:1] for wrong in found if wrong and wrong[0].startswith("refused")]
    assert len(refused) in (0, size)
    assert refused or found == [[]] * size


@given(
    data=st.data(),
    size=st.integers(2, 3),
    policy=policies,
    streams=st.integers(1, 2),
    in_flight=st.integers(2, 4),
)
def test_runs_in_flight_equal_serial_runs(ranks, data, size, policy, streams, in_flight):
    devices = tuple(f"cpu:{rank}" for rank in range(size))
    graph = data.draw(graphs(devices))
    outputs = data.draw(st.none() | st.sampled_from(devices))
    widths = data.draw(st.sampled_from([(3, 3, 3), (3, 5, 4, 3)]))
    if not all(jobs.fits(graph, width) for width in widths):
        widths = (3, 3, 3)
    job = jobs.run_drawn_in_flight
    found = ranks.run(job, size, graph, policy, streams, outputs, in_flight, widths)
    refused = [wrong[:1] for wrong in found if wrong and wrong[0].startswith("refused")]
    assert len(refused) in (0, size)
    assert refused or found == [[]] * size


def test_runs_of_several_schedules_follow_each_other(ranks):
    """Also of equal ones, whose copies have the same tags, and while one of them connects."""
    assert ranks.run(jobs.interleave, 2) == [[], []]


def test_shapes_vary_from_run_to_run(ranks):
    """Also of trees, of values that are kept, and of empty ones."""
    assert ranks.run(jobs.vary_shapes, 3) == [[]] * 3


def test_memory_on_a_copy_stream_is_freed_behind_its_copies(ranks):
    """That x comes back shows that z has been read; z was freed when the way back began."""
    graph = asc.Graph("drawn")
    x, _ = graph.inputs("x", "y")
    with graph.on("cpu:1"):
        z = graph.input("z")
    x[1:] = graph.add(squash, z)
    z.t().mul_(0.75)
    graph.output(z=z)
    for _ in range(3):
        found = ranks.run(jobs.run_drawn, 3, graph, "round_robin", 1, "cpu:1", (3, 3, 3))
        assert found == [[]] * 3


def test_values_are_received_in_the_same_memory_in_every_run_but_for_outputs(ranks):
    found = ranks.run(jobs.keep_memory, 3)
    addresses, outputs = found[1][0], found[2][1]
    assert addresses <= 2  # the first run is one of its own
    assert outputs == 10
