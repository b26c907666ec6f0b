"""Schedules over several processes: equal to the serial run, bit for bit; shapes are those of the plan."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Stream
from autosched.runtime.ranks.backend import relays
from autosched.runtime.ranks.exchange import ReceiveBuffer, alignments, description_of, rows
from autosched.testing.comparing import difference
from tests.runtime.ranks import jobs
from tests.sample_policies import policies
from tests.strategies import graphs, squash


@given(data=st.data(), size=st.integers(2, 4), policy=policies, streams=st.integers(1, 2))
def test_runs_equal_the_serial_run(ranks, data, size, policy, streams):
    devices = tuple(f"cpu:{rank}" for rank in range(size))
    graph = data.draw(graphs(devices))
    outputs = data.draw(st.none() | st.sampled_from(devices))
    ranks.run_drawn(jobs.run_drawn, size, graph, policy, streams, outputs)


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
        assert ranks.run(jobs.run_drawn, 3, graph, "round_robin", 1, "cpu:1") == [[]] * 3


def test_what_limited_memory_repeats_is_in_the_graphs_of_all_ranks(ranks):
    """Each rank compared the graph with what is repeated with its own without, and refused it."""
    (repeated, wrong), others = ranks.run(jobs.repeat_tasks, 2)
    assert repeated
    assert (wrong, others) == ([], (repeated, []))


def test_values_are_received_in_the_same_memory_in_every_run_but_for_outputs(ranks):
    found = ranks.run(jobs.keep_memory, 3)
    addresses, outputs = found[1][0], found[2][1]
    assert addresses <= 2  # the first run is one of its own
    assert outputs == 10


def test_trees_of_tensors_arrive_as_they_are(ranks):
    assert ranks.run(jobs.pass_trees, 2) == [True, True]


def test_lists_of_tensors_that_somebody_has_are_not_received_into(ranks):
    assert ranks.run(jobs.keep_lists, 2) == [True, True]


def test_values_are_made_again_of_their_rows():
    for value in jobs.odd_values():
        description = description_of(value)
        buffer = ReceiveBuffer(description, alignments(value))
        for into, row in zip(buffer.rows, rows(value), strict=True):
            into.copy_(row)
        buffer.spread()
        assert difference(value, buffer.value) is None
        assert alignments(buffer.value) == alignments(value)
        assert description_of(buffer.value) == description


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[:1], lambda t: t.untyped_storage()])
def test_memory_is_not_received_into_while_somebody_has_it(keep):
    buffer = ReceiveBuffer(description_of([torch.ones(4), torch.ones(2)]), [0, 0])
    assert buffer.is_free()
    kept = keep(buffer.value[1])
    assert not buffer.is_free()
    del kept
    assert buffer.is_free()


@pytest.mark.parametrize("value", [object(), {1: torch.ones(1)}, torch.ones(2).to_sparse()])
def test_what_is_no_dense_tensor_is_not_sent(value):
    with pytest.raises(asc.ScheduleError, match="cannot be sent to another rank"):
        description_of(value)


def test_other_shapes_of_inputs_are_refused_on_all_ranks_and_calls_go_on(ranks):
    for rank, ended in enumerate(ranks.run(jobs.change, 2, "input")):
        own = ["2.0" if rank else ""] * 2
        assert [ended[0], ended[2]] == own
        assert ended[1].startswith(
            "ScheduleError: rank 0: input 'x' has float32 (3, 2), and had float32 (3, 1) in the first"
        )


def test_other_shapes_of_results_are_not_sent(ranks):
    first, second = ranks.run(jobs.change, 2, "result")
    why = "'first' is float32 (1, 1), and was float32 (2, 1) in the first run"
    assert first[1].startswith(f"ScheduleError: {why}")
    assert second[1].startswith("RankError: rank 0: send first -> cpu:1: ScheduleError: " + why)
    assert all("a run failed before" in ended[2] for ended in (first, second))


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


def test_each_rank_profiles_its_part(ranks):
    found = ranks.run(jobs.profile, 3)
    assert [names for names, _ in found] == [
        ["first", "first", "third", "fourth"],
        ["first", "second", "second"],
        ["second", "third", "third"],
    ]
    assert all(seconds > 0 for _, seconds in found)


def test_a_forked_process_has_joined_nothing(ranks):
    for rank, found in enumerate(ranks.run(jobs.fork, 3)):
        ended = "" if rank else "-2.0"
        assert found == [ended, 0, ended]
