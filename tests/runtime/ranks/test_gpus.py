"""Ranks with GPUs, whose copies go by way of host memory: simulated GPUs, or one real one."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autosched.testing.strategies import graphs
from tests.runtime.ranks import gpu_jobs

pytestmark = pytest.mark.xdist_group("ranks")

DEVICES = "cpu:0", "cuda:0", "cpu:1", "cuda:1"


# The seed of a simulated GPU for each rank; None where both use one real GPU.
simulated_or_real = pytest.mark.parametrize(
    "seed", [pytest.param(1, id="played"), pytest.param(None, id="real", marks=pytest.mark.cuda)]
)


@simulated_or_real
@settings(max_examples=settings().max_examples * 2 // 3)
@given(data=st.data(), policy=st.sampled_from(["round_robin", "heft"]))
def test_runs_equal_those_of_one_process(ranks, seed, data, policy):
    graph = data.draw(graphs(DEVICES))
    assume(not any(task.random for task in graph.tasks))  # each process has its own generators
    outputs = data.draw(st.none() | st.sampled_from(DEVICES))
    order = None if seed is None else data.draw(st.integers(0, 10**6))
    found = ranks.run(gpu_jobs.run_on_gpus, 2, graph, policy, order, outputs)
    refused = [wrong[:1] for wrong in found if wrong and wrong[0].startswith("refused")]
    assert len(refused) in (0, 2)
    assert refused or found == [[]] * 2


@simulated_or_real
def test_a_value_goes_from_gpu_to_gpu_by_way_of_the_hosts(ranks, seed):
    for order in (None,) if seed is None else range(4):
        assert ranks.run(gpu_jobs.pass_on, 2, order) == [[True] * 4, []]


@simulated_or_real
def test_what_a_gpu_reads_arrives_in_the_same_page_locked_memory_in_every_run(ranks, seed):
    for pinned, more in ranks.run(gpu_jobs.keep_memory, 2, seed):
        assert pinned
        assert all(pinned)
        assert more == 0
