"""Captured steps on ranks: collectives in a step, and functions of all ranks."""

import pytest

from tests.runtime.ranks import captured_jobs as jobs

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("step", ["collect_all", "overwrite", "on_dtensors"])
def test_functional_collectives_equal_eager_ones(ranks, step):
    for same, tasks in ranks.run(jobs.compare_collectives, 2, step):
        assert same
        assert not any("wait_tensor" in task for task in tasks)


def test_a_step_that_reduces_its_gradients_equals_the_eager_one(ranks):
    assert ranks.run(jobs.train_with_collectives, 2) == [True] * 2


def test_collectives_in_place_are_refused(ranks):
    for error in ranks.run(jobs.refuse_collective, 2):
        assert "the step calls c10d.allreduce_" in error
        assert "use all_reduce, all_gather_tensor and others of torch.distributed" in error


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ddp", "DistributedDataParallel communicates with other processes in backward; capture"),
        ("fsdp2", "fully_shard gathers parameters in hooks of modules and of autograd; capture"),
    ],
)
def test_wrapped_modules_are_refused_and_run_in_tasks(ranks, kind, why):
    for error in ranks.run(jobs.refuse_wrapped, 2, kind):
        assert error.startswith(f"CaptureError: {why}")
        assert "in one task of your own, by Graph.add" in error
    assert ranks.run(jobs.train_wrapped, 2, kind) == [True] * 2
