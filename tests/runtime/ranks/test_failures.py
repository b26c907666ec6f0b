"""Failures of a rank: what all others are told, and that nothing hangs."""

import os
import re
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from autosched.runtime.ranks.session import Session
from tests.runtime.ranks import jobs
from tests.runtime.ranks.processes import until

WAITS = {
    0: "receive third <- cpu:2, instruction",
    2: "receive second <- cpu:1, instruction",
}


def test_a_task_that_raises_is_named_on_all_ranks_and_runs_go_on(ranks, tmp_path):
    for rank, ended in enumerate(ranks.run(jobs.fail_in_run, 3, "raise", str(tmp_path))):
        failed = ended.pop(2)
        assert ended == (["-2", "0", "4", "6"] if rank == 0 else [""] * 4)
        if rank == 1:
            assert failed.startswith(
                "TaskError: task 'second' on cpu:1 failed: ValueError: of a test"
            )
            continue
        why = "TaskError: rank 1: task 'second' on cpu:1 raised ValueError: of a test, instruction"
        assert failed.startswith(why)
        assert f"rank {rank} waited: {WAITS[rank]}" in failed


class Told:
    """What uses a wire."""

    def __init__(self):
        self.is_told = False

    def where(self):
        return ""

    def lost(self):
        self.is_told = True


class Interrupted(weakref.WeakSet):
    """A set in whose iteration another thread begins something."""

    begin = None

    def __iter__(self):
        for item in super().__iter__():
            self.begin()
            yield item


def test_a_sum_that_begins_while_the_wire_is_lost_does_not_hide_the_failure():
    session = object.__new__(Session)
    session.generation, session.rank, session._failed, session._wire = 0, 0, -1, None
    session._guard = threading.Lock()
    session._watch, session.hanging = SimpleNamespace(tell=lambda _: None), ""
    session.store = SimpleNamespace(set=lambda *_: None)
    session._told = Interrupted()
    before, later = Told(), Told()
    beginning = threading.Thread(target=session.tell_when_lost, args=[later], daemon=True)

    def begin():
        beginning.start()
        beginning.join(0.05)

    session.tell_when_lost(before)
    session._told.begin = begin
    session._lose(0)
    beginning.join()
    assert before.is_told
    assert later in {*weakref.WeakSet.__iter__(session._told)}


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_runs_in_flight_fail_together_and_go_on_together(ranks, tmp_path, how):
    found = ranks.run(jobs.fail_in_flight, 3, how, str(tmp_path))
    told = {
        "raise": "TaskError: rank 1: task 'second' on cpu:1 raised ValueError: of a test",
        "hang": "RankError: rank 1 gave up a run",
    }[how]
    own = {"raise": "TaskError: task 'second' on", "hang": "RunTimeoutError: the run did not end"}
    for rank, ended in enumerate(found):
        right = [str(111 * number) if rank == 0 else "" for number in range(12)]
        assert ended[:4] == right[:4]  # the fifth may still be under way
        assert ended[-1] == right[-1]
        assert ended[5].startswith(own[how] if rank == 1 else told)
        executed = "rank 1 executed task 'second' on cpu:1, instruction"
        assert rank == 1 or (executed in ended[5]) == (how == "hang")
        assert all(
            text == good or "Error: " in text for text, good in zip(ended, right, strict=True)
        )


def test_a_run_that_one_rank_gave_up_fails_on_all(ranks):
    """Else each run after a failure would join calls that do not belong together."""
    sender, receiver = ranks.run(jobs.fail_behind, 2)
    assert sender[:3] + sender[4:] == [""] * 5
    assert sender[3].startswith("TaskError: rank 1: task 'late' on cpu:1 raised ValueError")
    assert receiver[2].startswith("TaskError: task 'late' on cpu:1 failed")
    assert receiver[3].startswith("RankError: another rank gave up this run")
    assert receiver[:2] + receiver[4:] == ["0", "11", "44", "55"]


def test_runs_in_flight_end_where_a_rank_is_killed(mortals, tmp_path):
    victim = mortals.start(jobs.fail_in_flight, 3, "kill", str(tmp_path))[1]
    until((tmp_path / "here").exists)
    os.kill(victim.pid, signal.SIGKILL)
    first, _, third = mortals.results(3)
    for ended, _ in (first, third):
        assert ended[5].startswith("RankError: rank 1 has gone: its process was ended")
        assert all("Error: " in text for text in ended[5:])


