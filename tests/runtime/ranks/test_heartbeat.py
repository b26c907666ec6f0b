"""When a rank is given up as silent, without other processes."""

import itertools
import os
import signal
import subprocess

import pytest

from autosched._lib import processes
from autosched.runtime.ranks import heartbeat
from autosched.runtime.ranks.heartbeat import Heartbeat


class Ticks:
    """An event that is waited for so many times before it is set."""

    def __init__(self, count):
        self.left = count

    def wait(self, _):
        self.left -= 1
        return self.left < 0


@pytest.fixture
def given_up(monkeypatch):
    """Look so many times, at so many seconds from each other; return the ranks that are given up."""

    def look(ticks, apart, silent, stopped):
        found = []
        beats = Heartbeat(None, 1, 1, None, found.append, 2, stopped)
        beats.is_waiting = silent
        beats.closed = Ticks(ticks)
        clock = itertools.count(0, apart)
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: next(clock))
        beats._check(10.0)
        monkeypatch.undo()
        return found

    return look


@pytest.mark.parametrize(
    ("ticks", "apart", "silent", "stopped", "expected"),
    [
        (49, 0.2, True, False, []),
        (52, 0.2, True, False, [0]),
        (100, 0.2, False, False, []),
        (1, 0.2, False, True, []),
        (2, 0.2, False, True, [2]),
        (20, 1000.0, True, False, []),  # as if this process itself had been stopped
    ],
)
def test_a_rank_is_given_up_after_the_time_in_which_this_one_ran(
    given_up, ticks, apart, silent, stopped, expected
):
    assert given_up(ticks, apart, silent, lambda: stopped) == expected


def test_a_process_that_was_stopped_in_between_is_not_given_up(given_up):
    seen = itertools.cycle([True, False])
    assert given_up(20, 0.2, False, lambda: next(seen)) == []


def test_a_stopped_process_is_told_from_others_by_start_and_place():
    if not processes.identity():
        pytest.skip("there is no /proc")
    place = processes.identity().rsplit(" ", 2)[0]
    with subprocess.Popen(["sleep", "30"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            started = processes._stat(child.pid)[processes._STARTED]
            known = [
                f"{place} {child.pid} {started}",
                f"{place} {child.pid} 1",
                f"? {child.pid} {started}",
            ]
            assert [processes.is_stopped(each) for each in [*known, ""]] == [
                True,
                False,
                False,
                False,
            ]
            assert not processes.has_ended(known[0])
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays until it is waited for
        assert [*map(processes.has_ended, [*known, ""])] == [True, True, False, False]
    assert processes.has_ended(known[0])
