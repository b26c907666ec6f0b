"""Regions of several ranks: each rank compiles those that run there, and replicas round alike."""

import pytest

from tests.runtime.ranks import fusing_jobs as jobs
from tests.serial import assert_equal

WAYS = {
    "data_parallel": {"reduction": "gather"},
    "pipeline": {"split": {"[01]": "cpu:0", "[234]": "cpu:1"}, "chunks": 1, "schedule": "gpipe"},
}


@pytest.mark.parametrize("way", WAYS)
def test_fused_steps_equal_the_serial_run_of_their_graph(ranks, way):
    first, second = ranks.run(jobs.train, 2, way, "", WAYS[way])
    assert_equal(second[:2], first[:2], "rank 1")
    for _, _, same, regions, not_fused in (first, second):
        assert same == [True, True]
        assert regions == first[3] != []
        assert "could not" not in str(not_fused)


def test_a_region_that_its_rank_cannot_compile_is_called_task_by_task_on_all(ranks):
    first, second = ranks.run(jobs.train, 2, "data_parallel", "regions", WAYS["data_parallel"])
    assert_equal(second[:2], first[:2], "rank 1")
    assert first[2] == [True, True], "a serial run on rank 0, which could compile all"
    assert first[3] == second[3] == ["r0.F+1", "r1.F+1"]
    for *_, not_fused in (first, second):
        assert not_fused["r1.F+1"] == "rank 1: Inductor: ValueError: of a test"
    assert "r0.F+1" not in first[4]


def test_nothing_is_fused_where_one_rank_has_no_compiler(ranks):
    first, second = ranks.run(jobs.train, 2, "data_parallel", "everything", WAYS["data_parallel"])
    for found in (first, second):
        assert found[3] == []
        assert {*found[4].values()} == {"rank 1: none"}
    assert_equal(second[:2], first[:2], "rank 1")


def test_a_compiled_function_of_all_ranks_is_fused(ranks):
    first, second = ranks.run(jobs.call, 2, {"policy": "round_robin"})
    assert_equal(second[0], first[0], "rank 1")
    for _, regions, is_eager, is_close in (first, second):
        assert regions == first[1] != []
        assert not is_eager
        assert is_close
