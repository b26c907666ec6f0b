"""Failures of a rank: what all others are told, and that nothing hangs."""

import os
import random
import re
import signal
import time

import pytest

from tests.runtime.ranks import jobs
from tests.runtime.ranks.processes import until

WAITS = {
    0: "receive third <- cpu:2, instruction",
    2: "receive second <- cpu:1, instruction",
}
GOOD = [["-2", "0"], ["", ""], ["", ""]]


def told(found, why):
    """Check what three ranks are told where rank 1 fails in the third run, for a reason."""
    for rank in (0, 2):
        ended = found[rank]
        assert ended[:2] == GOOD[rank]
        assert re.match(why, ended[2]), ended[2]
        assert f"rank {rank} waited: {WAITS[rank]}" in ended[2]
        assert ended[3].startswith("RankError: a run failed before, and all ranks must start again")
        assert "(late)" not in ended[2]


def test_a_task_that_raises_is_named_on_all_ranks(mortals, tmp_path):
    found = mortals.run(jobs.fail_in_run, 3, "raise", str(tmp_path))
    told(found, "TaskError: rank 1: task 'second' on cpu:1 raised ValueError: of a test, instruct")
    assert found[1][2].startswith("TaskError: task 'second' on cpu:1 failed: ValueError: of a test")


def test_an_interrupted_rank_is_named_on_all_others(mortals, tmp_path):
    found = mortals.run(jobs.fail_in_run, 3, "interrupt", str(tmp_path))
    told(found, "RankError: rank 1 was interrupted")
    assert found[1][2] == "KeyboardInterrupt: "


def test_a_killed_rank_is_named_on_all_others(mortals, tmp_path):
    victim = mortals.start(jobs.fail_in_run, 3, "kill", str(tmp_path))[1]
    until((tmp_path / "here").exists)
    os.kill(victim.pid, signal.SIGKILL)
    first, second, third = mortals.results(3)
    assert second == (-signal.SIGKILL, "dead")
    told([first[0], None, third[0]], "RankError: rank 1 has gone: its process was ended")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_killed_at_any_moment_is_named_on_all_others(mortals, tmp_path, seed):
    source = random.Random(seed)
    victim = source.randrange(3)
    processes = mortals.start(jobs.go_on, 3, "run", str(tmp_path))
    until(lambda: len([*tmp_path.iterdir()]) == 3)
    time.sleep(source.random() / 10)
    os.kill(processes[victim].pid, signal.SIGKILL)
    for rank, (said, _) in enumerate(mortals.results(3)):
        assert rank == victim or said.startswith(f"rank {victim} has gone: its process was ended")


def test_ranks_wait_for_a_task_longer_than_for_each_other_to_meet(mortals, tmp_path):
    """The limit of torch's groups for meeting ended all jobs that took longer, whatever they did."""
    mortals.timeout = 2.0
    found = mortals.run(jobs.fail_in_run, 3, "long", str(tmp_path))
    assert found == [["-2", "0", "2", "4"], *[[""] * 4] * 2]


@pytest.mark.parametrize("how", ["hang", "hang alone"])
def test_a_late_run_is_given_up_on_all_ranks(mortals, tmp_path, how):
    for rank, ended in enumerate(mortals.run(jobs.fail_in_run, 3, how, str(tmp_path))):
        first, *more = ended[2].splitlines()
        own = first == "RunTimeoutError: the run did not end in time:"
        assert own or re.match("RankError: rank [012] gave up a run", first)
        assert rank == 0 or how == "hang" or not own
        assert rank == 1 or f"waited: {WAITS[rank]}" in "\n".join(more)
        assert "(late)" not in ended[2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_copy_ends_of_which_a_part_has_been_sent(mortals, tmp_path, victim):
    """gloo wakes nobody who waits for it."""
    processes = mortals.start(jobs.send_large, 2, str(tmp_path))
    until((tmp_path / "ready").exists)
    os.kill(processes[1].pid, signal.SIGSTOP)
    (tmp_path / "send").touch()
    time.sleep(0.3)  # by then connections are full
    os.kill(processes[victim].pid, signal.SIGKILL)
    os.kill(processes[1].pid, signal.SIGCONT)
    said, _ = mortals.results(2)[1 - victim]
    assert said.startswith(f"rank {victim} has gone: its process was ended")
    assert f"rank {1 - victim} waited: {'send' if victim else 'receive'} first" in said


def test_a_broadcast_ends_where_a_rank_is_killed(mortals, tmp_path):
    processes = mortals.start(jobs.go_on, 3, "broadcast", str(tmp_path))
    until(lambda: len([*tmp_path.iterdir()]) == 3)
    os.kill(processes[2].pid, signal.SIGKILL)
    for rank, (said, _) in enumerate(mortals.results(3)[:2]):
        assert (
            said
            == f"rank 2 has gone: its process was ended, or its host is lost\n    rank {rank} waited: a row"
        )


@pytest.mark.parametrize(
    ("how", "third"),
    [
        ("", ["done", "done"]),
        ("before", ["ScheduleError: rank 1: ValueError: of a test", "own ValueError: of a test"]),
        ("after", ["GraphError: rank 1: of a test", "GraphError: of a test"]),
        (
            "another call",
            ["RankError: rank 1 calls another where rank 0 calls inside; all ranks"] * 2,
        ),
    ],
)
def test_ranks_agree_or_raise_one_error_and_go_on(ranks, how, third):
    for rank, found in enumerate(ranks.run(jobs.agree, 2, how)):
        assert found[:2] == ["[[0, 7], [1, 7]]", "True"]
        assert found[2].startswith(third[rank])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "graph",
            "ScheduleError: rank 1: its graph 'another' differs from rank 0's\n    rank 0:  inp",
        ),
        ("argument", "ScheduleError: rank 1: graph must be a Graph"),
        ("policy", "ScheduleError: rank 0: unknown policy 'nonsense'"),
        ("call", "RankError: rank 1 calls Machine.cluster() where rank 0 calls schedule()"),
        ("input", "GraphError: rank 0 misses input 'x' of graph 'round trip'"),
    ],
)
def test_ranks_that_differ_get_one_error_before_anything_runs(ranks, what, message):
    for found in ranks.run(jobs.differ, 3, what):
        assert re.sub(": rank [01]: (?!its)", ": ", found).startswith(
            re.sub(": rank [01]: (?!its)", ": ", message)
        )
