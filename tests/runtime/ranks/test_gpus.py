"""Ranks with GPUs, simulated or real; copies go by way of host memory, or over NCCL."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.runtime.ranks import gpu_jobs
from tests.strategies import graphs

DEVICES = "cpu:0", "cuda:0", "cpu:1", "cuda:1"


def simulated_or_real(mark):
    """The seed of a simulated GPU for each rank; None for real ones."""
    real = pytest.param(None, id="real", marks=mark)
    return pytest.mark.parametrize("seed", [pytest.param(1, id="played"), real])


one_for_both = simulated_or_real(pytest.mark.cuda)
own_ones = simulated_or_real(pytest.mark.multigpu)


@one_for_both
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


@one_for_both
def test_a_value_goes_from_gpu_to_gpu_by_way_of_the_hosts(ranks, seed):
    for order in (None,) if seed is None else range(4):
        assert ranks.run(gpu_jobs.pass_on, 2, order) == [[True] * 4, []]


@one_for_both
def test_what_a_gpu_reads_arrives_in_the_same_page_locked_memory_in_every_run(ranks, seed):
    for pinned, more in ranks.run(gpu_jobs.keep_memory, 2, seed):
        assert pinned
        assert all(pinned)
        assert more == 0


@own_ones
@settings(max_examples=settings().max_examples // 3)
@given(
    data=st.data(),
    size=st.integers(2, 3),
    policy=st.sampled_from(["round_robin", "heft"]),
)
def test_runs_over_nccl_equal_those_of_one_process(ranks, seed, data, size, policy):
    size = size if seed is not None else 2
    devices = [f"cpu:{rank}" for rank in range(size)] + [f"cuda:{n}" for n in range(size)]
    graph = data.draw(graphs(devices))
    assume(not any(task.random for task in graph.tasks))
    order = None if seed is None else data.draw(st.integers(0, 10**6))
    found = ranks.run(gpu_jobs.run_on_gpus, size, graph, policy, order, None, 1)
    refused = [wrong[:1] for wrong in found if wrong and wrong[0].startswith("refused")]
    assert len(refused) in (0, size)
    assert refused or found == [[]] * size