def test_a_rank_that_has_ended_its_part_is_warned_at_the_end_of_its_program(ranks):
    (warned,), (raised,) = ranks.run(jobs.end_after_sending, 2)
    assert raised.startswith("task 'second' on cpu:1 failed: ValueError: of a test")
    assert warned.startswith("rank 1: task 'second' on cpu:1 raised ValueError: of a test")
    assert warned.endswith("rank 0 had ended its part of the run")


def test_an_interrupted_rank_is_named_on_all_others(ranks, tmp_path):
    for rank, ended in enumerate(ranks.run(jobs.fail_in_run, 3, "interrupt", str(tmp_path))):
        failed = ended[2]
        if rank == 1:
            assert failed == "KeyboardInterrupt: "
            continue
        assert failed.startswith("RankError: rank 1 was interrupted")
        assert f"rank {rank} waited: {WAITS[rank]}" in failed


def test_a_killed_rank_is_named_on_all_others(mortals, tmp_path):
    victim = mortals.start(jobs.fail_in_run, 3, "kill", str(tmp_path))[1]
    until((tmp_path / "here").exists)
    os.kill(victim.pid, signal.SIGKILL)
    first, second, third = mortals.results(3)
    assert second == (-signal.SIGKILL, "dead")
    for rank, (ended, _) in ((0, first), (2, third)):
        assert len(ended) == 3
        assert ended[2].startswith("RankError: rank 1 has gone: its process was ended")
        assert f"rank {rank} waited: {WAITS[rank]}" in ended[2]
        assert "(late)" not in ended[2]


@pytest.mark.parametrize("heartbeat", [10.0, 1.0])
def test_a_stopped_rank_is_named_on_all_others(mortals, tmp_path, heartbeat):
    """When it goes on, it is told so itself, or finds first that the others have gone."""
    victim = mortals.start(jobs.fail_in_run, 3, "stop", str(tmp_path), heartbeat)[1]
    until((tmp_path / "here").exists)
    os.kill(victim.pid, signal.SIGSTOP)
    until(lambda: all(mortals.has_result(rank) for rank in (0, 2)))
    (tmp_path / "go on").touch()
    os.kill(victim.pid, signal.SIGCONT)
    for rank, (ended, _) in enumerate(mortals.results(3)):
        why = "hangs: its process was stopped or does not answer"
        if rank == 1:
            assert re.match(f"RankError: (this rank {why}|rank [02] has gone)", ended[2])
        else:
            assert ended[2].startswith(f"RankError: rank 1 {why}")
            assert f"rank {rank} waited: {WAITS[rank]}" in ended[2]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_whichever_rank_is_stopped_all_others_are_told(mortals, tmp_path, victim):
    """Also a rank whose other connections have been closed by those that were told before it."""
    process = mortals.start(jobs.run_on, 3, str(tmp_path))[victim]
    until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
    os.kill(process.pid, signal.SIGSTOP)
    others = {0, 1, 2} - {victim}
    until(lambda: all(mortals.has_result(rank) for rank in others))
    os.kill(process.pid, signal.SIGKILL)
    found = mortals.results(3)
    for rank in others:
        assert found[rank][0].startswith(f"rank {victim} hangs"), found[rank]


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
def test_the_connections_of_ranks_break_where_a_host_is_lost(ranks):
    assert ranks.run(jobs.connections, 3) == [[1250, 1250]] * 3


def test_a_rank_may_leave_while_another_still_connects(ranks):
    assert ranks.run(jobs.connect_late, 3) == ["", "", "rank 0"]


@pytest.mark.parametrize("group", ["watch", "wire"])
def test_a_rank_that_is_killed_while_ranks_connect_is_named_on_all_others(mortals, group):
    mortals.start(jobs.connect, 3, 1, group)
    (first, _), killed, (third, _) = mortals.results(3)
    assert killed == (-signal.SIGKILL, "dead")
    for error in first, third:
        assert error.splitlines()[0] == "rank 1 has gone: its process was ended"


def test_a_wire_is_closed_while_others_begin_to_use_it(ranks):
    """A thread that raised on its way would not wake those that wait."""
    assert ranks.run(jobs.lose_meanwhile, 1) == [[True, True]]


