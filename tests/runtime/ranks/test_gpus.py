"""Ranks with GPUs, simulated or real; copies go by way of host memory, or over NCCL."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autosched as asc
from autosched.program.program import Stream
from autosched.runtime.ranks.backend import AcceleratorRanks
from tests.runtime.ranks import gpu_jobs
from tests.strategies import graphs


def simulated_or_real(mark):
    """The seed of a simulated GPU for each rank; None for real ones."""
    real = pytest.param(None, id="real", marks=mark)
    return pytest.mark.parametrize("seed", [pytest.param(1, id="played"), real])


one_for_both = simulated_or_real(pytest.mark.cuda)
own_ones = simulated_or_real(pytest.mark.multigpu)


def assert_runs_equal_those_of_one_process(ranks, seed, data, size, each):
    """Each rank has ``each`` GPUs of its own, or all share one, which 0 says."""
    devices = [f"{kind}:{rank}" for kind in ("cpu", "cuda") for rank in range(size)]
    graph = data.draw(graphs(devices))
    assume(not any(task.random for task in graph.tasks))  # each process has its own generators
    policy = data.draw(st.sampled_from(["round_robin", "heft"]))
    outputs = None if each else data.draw(st.none() | st.sampled_from(devices))
    order = None if seed is None else data.draw(st.integers(0, 10**6))
    ranks.run_drawn(gpu_jobs.run_on_gpus, size, graph, policy, order, outputs, each)


@one_for_both
@settings(max_examples=settings().max_examples * 2 // 3)
@given(data=st.data())
def test_runs_equal_those_of_one_process(ranks, seed, data):
    assert_runs_equal_those_of_one_process(ranks, seed, data, 2, 0)


@own_ones
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data(), size=st.integers(2, 3))
def test_runs_over_nccl_equal_those_of_one_process(ranks, seed, data, size):
    size = size if seed is not None else 2
    assert_runs_equal_those_of_one_process(ranks, seed, data, size, 1)


@own_ones
@pytest.mark.parametrize("size", [2, 3])
def test_gpus_send_to_each_other_at_once(ranks, seed, size):
    assert ranks.run(gpu_jobs.exchange, size, seed, False) == [["4.0"] * 4] * size


@own_ones
def test_a_task_that_raises_ends_the_run_of_all_gpus(mortals, seed):
    first, second = mortals.run(gpu_jobs.exchange, 2, seed, True)
    assert first[:2] == second[:2] == ["4.0"] * 2
    assert first[2].startswith("TaskError: task 'double0' on cuda:0 failed: ValueError: of a test")
    assert second[2].startswith(
        "TaskError: rank 0: task 'double0' on cuda:0 raised ValueError: of a"
    )
    for ended in (first, second):
        assert ended[3].startswith("RankError: a run failed before")


def test_no_host_waits_for_a_copy_of_a_run_that_has_failed():
    """NCCL does not notice that a process was killed: the event may never happen."""
    backend = AcceleratorRanks()
    backend.group = SimpleNamespace(why=("rank", "rank 1 has gone"), lost=asc.RankError)
    with pytest.raises(asc.RankError, match="event 3"):
        backend._until(SimpleNamespace(query=lambda: False), "event 3")


def test_a_host_waits_until_an_accelerator_has_come_to_an_event():
    backend = AcceleratorRanks()
    asked = [False, False, True]
    backend.direct = True
    backend.events = {3: SimpleNamespace(query=lambda: asked.pop(0))}
    backend.group = SimpleNamespace(why=None)
    moved = []
    backend.staging.unstage = lambda: moved.append(len(asked))
    backend.exchanges = SimpleNamespace(is_copied=lambda event: False)
    step = backend.wait(Stream("cpu:0", "compute"), 3)
    step()
    assert moved == [0]
