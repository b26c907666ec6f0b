"""The wire between ranks, in real processes: what arrives, and what the ranks learn of failures."""

import os
import signal

import pytest

from autosched.runtime.ranks.wire import colour
from tests.runtime.ranks import jobs
from tests.runtime.ranks.processes import until


@pytest.mark.parametrize("size", [2, 3, 8, 100])
def test_no_rank_sends_and_receives_in_one_colour(size):
    arcs = [(a, b) for a in range(size) for b in range(size) if a != b]
    sent = {(a, colour(a, b)) for a, b in arcs}
    received = {(b, colour(a, b)) for a, b in arcs}
    assert not sent & received
    assert max(colour(a, b) for a, b in arcs) < 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", [2, 3])
def test_rows_arrive_in_any_order_of_tags(ranks, size):
    assert ranks.run(jobs.ring, size, 3) == [True] * size


def test_values_arrive_as_they_are(ranks):
    assert ranks.run(jobs.pass_on_values, 2) == [[], []]


def test_a_failure_reaches_all_ranks_and_the_next_wire_works(ranks):
    first, *others = ranks.run(jobs.lose_and_renew, 3)
    assert first == ["", "", "True"]
    for rank, told in enumerate(others, 1):
        waited = f"\n    rank {rank} waited: for a test"
        assert told == [
            f"TaskError: rank 0: failure 0{waited}",
            f"TaskError: rank 0: failure 1{waited}",
            "True",
        ]


def test_a_killed_rank_is_noticed_by_those_that_wait_for_others(mortals, tmp_path):
    victim = mortals.start(jobs.wait_for_the_last, 3, str(tmp_path))[-1]
    until(lambda: len(list(tmp_path.iterdir())) == 3)
    os.kill(victim.pid, signal.SIGKILL)
    *others, last = mortals.results(3)
    assert last == (-signal.SIGKILL, "dead")
    for rank, (told, _) in enumerate(others):
        expected = "True RankError: rank 2 has gone: its process was ended"
        assert told == f"{expected}\n    rank {rank} waited: for a test"


def test_a_group_is_lost_also_where_another_rank_has_closed_its_connections(ranks):
    for ended in ranks.run(jobs.lose_after_another, 3):
        assert "timed out" not in ended.lower() or "1ms" in ended


def test_that_a_rank_hangs_is_told_also_if_others_end_because_of_it(ranks):
    for told in ranks.run(jobs.hang_and_leave, 3):
        assert told.count(" hangs: its process") == 2
        assert "gone" not in told