def test_no_thread_waits_in_torch_for_a_rank_that_does_not_come(ranks):
    """At the exit it would end the process by a signal."""
    ((error, waiting),) = ranks.run(jobs.join_alone, 1, 2)
    assert error.startswith("the ranks did not connect: ")
    assert not waiting


def test_what_the_user_does_with_torchs_group_keeps_its_own_timeout(ranks):
    assert ranks.run(jobs.join_alone, 1, 1) == [("0:30:00", [])]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_connect_is_named_on_all_others_and_runs_go_on(ranks, victim):
    """All connect again, under new names, and their runs stay together."""
    found = ranks.run(jobs.fail_to_connect, 2, victim)
    assert found[victim][0] == "the ranks did not connect: of a test"
    why = f"rank {victim} gave up: the ranks did not connect: of a test\n"
    assert found[1 - victim][0].startswith(why)
    assert [ended[1:] for ended in found] == [["", ""], ["3", "5"]]


@pytest.mark.parametrize(("victim", "in_flight"), [(0, 1), (1, 1), (0, 2)])
def test_a_copy_ends_of_which_a_part_has_been_sent(mortals, tmp_path, victim, in_flight):
    """gloo wakes nobody who waits for it."""
    processes = mortals.start(jobs.send_large, 2, str(tmp_path), in_flight)
    until((tmp_path / "ready").exists)
    os.kill(processes[1].pid, signal.SIGSTOP)
    (tmp_path / "send").touch()
    time.sleep(0.3)  # by then connections are full
    os.kill(processes[victim].pid, signal.SIGKILL)
    os.kill(processes[1].pid, signal.SIGCONT)
    told, _ = mortals.results(2)[1 - victim]
    assert told.startswith(f"rank {victim} has gone: its process was ended")
    assert f"rank {1 - victim} waited: {'send' if victim else 'receive'} first" in told


def test_a_rank_that_computes_is_not_given_up(mortals, tmp_path):
    for rank, ended in enumerate(mortals.run(jobs.fail_in_run, 3, "busy", str(tmp_path), 1.0)):
        assert ended == (["-2", "0", "2", "4", "6"] if rank == 0 else [""] * 5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "graph",
            "ScheduleError: rank 1: its graph 'another' differs from rank 0's\n    rank 0:  inp",
        ),
        ("argument", "ScheduleError: rank 1: graph must be a Graph"),
        ("policy", "ScheduleError: unknown policy 'nonsense'"),
        ("call", "RankError: rank 1 calls Machine.cluster() where rank 0 calls schedule()"),
        ("missing", "RankError: rank 1 did not come within 1 s"),
    ],
)
def test_ranks_that_differ_get_one_error_before_anything_runs(ranks, what, message):
    for rank, found in enumerate(ranks.run(jobs.differ, 3, what)):
        assert found.startswith(message) or (what == "missing" and rank == 1)


def test_a_missing_input_is_named_on_its_rank(ranks):
    first, *_ = ranks.run(jobs.differ, 3, "input")
    assert first.startswith("GraphError: rank 0 misses input 'x' of graph 'round trip'")


def test_a_sender_compares_structures_before_it_sends(ranks):
    first, second, third = ranks.run(jobs.differ, 3, "structure")
    assert first.startswith(
        "ScheduleError: 'first' was float32 (2,) in the last run, for which rank 1 is ready"
    )
    for other in (second, third):
        assert other.startswith("RankError: rank 0: send first -> cpu:1 failed with ScheduleError")


@pytest.mark.parametrize("how", ["hang", "hang alone"])
def test_the_task_of_a_late_run_is_named_on_all_ranks(ranks, tmp_path, how):
    """Also if one rank alone has a timeout."""
    for rank, ended in enumerate(ranks.run(jobs.fail_in_run, 3, how, str(tmp_path))):
        first, *more = ended[2].splitlines()
        own = first == "RunTimeoutError: the run did not end in time:"
        assert own or re.fullmatch("RankError: rank [012] gave up a run", first)
        assert rank == 0 or how == "hang" or not own
        assert "    rank 1 executed task 'second' on cpu:1, instruction 4 of 12" in more
        assert rank == 1 or f"    rank {rank} waited: {WAITS[rank]}" in ended[2]
        assert "(late)" not in ended[2]
        assert ended[3:] == ([""] * 2 if rank else ["4", "6"])


def test_a_forked_process_has_joined_nothing(ranks):
    assert ranks.run(jobs.fork, 2) == [[True, 0, True]] * 2
