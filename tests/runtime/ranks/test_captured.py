"""Captured steps on ranks: functions of all ranks, and what communicates by itself."""

import re

import pytest
import torch

import autosched as asc
from tests.runtime.ranks import captured_jobs as jobs


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("all_reduce", "all_?reduce.* is a collective of torch.distributed.*by Graph.add"),
        ("dynamo", "all_?reduce.* is a collective of torch.distributed.*by Graph.add"),
        ("ddp", "DistributedDataParallel communicates with other processes in backward.*Graph.add"),
        ("fsdp2", "fully_shard gathers parameters in hooks of modules and of auto.*by Graph.add"),
        ("generator", "ScheduleError: .* draws from a torch.Generator, which would advance on one"),
        ("memory", "HazardError: 'a' and 'b' share memory, and 'a' is written in place"),
        ("backend", "ScheduleError: torch.compile compiles a graph on each rank by itself"),
        ("gradient", "GradientError: "),
    ],
)
def test_what_ranks_cannot_do_together_is_refused(ranks, what, message):
    for error in ranks.run(jobs.refuse, 2, what):
        assert re.search(message, error, re.DOTALL), error


@pytest.mark.parametrize(
    ("size", "policy"), [pytest.param(2, "heft", marks=pytest.mark.slow), (3, "round_robin")]
)
def test_a_training_step_of_all_ranks_equals_the_eager_one_on_each(ranks, size, policy):
    assert ranks.run(jobs.train_together, size, policy) == [[True] * 4] * size


@pytest.mark.parametrize("outputs", [None, "cpu:1"])
def test_results_are_on_all_ranks_or_where_outputs_says_and_no_input_is_sent(ranks, outputs):
    x = torch.arange(16.0).view(4, 4) * 2
    for rank, (result, left, sent) in enumerate(ranks.run(jobs.call_together, 2, outputs)):
        assert torch.equal(left, x * 2), "written arguments are on all ranks"
        if outputs is not None and rank == 0:
            assert result == (None, {"second": None})
        else:
            assert torch.equal(result[0], x[:2])
            assert torch.equal(result[1]["second"], x[2:])
        assert not sent


@pytest.mark.parametrize(
    ("how", "call", "message"),
    [
        (
            "constant",
            0,
            "ScheduleError: rank 1: its capture of '.*fn' differs from rank 0's\n    rank 0:  task mul:",
        ),
        (
            "first shape",
            0,
            "ScheduleError: rank 1: its capture of '.*fn' differs from rank 0's\n    rank 0:  input",
        ),
        ("capture", 0, "CaptureError: (rank 1: )?'.*fn' cannot be captured"),
        ("later shape", 1, "ScheduleError: the ranks call '.*fn' differently: rank 1 needs a new"),
        ("mode", 1, "ScheduleError: the ranks call '.*fn' differently: rank 1 needs a new"),
        ("arguments", 1, "(Capture|Schedule)Error: .* cannot be called like that"),
    ],
)
def test_ranks_that_call_differently_get_an_error_and_go_on(ranks, how, call, message):
    for errors in ranks.run(jobs.call_differently, 3, how):
        assert re.match(message, errors[call]), errors
        if call:
            assert errors[0] == errors[2] == "nothing"


def test_shared_memory_on_one_rank_is_an_error_on_all(ranks):
    first, second = ranks.run(jobs.overlap_on_one_rank, 2)
    assert second[1].startswith("HazardError: 'a' and 'b' share memory, and 'a' is written")
    assert first[1].startswith("RankError: rank 1 failed: 'a' and 'b' share memory")
    for ended in (first, second):
        assert ended[0] == "nothing"
        assert ended[2].startswith("RankError: a run failed before")


def test_a_scheduled_capture_has_outputs_where_they_are_made(ranks):
    first, second = ranks.run(jobs.schedule_captured, 2)
    assert torch.equal(first[0]["result"], torch.arange(4.0) + 1)
    assert second[0] == {}
    assert first[1] == "nothing"
    assert second[1].startswith("GraphError: 'weight.grad' was made on another rank; autosched.c")


def test_one_process_can_play_all_ranks():
    """The same program as on a cluster: it can be planned and drawn without one."""
    x, w = torch.arange(16.0).view(4, 4), torch.eye(4)
    expected = jobs.halves(x.clone(), w)
    machine = asc.Machine.emulated(gpus=0, hosts=2)
    with asc.compile(jobs.halves, machine, policy="round_robin", backend="host") as run:
        found = run(x, w)
        ends = dict(run.schedule(x, w).program.outputs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1]["second"], expected[1]["second"])
    assert torch.equal(x, torch.arange(16.0).view(4, 4) * 2)
    assert ends["result.0.cpu:0"] == ends["x.written.cpu:0"] == "cpu:0"
    assert ends["result.0.cpu:1"] == ends["x.written.cpu:1"] == "cpu:1"
