"""Stages on several processes: on all ranks bit for bit what one process makes of the same stages."""

from typing import Any

import pytest
import torch

import autosched as asc
from tests.runtime.ranks import stage_jobs as jobs
from tests.serial import assert_equal, some

SPLIT = {"0": "cpu:0", "2": "cpu:1"}
REPLICAS = {"replicas": 2, "chunks": 2, "schedule": "1f1b", "reduction": "exchange"}
ORDERS = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def assert_same(found: list[Any], expected: Any) -> None:
    for rank, one in enumerate(found):
        assert_equal(one, expected, f"rank {rank}")


@pytest.mark.parametrize("order", some(ORDERS, "1f1b"))
def test_a_pipeline_equals_that_of_one_process(ranks, order):
    """With the first steps of optimizers that make a state then."""
    how = {"chunks": 2, "schedule": order, "clip_grad_norm": 0.1}
    how["optimizer"] = "adam" if order == "1f1b" else "momentum"
    expected = jobs.train("pipeline", how, [8, 8], 2)
    assert_same(ranks.run(jobs.train, 2, "pipeline", how, [8, 8]), expected)


@pytest.mark.parametrize("order", some(ORDERS[:3], "gpipe"))
def test_stages_with_dropout_draw_from_the_generators_of_their_ranks(ranks, order):
    """On emulated hosts as on ranks that are seeded alike."""
    how = {"split": SPLIT, "chunks": 2, "schedule": order, "dropout": True}
    if order == "interleaved":
        how["split"] = {"0": "cpu:0", "1": "cpu:1", "[23]": "cpu:0", "4": "cpu:1"}
    expected = jobs.train("pipeline", how, [8, 8], 2)
    assert_same(ranks.run(jobs.train, 2, "pipeline", how, [8, 8]), expected)


@pytest.mark.slow
def test_model_parallel_steps_equal_those_of_one_process(ranks):
    how = {"split": SPLIT}
    expected = jobs.train("model_parallel", how, [8, 8], 2)
    assert_same(ranks.run(jobs.train, 2, "model_parallel", how, [8, 8]), expected)


@pytest.mark.slow
def test_replicas_of_a_pipeline_equal_those_of_one_process(ranks):
    expected = jobs.train("pipeline", REPLICAS, [8, 8], 4)
    assert_same(ranks.run(jobs.train, 4, "pipeline", REPLICAS, [8, 8]), expected)


def test_changes_of_a_stage_by_its_rank_count(ranks):
    how = {"split": SPLIT, "chunks": 2, "schedule": "1f1b", "optimizer": "sgd"}
    (refused, model), other = ranks.run(jobs.change, 2, how)
    assert "call collect() on all ranks before state_dict()" in refused
    assert_equal(other[1], model, "rank 1")


def test_changes_between_steps_count_as_in_one_process(ranks):
    """Of parameters, moments, buffers, rates, modes, groups; also where a state is loaded."""
    assert_same(ranks.run(jobs.change_everything, 2), jobs.change_everything(2))


@pytest.mark.parametrize("outputs", some([None, "cpu:0"], None))
def test_a_forward_has_its_result_on_one_rank_and_new_state_on_all(ranks, outputs):
    """By default on that of the last stage; in train mode, in eval mode, and with other rows."""
    options = {} if outputs is None else {"outputs": outputs}
    (expected, buffers) = jobs.forward({**options, "backend": "virtual"}, 2)
    found = ranks.run(jobs.forward, 2, options)
    result, nothing = reversed(found) if outputs is None else found
    assert_equal(result[0], expected, "results")
    assert nothing[0] == [{"hidden": None, "y": None}] * 4
    for rank, (_, own) in enumerate(found):
        assert_equal(own, buffers, f"rank {rank}: what a call makes, and what any stage writes")


def test_what_cannot_span_ranks_is_refused_on_all_of_them(ranks):
    rows = "ScheduleError: rank 1 passes 9 rows, and rank 0 8; all ranks of such"
    for step, forward, dtype, in_flight in ranks.run(jobs.refuse, 2):
        assert step.startswith(rows)
        assert forward.startswith(rows)
        assert "rank 1:  item 0 of the batch is a tensor of float64" in dtype
        assert "in_flight= of model_parallel is for one process" in in_flight


@pytest.mark.parametrize("size", some([2, 4], 4))
def test_a_checkpoint_of_stages_is_loaded_on_two_ranks_and_in_one_process(ranks, tmp_path, size):
    how = {"schedule": "1f1b", "chunks": 2, "split": SPLIT} if size == 2 else REPLICAS
    found = ranks.run(jobs.save, size, "pipeline", how, str(tmp_path))
    how = {"schedule": "1f1b", "chunks": 2, "split": SPLIT}
    here = asc.Machine.emulated(gpus=0, hosts=2)
    with jobs.step_on(here, "pipeline", how, seed=1) as step:
        step.load(tmp_path)
        assert_equal(jobs.facts(step), found[0][1:], "in one process")
    for rank, (loss, *loaded) in enumerate(ranks.run(jobs.load, 2, "pipeline", how, str(tmp_path))):
        assert_equal(loaded, found[0][1:], f"rank {rank}")
        assert size == 4 or torch.equal(loss, found[0][0])
